"""`results`: what is shown, what is never mixed, and what cannot steer a terminal or a spreadsheet."""

import csv
import dataclasses
import io
import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from tilewright.db.environment import Environment
from tilewright.db.rows import RecordRow, StoredRecord, Verdict
from tilewright.problem import WorkloadCase, load_problem
from tilewright.report.queries import Sourced, best_per_case
from tilewright.report.tables import CSV_COLUMNS, results_csv, results_json, results_text

PROBLEM = load_problem()
H200 = Environment("cuda", "NVIDIA H200", 132, 140 << 30, "9.0", "3.6.0")
INTERPRETER = Environment("interpret", "Triton interpreter", 1, 0, "0.0", "3.9.0")
PLAN = [{"template": name, "values": {}} for name in ("qkv_norm_rope_gemm", "attention_flash", "output_gemm")]


def a_record(case: WorkloadCase, *, environment: Environment = H200, source: str = "database", **row: Any) -> Sourced:
    content: dict[str, Any] = {
        "case_key": case.key, "plan": PLAN, "digest": "d" * 16, "source_hash": "s" * 16, "verdict": Verdict.BEATS_ALL,
        "median_us": 600.0, "low_us": 597.1, "high_us": 603.9, "default_us": 900.0, "baseline": "composed",
        "baseline_us": 660.0, "floor_us": 540.0, "created_at": datetime(2026, 1, 1, tzinfo=UTC), **row,
    }  # fmt: skip
    return Sourced(source, StoredRecord(RecordRow(**content), environment, PROBLEM.name, case.name, case.shape_axes))


def a_case(batch_size: int = 4, seq_len: int = 512) -> WorkloadCase:
    return PROBLEM.case(batch_size=batch_size, seq_len=seq_len)


def full_suite(**row: Any) -> list[Sourced]:
    return [a_record(case, **row) for case in PROBLEM.suite("full")]


def invalid(sourced: Sourced, why: str) -> Sourced:
    return Sourced(sourced.source, dataclasses.replace(sourced.stored, invalid=why))


def test_a_row_compares_with_the_default_the_baseline_and_the_floor() -> None:
    (group,) = best_per_case([a_record(a_case())])
    (row,) = group.rows
    assert (row.speedup_default, row.speedup_baseline, row.percent_sol) == pytest.approx((1.5, 1.1, 90))


def test_a_complete_suite_is_averaged() -> None:
    records = full_suite()
    first = records[0].stored
    slow = dataclasses.replace(first.record, median_us=2200.0, default_us=2200.0, floor_us=1100.0)
    records[0] = Sourced("database", dataclasses.replace(first, record=slow))
    (group,) = best_per_case(records)
    total = group.aggregate
    assert (total.suite, total.cases, total.complete) == ("full", 16, True)
    assert total.mean_us == pytest.approx((2200 + 15 * 600) / 16)
    assert total.geomean_speedup_default == pytest.approx(1.5 ** (15 / 16))
    assert total.mean_percent_sol == pytest.approx((50 + 15 * 90) / 16)


def test_an_incomplete_suite_is_flagged_and_names_what_is_missing() -> None:
    (group,) = best_per_case(full_suite()[2:])
    assert group.aggregate.missing == ("b1s128", "b4s128")
    text = results_text([group])
    assert "incomplete: 2 of the full suite's 16 cases missing (b1s128, b4s128)" in text
    assert "(incomplete)" in text


def test_cases_outside_the_suite_do_not_enter_its_mean() -> None:
    (group,) = best_per_case([*full_suite(), a_record(a_case(3, 77), median_us=1e6)])
    assert len(group.rows) == 17
    assert group.aggregate.mean_us == pytest.approx(600)


@pytest.mark.parametrize(
    "other", [{"gpu_name": "NVIDIA B200"}, {"triton": "3.9.0"}, {"sm_count": 60}, {"mig": "1g.18gb"}], ids=str
)
def test_cards_and_compilers_are_never_mixed(other: dict[str, Any]) -> None:
    elsewhere = dataclasses.replace(H200, **other)
    groups = best_per_case([a_record(a_case()), a_record(a_case(), environment=elsewhere, median_us=1.0)])
    assert sorted(group.rows[0].median_us or 0 for group in groups) == [1.0, 600.0]


