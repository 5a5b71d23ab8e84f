"""The questions of `results`: each answers what was asked, on one line of 80 columns, and never mixes hardware."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from db_factories import a_case, a_record, a_run, a_trial, an_env

from tilewright import cli
from tilewright.db.rows import Level, Status
from tilewright.db.store import Store

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "results.md"
STAGE = {"template": "norm_rope", "values": {"BLOCK_H": 8, "BLOCK_T": 4, "num_warps": 4}}
EVIDENCE = {
    "finalists": [
        {"name": "plan", "label": "norm_rope", "plan": [STAGE], "time_us": [100.0, 99.0, 101.0],
         "ratio_to_holder": [0.9, 0.89, 0.91], "source": "candidate"},
        {"name": "near", "label": "norm_rope", "plan": [STAGE], "time_us": [100.5, 99.0, 101.0],
         "ratio_to_holder": [0.9, 0.89, 0.91], "source": "candidate"},
        {"name": "torch_compile", "label": "torch_compile", "plan": None, "time_us": [120.0, 119.0, 121.0],
         "ratio_to_holder": [1.1, 1.09, 1.11], "source": "baseline"},
    ],
    "ties": ["near"], "rounds": 40, "reason": "faster", "noisy": "",
}  # fmt: skip


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One run on an H200: stages and plans of b4s512, two records in turn, three failures of two kinds."""
    monkeypatch.delenv("TILEWRIGHT_DB", raising=False)
    path = tmp_path / "tuned.sqlite"
    env = an_env(peak_flops_per_s=8e14, peak_bytes_per_s=4e12)
    with Store.open(path) as store:
        run = store.begin_run(a_run(), env)
        for number, (block, warps) in enumerate((b, w) for b in (1, 2, 4, 8, 16) for w in (2, 4, 8)):
            config = {"BLOCK_H": 8, "BLOCK_T": block, "num_warps": warps}
            trial = a_trial(number, template="norm_rope", label="norm_rope", config=config, median_us=20.0 + number)
            store.add_trial(run, a_case(), env, trial)
        for number in range(4):
            plan = a_trial(50 + number, level=Level.PLAN, template="", label=f"plan{number}", median_us=110.0 - number)
            store.add_trial(run, a_case(), env, plan)
        for number, reason in enumerate(("needs 300 bytes", "needs 400 bytes", "context: error 4.3e-02")):
            status = Status.WRONG if "error" in reason else Status.REJECTED
            failed = a_trial(90 + number, status=status, reason=reason, median_us=None)
            store.add_trial(run, a_case(), env, failed)
        first = a_record(120.0, created_at=datetime(2026, 1, 1, tzinfo=UTC), low_us=119.0, high_us=121.0)
        store.activate(run, a_case(), env, first)
        second = a_record(
            100.0, plan=[STAGE], low_us=99.0, high_us=101.0, floor_us=50.0, default_us=110.0, baseline="torch_compile",
            baseline_us=120.0, evidence=EVIDENCE, created_at=datetime(2026, 1, 2, tzinfo=UTC),
        )  # fmt: skip
        store.activate(run, a_case(), env, second)
    return path


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(["results", *words]) == 0
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(asked(capsys, *words, "--json"))


def test_top_ranks_whole_plans_of_a_case(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "top", "-n", "2", "--db", str(db), "--own")["rows"]
    assert [(row["label"], row["median_us"]) for row in rows] == [("plan3", 107.0), ("plan2", 108.0)]


def test_top_of_a_template_ranks_its_stages(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "top", "-n", "1", "--template", "norm_rope", "--db", str(db), "--own")["rows"]
    assert [(row["label"], row["ratio"]) for row in rows] == [("norm_rope", 1.0)]


def test_failures_gather_reasons_that_differ_in_numbers(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "failures", "--db", str(db), "--own")["rows"]
    assert [(row["reason"], row["count"]) for row in rows] == [("needs N bytes", 2), ("context: error N", 1)]


def test_failures_of_one_status(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "failures", "--status", "wrong", "--db", str(db), "--own")["rows"]
    assert [row["status"] for row in rows] == ["wrong"]


def test_history_tells_each_record_and_the_change(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "history", "b4s512", "--db", str(db), "--own")["rows"]
    assert [(row["median_us"], row["state"]) for row in rows] == [(120.0, "former"), (100.0, "active")]
    assert rows[1]["change"] == pytest.approx(-1 / 6)


