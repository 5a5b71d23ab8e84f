"""`db import-reported`: all of a board comes in, once, and what is wrong is told by field and value."""

import json
from pathlib import Path
from typing import Any

import pytest

from tilewright import cli
from tilewright.db.reader import Reader
from tilewright.db.trust import outside_results
from tilewright.errors import UsageError
from tilewright.problem import DEFAULT_PROBLEM, PROBLEMS_DIR
from tilewright.report.exchange.reported import read_reported

BOARD = PROBLEMS_DIR / DEFAULT_PROBLEM / "reported.json"


def a_file(**changes: Any) -> dict[str, Any]:
    row = {
        "implementation": "theirs", "hardware": "NVIDIA B200", "environment": "env 1", "workload": "suite of 16 cases",
        "metric": "mean latency", "latency_us": 400.5, "percent_sol": 58, "trust": "reported", "license": None,
        "source_url": None, "observed": "2026-07-10", **changes,
    }  # fmt: skip
    row = {name: value for name, value in row.items() if value != "left out"}
    return {"problem": DEFAULT_PROBLEM, "protocol": "p", "source": "s", "records": [row]}


def read(content: Any) -> Any:
    return read_reported(json.dumps(content), "board.json")


def test_the_published_board_comes_in_whole_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "t.sqlite")
    for new in (30, 0):
        assert cli.run(["db", "import-reported", str(BOARD), "--db", path, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["new"] == new
    with Reader.open(path) as reader:
        stored = reader.ask(outside_results)
    published = json.loads(BOARD.read_text(encoding="utf-8"))
    names = ("implementation", "hardware", "environment", "workload", "latency_us", "percent_sol", "observed")
    assert [[getattr(row, name) for name in names] for row in stored] == [
        [row[name] or ("" if name == "observed" else row[name]) for name in names] for row in published["records"]
    ]
    assert {row.trust for row in stored} == {"reported"}
    for text in (published["source"], published["alias"], published["model"]):
        assert text in stored[0].source
    assert stored[0].protocol == f"{published['protocol']}; mean latency"


def test_equal_lines_of_a_board_are_all_kept() -> None:
    content = a_file()
    content["records"] *= 3
    assert len({row.digest for row in read(content)}) == 3


def test_what_is_learnt_later_of_a_result_replaces_what_was_known(tmp_path: Path) -> None:
    path, file = str(tmp_path / "t.sqlite"), tmp_path / "board.json"
    for license in (None, "MIT"):
        file.write_text(json.dumps(a_file(license=license)), encoding="utf-8")
        assert cli.run(["db", "import-reported", str(file), "--db", path]) == 0
    with Reader.open(path) as reader:
        assert [row.license for row in reader.ask(outside_results)] == ["MIT"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"latency_us": "400"}, r"records\.0\.latency_us: .*valid number.*'400'"),
        ({"latency_us": 0}, r"records\.0\.latency_us: .*greater than 0.*'0'"),
        ({"latency_us": float("nan")}, r"records\.0\.latency_us: .*finite"),
        ({"latency_us": "left out"}, r"records\.0\.latency_us: Field required"),
        ({"latency_us": True}, r"records\.0\.latency_us: .*'True'"),
        ({"percent_sol": 130}, r"records\.0\.percent_sol: .*100.*'130'"),
        ({"trust": "measured"}, r"records\.0\.trust: .*'reported'.*'measured'"),
        ({"observed": "yesterday"}, r"records\.0\.observed: .*'yesterday'"),
        ({"source_url": "javascript:alert(1)"}, r"records\.0\.source_url: .*javascript"),
        ({"implementation": ""}, r"records\.0\.implementation: "),
        ({"implementation": "a\x00b"}, r"records\.0\.implementation: .*NUL"),
        ({"latency_ms": 1}, r"records\.0\.latency_ms: .*not permitted"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_field_is_named_with_its_value(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read(a_file(**change))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "file: Invalid JSON"),
        ("[]", "file: "),
        (json.dumps({**a_file(), "records": []}), "records: "),
        (json.dumps({**a_file(), "problem": "../other"}), r"problem '\.\./other' is not known .*--problem"),
        ('{"problem": "\\ud800", "records": []}', "Invalid JSON"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_no_board_is_told_why(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read_reported(text, "board.json")


def test_a_board_under_another_name_is_filed_where_one_says() -> None:
    (row,) = read_reported(json.dumps({**a_file(), "problem": "092"}), "board.json", problem="qwen3_attention")
    assert row.problem == "qwen3_attention"


def test_a_file_that_is_no_text_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "board.json"
    file.write_bytes(b"\xff\xfe{}")
    assert cli.run(["db", "import-reported", str(file), "--db", str(tmp_path / "t.sqlite")]) == 2
    assert "is no UTF-8 text" in capsys.readouterr().err
    assert not (tmp_path / "t.sqlite").exists()
