"""`results leaderboard`: who is where, on which card, and that no table mixes cards."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from db_factories import an_env, fill

from tilewright import cli
from tilewright.db.rows import Trust
from tilewright.db.store import Store
from tilewright.db.trust import OutsideResult, add_outside_results, environment_words
from tilewright.problem import DEFAULT_PROBLEM
from tilewright.report.leaderboard import ranked

SUITE = "suite of 16 cases"
DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "results.md"
HOSTILE = "=cmd|'/c calc'!A1\x1b[2J|<img src=x onerror=alert(1)>[bold]../../x\u202e"


def a_result(implementation: str = "theirs", latency_us: float = 400.0, **changes: Any) -> OutsideResult:
    content: dict[str, Any] = {
        "problem": DEFAULT_PROBLEM, "hardware": "NVIDIA B200", "environment": "env 1", "workload": SUITE,
        "trust": Trust.REPORTED, "percent_sol": 58.0, "observed": "2026-07-10", **changes,
    }  # fmt: skip
    return OutsideResult(implementation=implementation, latency_us=latency_us, **content)


@pytest.fixture
def db(tmp_path: Path) -> str:
    """Two cards, two environments, and a record of ours of one case."""
    path = tmp_path / "t.sqlite"
    fill(path)
    rows = [
        a_result("slow", 500.0),
        a_result("fast", 400.0),
        a_result("elsewhere", 300.0, environment="env 2", percent_sol=None),
        a_result("imported", 90.0, workload="b4s512", hardware="NVIDIA H200", trust=Trust.MEASURED,
                 environment=environment_words(an_env(), "graph"), digest="abc"),
    ]  # fmt: skip
    with Store.open(path) as store:
        add_outside_results(store, rows)
    return str(path)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(["results", *words]) == 0
    return capsys.readouterr().out


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(asked(capsys, *words, "--json"))["rows"]
    return found


def test_ranks_and_ratios_count_within_a_card_and_an_environment(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "leaderboard", "--db", db, "--own")
    assert [(r["environment"], r["rank"], r["implementation"], r["ratio"]) for r in rows] == [
        ("env 1", 1, "fast", 1.0),
        ("env 1", 2, "slow", 1.25),
        ("env 2", 1, "elsewhere", 1.0),
    ]


def test_code_from_elsewhere_stands_beside_ours(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "leaderboard", "--db", db, "--own", "--case", "b4s512")
    assert [(r["rank"], r["implementation"], r["trust"], r["origin"]) for r in rows] == [
        (1, "imported", "measured", "outside"),
        (2, "tilewright", "measured", "ours"),
    ]


def test_every_table_names_its_card_and_shares_alone_cross_them(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped suite of an H200 stands beside the boards."""
    text = asked(capsys, "leaderboard", "--db", db)
    tables = text.split("\n\n")
    assert [("B200" in table, "H200" in table) for table in tables] == [
        (True, False), (True, False), (False, True), (True, True),
    ]  # fmt: skip
    assert "across hardware, by % SOL" in tables[-1]
    assert not re.search(r"\bus\b|\d\.\d", tables[-1].replace("3.6.0", ""))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "words", [("leaderboard", "--trust", "reported"), ("--trust", "reported"), ("top", "--trust", "reported")]
)
def test_what_is_reported_is_shown_where_it_is_asked_for(
    words: tuple[str, ...], db: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {row["trust"] for row in rows_of(capsys, *words, "--db", db)} == {"reported"}


def test_reported_times_stay_out_of_the_measured_ones(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fast" not in asked(capsys, "--db", db)
    assert "B200" not in asked(capsys, "leaderboard", "--trust", "measured", "--db", db)


@pytest.mark.parametrize("words", [("--gpu", "NVIDIA_B200", "-n", "1"), ("--problem", DEFAULT_PROBLEM, "-n", "1")])
def test_filters_hold(words: tuple[str, ...], db: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = [row["implementation"] for row in rows_of(capsys, "leaderboard", "--db", db, "--own", *words)]
    assert found == ["fast", "elsewhere"]


def test_nothing_to_rank_says_how_to_bring_some_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "t.sqlite")
    assert cli.run(["results", "leaderboard", "--db", str(tmp_path / "t.sqlite"), "--own"]) == 3
    assert "db import-reported FILE" in capsys.readouterr().err


def test_of_one_code_measured_twice_the_latest_counts() -> None:
    twice = [a_result("x", us, trust=Trust.MEASURED, digest="d", observed=day)
             for us, day in ((90.0, "2026-01-02"), (80.0, "2026-01-01"))]  # fmt: skip
    assert [row.latency_us for row in ranked(twice, [])] == [90.0]


def test_the_json_is_as_documented(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(asked(capsys, "leaderboard", "--db", db, "--json"))
    section = re.search(r"^### `leaderboard`$(.*?)(?=^##|\Z)", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert section
    names = {n for row in re.findall(r"^\| (`.*?`) \|", section[1], re.MULTILINE) for n in re.findall(r"`(\w+)`", row)}
    assert (document["schema"], document["kind"]) == (1, "leaderboard")
    assert set(document["rows"][0]) == names
    assert set(document["across"][0]) <= names


@pytest.mark.parametrize("form", ["", "--wide", "--csv", "--markdown", "--json"])
def test_hostile_names_stay_data(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "t.sqlite")
    with Store.open(path) as store:
        add_outside_results(
            store, [a_result(HOSTILE, hardware=HOSTILE, environment=HOSTILE, license=HOSTILE, source=HOSTILE)]
        )
    text = asked(capsys, "leaderboard", "--db", path, "--own", *([form] if form else []))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    if form == "--json":  # data as they are, escaped
        assert json.loads(text)["rows"][0]["implementation"] == HOSTILE
        return
    assert "\u202e" not in text
    if form == "--csv":
        cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    if form == "--markdown":
        assert "<img" not in text
        assert len({re.sub(r"\\\|", "", line).count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    if form == "--wide":
        assert "[bold]" in text
