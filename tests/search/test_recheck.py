"""`tilewright verify`: keep or retune, and within the time it is given."""

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from toys import ENVIRONMENT, FAMILY, LIMITS, FormulaDevice, a_case

from tilewright import cli
from tilewright.db.rows import RecordRow, RunRow, StoredRecord, Verdict
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import load_problem
from tilewright.report.verified import verified_text
from tilewright.runtime.machine import machine_of
from tilewright.search.context import NoCompiler
from tilewright.search.outcome import FinalSamples
from tilewright.search.recheck import DEFAULT, RECORD, Subject, Verified, judge
from tilewright.search.recheck_run import VerifyReport, VerifyRequest, _Desk

FAST = FusionPlan(
    tuple(Stage(name, {"TILE": 64, "WARPS": 4}) for name in ("fused_projection", "attention", "library_output"))
)


def a_subject(verdict: Verdict = Verdict.BEATS_ALL, **changes: Any) -> Subject:
    row = RecordRow(a_case().key, FAST.to_json(), FAST.digest, "source", verdict, median_us=100.0)
    record = StoredRecord(row, ENVIRONMENT, "problem", "b4s512", a_case().shape_axes)
    return replace(Subject(a_case(), FAST, record), **changes)


def judged(verdict: Verdict = Verdict.BEATS_ALL, failures: dict[str, str] | None = None, **us: float) -> Verified:
    """Twelve rounds of these times, with a little noise."""
    rounds = {name: tuple(value * (1 + 1e-4 * (i % 3)) for i in range(12)) for name, value in us.items()}
    return judge(a_subject(verdict), FinalSamples(rounds, failures or {}), min_gain=0.01)


@pytest.mark.parametrize(
    ("times", "verdict", "keep"),
    [
        ({RECORD: 100, DEFAULT: 120, "library": 110}, Verdict.BEATS_ALL, True),
        ({RECORD: 100, DEFAULT: 90, "library": 110}, Verdict.BEATS_ALL, False),
        ({RECORD: 100, DEFAULT: 90}, Verdict.DEFAULT_KEPT, False),
        ({RECORD: 100, DEFAULT: 99.5}, Verdict.BEATS_ALL, True),  # faster, but by less than counts
        ({RECORD: 100, DEFAULT: 120, "library": 90}, Verdict.BEATS_ALL, False),
        ({RECORD: 100, DEFAULT: 120, "library": 90}, Verdict.BEATS_DEFAULT, True),  # it never claimed to beat it
        ({RECORD: 100, DEFAULT: 120, "a": 130, "library": 90}, Verdict.BEATS_ALL, False),
        ({RECORD: 100}, Verdict.DEFAULT_KEPT, True),
    ],
)
def test_a_record_is_kept_unless_what_it_beat_is_faster_now(
    times: dict[str, float], verdict: Verdict, keep: bool
) -> None:
    assert judged(verdict, **times).keep is keep


def test_noise_alone_retunes_nothing() -> None:
    ours = (100.0, 104.0, 96.0, 101.0, 99.0, 103.0, 97.0, 102.0, 98.0, 105.0, 95.0, 100.0)
    samples = FinalSamples({RECORD: ours, DEFAULT: tuple(reversed(ours))})
    assert judge(a_subject(), samples, min_gain=0.0).keep


def test_a_plan_that_fails_is_retuned_with_the_reason() -> None:
    found = judged(failures={RECORD: "output: relative error"}, default=100)
    assert (found.keep, found.reason) == (False, "the plan fails: output: relative error")


def test_drift_is_the_time_now_over_the_time_recorded() -> None:
    assert judged(record=150, default=160).drift == pytest.approx(1.5, rel=1e-3)


def a_desk(device: FormulaDevice, begun: float) -> _Desk:
    return _Desk(VerifyRequest("problem"), FAMILY, LIMITS, device, NoCompiler(), begun)


def test_record_default_and_baselines_are_timed_together() -> None:
    found = a_desk(FormulaDevice(baseline_us=400), time.monotonic()).verify(a_subject(), ("library",))
    assert set(found.times) == {RECORD, DEFAULT, "library"}
    assert found.keep


def test_a_record_with_an_objection_is_retuned_untimed() -> None:
    found = a_desk(FormulaDevice(), time.monotonic()).verify(a_subject(objection="stale: triton"), ("library",))
    assert (found.keep, found.reason, found.times) == (False, "stale: triton", {})


def test_baselines_are_left_out_when_the_budget_runs_short() -> None:
    now = time.monotonic()
    assert a_desk(FormulaDevice(), now).affordable(("library",), 16) == ("library",)
    assert a_desk(FormulaDevice(), now - 50).affordable(("library",), 16) == ()


def test_a_baseline_that_the_family_lacks_is_named() -> None:
    with pytest.raises(UsageError, match=r"baseline must be one of .*, got 'magic'"):
        VerifyRequest("problem", baselines=["magic"]).check(load_family("gqa_attention"))


def test_no_whole_block_compiler_runs_unless_asked() -> None:
    assert VerifyRequest("problem").check(load_family("gqa_attention")) == ("cublas_cudnn",)


def test_the_report_hands_out_what_was_reproduced() -> None:
    kept, lost = judged(record=100, default=120), judged(record=100, default=90)
    stale = replace(kept, subject=a_subject(stale=True))
    report = VerifyReport("problem", ENVIRONMENT, (kept, stale, lost), 3.0, measures=True)
    assert report.reproduced == [kept.subject.record]
    assert not report.all_kept
    text = verified_text(report.to_json())
    assert "2 of 3 kept in 3 s\ntune again: tilewright tune --problem problem --case b4s512" in text
    assert "b4s512    retune      100.0     100.0  default takes 90.0% of its time" in text


def stored(path: Path, *, source_hash: str | None = None, seq_len: int = 16) -> None:
    """The interpreter's record of one small case: the default plan."""
    problem = load_problem().at_suite("smoke")
    case, machine = problem.case(batch_size=1, seq_len=seq_len), machine_of("interpret")
    registry = load_family(problem.family).registry
    plan = registry.default_plan(case, machine.limits)
    row = RecordRow(
        case.key, plan.to_json(), plan.digest, source_hash or registry.source_hash(plan), Verdict.UNMEASURED,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    with Store.open(path) as store:
        run = store.begin_run(RunRow("tune", 0, "quick", "0.1.0", "1"), machine.environment)
        store.activate(run, case, machine.environment, row)


def test_the_command_checks_records_here_and_ends_with_1_when_one_must_be_tuned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "t.sqlite"
    stored(path)
    stored(path, source_hash="0" * 16, seq_len=24)
    assert cli.run(["verify", "--db", str(path), "--device", "interpret", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = {case["case"]: (case["verdict"], case["reason"].split(":")[0]) for case in document["cases"]}
    assert found == {"b1s16": ("keep", "right"), "b1s24": ("retune", "stale")}
    assert document["retune"] == ["b1s24"]
    assert cli.run(["verify", "--db", str(path), "--device", "interpret", "--allow-stale", "--case", "b1s24"]) == 0


def test_without_a_record_from_this_card_nothing_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.sqlite")
    assert cli.run(["verify", "--db", missing, "--device", "interpret", "--case", "b1s7"]) == 3
    assert "was made on this card" in capsys.readouterr().err