def test_coverage_names_the_cases_that_are_missing(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = document(capsys, "coverage", "--db", str(db), "--own")
    assert [(row["case"], row["trials"], row["ok"]) for row in content["rows"]] == [("b4s512", 22, 19)]
    assert len(content["missing"][0]["cases"]) == 15
    assert "b4s512" not in content["missing"][0]["cases"]


def test_explain_tells_the_tie_set_the_neighbours_and_the_floors(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = document(capsys, "explain", "b4s512", "--db", str(db), "--own")["records"]
    assert [row["standing"] for row in found["finalists"]] == ["winner", "tie", "baseline"]
    (stage,) = found["stages"]
    assert stage["median_us"] == 27.0
    assert stage["bound"] == "memory"
    changed = {(row["parameter"], row["there"]) for row in found["neighbours"]}
    assert changed == {("num_warps", "2"), ("num_warps", "8"), *(("BLOCK_T", n) for n in ("1", "2", "8", "16"))}
    assert {row["parameter"] for row in found["importance"]} == {"BLOCK_T", "num_warps"}
    assert found["importance"][0]["parameter"] == "BLOCK_T"


def test_compare_of_two_files_says_what_is_faster(db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.sqlite"
    with Store.open(other) as store:
        store.activate(
            store.begin_run(a_run(), an_env()), a_case(), an_env(), a_record(90.0, low_us=89.0, high_us=91.0)
        )
    content = document(capsys, "compare", str(db), str(other), "--db", str(db), "--own")
    assert [(row["ratio"], row["judgement"]) for row in content["rows"]] == [(0.9, "faster")]


def test_compare_across_hardware_gives_no_ratio_of_times(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.sqlite"
    b200 = an_env(gpu_name="NVIDIA B200")
    with Store.open(other) as store:
        store.activate(store.begin_run(a_run(), b200), a_case(), b200, a_record(50.0, floor_us=20.0))
    content = document(capsys, "compare", str(db), str(other), "--db", str(db), "--own")
    (row,) = content["rows"]
    assert (row["ratio"], row["judgement"], content["same_hardware"]) == (None, "elsewhere", False)
    assert row["b_sol"] == pytest.approx(40)
    assert "different hardware" in asked(capsys, "compare", str(db), str(other), "--db", str(db), "--own")


def test_compare_of_two_runs(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(db) as store:
        run = store.begin_run(a_run(), an_env())
        store.activate(run, a_case(), an_env(), a_record(101.0, low_us=100.0, high_us=102.0))
    rows = document(capsys, "compare", "run:1", f"run:{run}", "--db", str(db), "--own")["rows"]
    assert [row["judgement"] for row in rows] == ["same"]


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--gpu", "x", "top"], 2, "--gpu belongs after the question"),
        (["compare", "run:x", "run:1"], 2, "a run is written run:N"),
        (["compare", "run:77", "run:1"], 3, "names no record"),
        (["history", "b1s1"], 3, "no record of case b1s1"),
        (["top", "--env", "zzzz"], 3, "no trial"),
        (["top", "--json", "--csv"], 2, "exclude each other"),
        (["export", "json", "-o", "/no/such/folder/x.json"], 2, "cannot be written"),
    ],
    ids=str,
)
def test_a_question_without_an_answer_is_told_on_stderr(
    words: list[str], code: int, complaint: str, db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = [] if words[0].startswith("--") else ["--db", str(db), "--own"]
    assert cli.run(["results", *words, *after]) == code
    told = capsys.readouterr()
    assert complaint in told.err
    assert told.out == ""


ALL = [
    ["top"],
    ["failures"],
    ["coverage"],
    ["history", "b4s512"],
    ["explain", "b4s512"],
    ["compare", "run:1", "run:1"],
    [],
]


@pytest.mark.parametrize("words", ALL, ids=lambda words: "-".join(words[:1]) or "best")
def test_text_fits_80_columns(words: list[str], db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = asked(capsys, *words, "--db", str(db), "--own")
    tables = [line for line in text.splitlines() if not line.startswith(("  ", "gqa", "A =", "B ="))]
    assert max(len(line) for line in tables) <= 80


def documented_fields(kind: str) -> set[str]:
    """The names in the docs' table of one kind's rows."""
    section = re.search(rf"^### `{kind}`$(.*?)(?=^##|\Z)", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert section, f"docs/results.md has no section on {kind}"
    return {
        name for row in re.findall(r"^\| (`.*?`) \|", section[1], re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }


@pytest.mark.parametrize("words", ALL, ids=lambda words: "-".join(words[:1]) or "best")
def test_the_json_of_every_question_is_as_documented(
    words: list[str], db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = document(capsys, *words, "--db", str(db), "--own")
    assert content["schema"] == 1
    rows = content.get("rows") or content.get("records") or content["groups"][0]["rows"]
    assert set(rows[0]) == documented_fields(content["kind"])


def test_interpreter_times_are_not_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, env = tmp_path / "tuned.sqlite", an_env(kind="interpret", gpu_name="Triton interpreter")
    with Store.open(path) as store:
        store.add_trial(store.begin_run(a_run(), env), a_case(), env, a_trial(level=Level.PLAN))
    assert cli.run(["results", "top", "--db", str(path), "--own"]) == 3
    assert capsys.readouterr().out == ""


def test_hostile_names_steer_neither_terminal_nor_spreadsheet_nor_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, env = tmp_path / "tuned.sqlite", an_env(gpu_name="=cmd|'/c calc'!A1\x1b[2J|<img src=x>")
    with Store.open(path) as store:
        run = store.begin_run(a_run(), env)
        trial = a_trial(level=Level.PLAN, template="", label="@SUM(1)\x9b31m\u202e")
        store.add_trial(run, a_case(), env, trial)
        store.add_trial(
            run, a_case(), env, a_trial(1, status=Status.WRONG, reason="-1+1\x1b]0;owned\x07", median_us=None)
        )
    for form in ([], ["--wide"], ["--csv"], ["--markdown"]):
        for question in ("top", "failures"):
            text = asked(capsys, question, "--db", str(path), "--own", *form)
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
            if form == ["--csv"]:
                assert not re.search(r'(^|,)"?[=+@-](?!\d+(\.\d+)?(,|$))', text, re.MULTILINE)
            if form == ["--markdown"]:
                assert "<img" not in text
                assert all(
                    re.sub(r"\\\|", "", line).count("|") == text.split("\n")[0].count("|")
                    for line in text.split("\n")
                    if line.startswith("|")
                )