def test_regimes_are_never_mixed() -> None:
    assert len(best_per_case([a_record(a_case()), a_record(a_case(), regime="eager")])) == 2


def test_an_own_record_hides_the_shipped_one() -> None:
    records = [a_record(a_case(), median_us=700.0), a_record(a_case(), median_us=600.0, source="shipped")]
    (group,) = best_per_case(records)
    assert [(row.source, row.median_us) for row in group.rows] == [("database", 700.0)]


def test_the_newest_of_one_source_is_shown() -> None:
    new = a_record(a_case(), median_us=650.0, created_at=datetime(2026, 2, 1, tzinfo=UTC))
    (group,) = best_per_case([a_record(a_case()), new])
    assert group.rows[0].median_us == 650.0


def test_interpreter_times_are_never_shown() -> None:
    case = PROBLEM.suite("smoke")[0]
    groups = best_per_case([a_record(case, environment=INTERPRETER, median_us=123456.0)])
    shown = results_text(groups) + results_csv(groups) + json.dumps(results_json(groups))
    assert "123456" not in shown
    assert "verified" in results_text(groups)
    assert "1 of the smoke suite's 3 cases verified" in results_text(groups)


def test_a_broken_record_is_marked_and_keeps_the_others_visible() -> None:
    broken = invalid(a_record(a_case(8, 512)), "plan is not a JSON list of stages")
    (group,) = best_per_case([a_record(a_case()), broken])
    text = results_text([group])
    assert "invalid" in text
    assert "plan is not a JSON" in text
    assert "600.0" in text
    assert "b8s512" in group.aggregate.missing


def test_a_sound_record_is_preferred_to_a_broken_newer_one() -> None:
    broken = invalid(a_record(a_case(), created_at=datetime(2026, 3, 1, tzinfo=UTC)), "cut off")
    (group,) = best_per_case([broken, a_record(a_case())])
    assert group.rows[0].invalid == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_tables_fit_80_columns(terminal: bool) -> None:
    records = [a_record(a_case(64, 131072), median_us=123456.7, low_us=123400.1, high_us=123499.9), *full_suite()]
    long_name = dataclasses.replace(H200, gpu_name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    text = results_text(best_per_case([*records, a_record(a_case(), environment=long_name)]), terminal=terminal)
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= 80
    for value in ("b64s131072", "123456.7", "0.6%", "1.50x", "1.10x", "90"):
        assert value in text


def test_text_for_a_pipe_is_plain() -> None:
    text = results_text(best_per_case(full_suite()))
    assert text.isascii() or "\N{HORIZONTAL ELLIPSIS}" in text
    assert "\x1b" not in text
    assert "mean 600.0 us, 90 % of speed of light" in text
    assert "geometric mean of speed-ups: 1.50x the default, 1.10x the best baseline" in text


def test_control_characters_and_markup_in_names_are_shown_not_obeyed() -> None:
    evil = dataclasses.replace(H200, gpu_name="GPU\x1b[31m[bold]x[/bold]\u202e")
    text = results_text(best_per_case([a_record(a_case(), environment=evil)]))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]x[/bold]" in text


def test_csv_defuses_formulas_and_keeps_numbers() -> None:
    evil = dataclasses.replace(H200, gpu_name='=HYPERLINK("x")')
    rows = list(csv.DictReader(io.StringIO(results_csv(best_per_case([a_record(a_case(), environment=evil)])))))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert rows[0]["gpu"] == '\'=HYPERLINK("x")'
    assert float(rows[0]["median_us"]) == 600.0


def test_json_states_its_schema_and_survives_a_round_trip() -> None:
    document = results_json(best_per_case(full_suite()))
    assert json.loads(json.dumps(document)) == document
    assert document["schema"] == 1
    (group,) = document["groups"]
    assert group["aggregate"]["complete"] is True
    assert group["rows"][0]["speedup_default"] == pytest.approx(1.5)


def test_nothing_found_is_an_empty_text() -> None:
    assert results_text(best_per_case([])) == ""
