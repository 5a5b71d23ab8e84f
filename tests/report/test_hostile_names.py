"""Names and messages from outside, in every question and every export: shown, stored, and never obeyed."""

import ast
import csv
import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from db_factories import a_case, a_record, a_run, a_trial, an_env

from tilewright import cli
from tilewright.db.records_json import read_records, write_records
from tilewright.db.rows import Level, RecordRow, Status, StoredRecord, Trust, Verdict
from tilewright.db.store import Store
from tilewright.db.trust import OutsideResult, add_outside_results
from tilewright.kernel_templates.families import load_family
from tilewright.problem import DEFAULT_PROBLEM
from tilewright.report.exchange.solution import limits_of
from tilewright.report.text import clean, clean_lines, defused

FORMULA = "=cmd|'/c calc'!A1"
EVIL = f"{FORMULA}\x1b]0;owned\x07\x9b2J\u202e<script>alert(1)</script>[red]x[/red](../../etc)\r\n| y `z`"
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A card, a compiler, trials, a record and a result of others, all named by an enemy."""
    monkeypatch.delenv("TILEWRIGHT_DB", raising=False)
    path = tmp_path / "t.sqlite"
    env = an_env(gpu_name=EVIL, triton=EVIL, torch=EVIL, driver=EVIL)
    plan = [{"template": EVIL, "values": {EVIL: EVIL}}]
    finalist = {"name": EVIL, "label": EVIL, "plan": plan, "time_us": [100.0, 99.0, 101.0],
                "ratio_to_holder": [1.0, 0.9, 1.1], "source": EVIL}  # fmt: skip
    evidence = {"finalists": [finalist], "ties": [EVIL], "rounds": 9, "reason": EVIL, "noisy": EVIL}
    with Store.open(path) as store:
        run = store.begin_run(a_run(), env)
        store.add_trial(run, a_case(), env, a_trial(level=Level.PLAN, template="", label=EVIL, noisy=EVIL))
        store.add_trial(run, a_case(), env, a_trial(1, template=EVIL, label=EVIL))
        store.add_trial(run, a_case(), env, a_trial(2, status=Status.WRONG, reason=EVIL, median_us=None))
        for day in (1, 2):
            row = a_record(
                100.0, plan=plan, digest=f"{EVIL}{day}", baseline=EVIL, baseline_us=120.0, default_us=110.0,
                low_us=99.0, high_us=101.0, evidence=evidence, created_at=datetime(2026, 1, day, tzinfo=UTC),
            )  # fmt: skip
            store.activate(run, a_case(), env, row)
        theirs = OutsideResult(DEFAULT_PROBLEM, EVIL, EVIL, "suite of 16 cases", 1.0, Trust.REPORTED, EVIL, source=EVIL)
        add_outside_results(store, [theirs])
    return str(path)


QUESTIONS = [
    [], ["top"], ["failures"], ["coverage"], ["history", "b4s512"], ["compare", "run:1", "run:1"],
    ["explain", "b4s512"], ["leaderboard"],
]  # fmt: skip


FORMS = ["", "--wide", "--csv", "--markdown", "--json"]
ASKED = [(words, form) for words in QUESTIONS for form in FORMS if words[:1] != ["explain"] or form in ("", "--json")]


@pytest.mark.parametrize(("question", "form"), ASKED, ids=str)
def test_no_question_lets_a_name_act(
    question: list[str], form: str, db: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["results", *question, "--db", db, "--own", *([form] if form else [])]) == 0
    text = capsys.readouterr().out
    if form == "--json":
        assert "owned" in json.dumps(json.loads(text))  # data as they are, escaped
        text = re.sub(r"[\u2028\u2029\u202a-\u202e]", "", text)
    assert not STEERING.search(text)
    if form == "--csv":
        lines = list(csv.reader(io.StringIO(text)))
        assert len({len(line) for line in lines}) == 1
        assert not [
            cell for line in lines for cell in line if cell[:1] in ("=", "@") or re.match(r"[+-](?![\d.])", cell)
        ]
    if form == "--markdown":
        assert "<script" not in text
        assert not re.search(r"(?<!\\)\]\(", text)


def test_a_card_named_as_a_path_writes_no_file_elsewhere(tmp_path: Path) -> None:
    """Datasets and tile files are named after authors, problems and cards."""
    path, out = tmp_path / "records.json", tmp_path / "out"
    write_records(path, [a_stored(gpu_name="../../../x\x1b")])
    before = set(tmp_path.rglob("*"))
    for words in (["dataset", "--author", "../../y"], ["tiles"]):
        assert cli.run(["export", *words, "--db", str(path), "--gpu", "../../../x\x1b", "-o", str(out)]) == 0
    made = set(tmp_path.rglob("*")) - before
    assert made
    assert all(file.is_relative_to(out) and str(file).isprintable() for file in made)


def test_tiles_as_csv_are_defused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.json"
    write_records(path, [a_stored(gpu_name=FORMULA)])
    assert cli.run(["export", "tiles", "--csv", "--db", str(path), "--gpu", FORMULA]) == 0
    assert {row["gpu"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))} == {f"'{FORMULA}"}


def test_no_name_becomes_code_of_an_exported_solution(tmp_path: Path) -> None:
    """Digest, card and compiler stand in comments of the file that others will run."""
    evil = "x\nimport os; os.system('owned')\r# \u2028y"
    path, out = tmp_path / "records.json", tmp_path / "solution.json"
    write_records(path, [a_stored(gpu_name=evil, triton=evil, torch=evil, digest=evil)])
    assert read_records(path)[0].record.digest == evil
    assert cli.run(["export", "solution", "--db", str(path), "--gpu", evil, "--author", evil, "-o", str(out)]) == 0
    (source,) = json.loads(out.read_text(encoding="utf-8"))["sources"]
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(source["content"])) if isinstance(node, ast.Call)}
    assert "os.system" not in called
    assert "owned" in source["content"]


def a_stored(digest: str = "d" * 16, **changes: str) -> StoredRecord:
    """A record of the default plan of Triton templates."""
    case = a_case()
    row = RecordRow(case.key, [], digest, "s", Verdict.BEATS_ALL, median_us=100.0, created_at=datetime.now(UTC))
    bare = StoredRecord(row, an_env(**changes), case.problem.name, case.name, case.shape_axes)
    registry = load_family(case.problem.family).registry
    plan = registry.default_plan(case, limits_of(bare), kinds=("triton",))
    return replace(bare, record=replace(row, plan=plan.to_json()))


def test_an_error_that_quotes_a_file_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "board.json"
    file.write_text(json.dumps({"\x1b]0;owned\x07": 1, "records": []}), encoding="utf-8")
    assert cli.run(["db", "import-reported", str(file), "--db", str(tmp_path / "t.sqlite")]) == 2
    assert not STEERING.search(capsys.readouterr().err)


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\t=1", " =1", "\n=1", "\uff1d1", "\u00a0@x"], ids=repr)
def test_what_a_spreadsheet_would_compute_is_text(text: str) -> None:
    assert defused(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", " ", "a=1", "1-2", "NVIDIA H200"], ids=repr)
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert defused(text) == text
    assert clean(text) == text


def test_lines_stay_lines_and_halves_of_characters_can_be_printed() -> None:
    assert clean_lines("a\nb\x1b") == "a\nb\ufffd"
    assert clean("\ud800").encode("utf-8")
