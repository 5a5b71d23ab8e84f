"""Which records `results` sees: one database, the shipped files, and a clear error for a named one that is broken."""

from pathlib import Path

import pytest

from tilewright.db.environment import Environment
from tilewright.db.records_json import write_records
from tilewright.db.rows import RecordRow, RunRow, Verdict
from tilewright.db.store import Store
from tilewright.errors import DatabaseError
from tilewright.problem import load_problem
from tilewright.report import sources
from tilewright.report.queries import best_per_case
from tilewright.report.sources import gather
from tilewright.report.tables import results_text

H200 = Environment("cuda", "NVIDIA H200", 132, 140 << 30, "9.0", "3.6.0")
CASE = load_problem().case(batch_size=4, seq_len=512)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("TILEWRIGHT_DB", raising=False)
    monkeypatch.setattr(sources, "SHIPPED_DIR", tmp_path / "shipped")


def tuned(path: Path, median_us: float = 600.0) -> Path:
    record = RecordRow(
        CASE.key, [{"template": "whole", "values": {}}], "d", "s", Verdict.BEATS_ALL, median_us=median_us
    )
    with Store.open(path) as store:
        run = store.begin_run(RunRow("tune", 0, "quick", "0.1.0", "1"), H200)
        store.activate(run, CASE, H200, record)
    return path


def ship(path: Path) -> None:
    write_records(sources.SHIPPED_DIR / "h200.json", [s.stored for s in gather(path, shipped=False)])


def test_shipped_records_are_shown_on_a_machine_that_tuned_nothing(tmp_path: Path) -> None:
    ship(tuned(tmp_path / "t.sqlite", 612.5))
    text = results_text(best_per_case(gather()))
    assert "NVIDIA H200" in text
    assert "612.5" in text
    assert not (tmp_path / "data").exists()


def test_own_records_come_first(tmp_path: Path) -> None:
    ship(tuned(tmp_path / "t.sqlite"))
    found = gather(tuned(tmp_path / "own.sqlite", 590.0))
    assert [(s.source, s.stored.record.median_us) for s in found] == [("database", 590.0), ("shipped", 600.0)]


def test_nothing_anywhere_is_no_error() -> None:
    assert gather() == []


def test_a_named_database_that_is_missing_is_an_error_and_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"nowhere\.sqlite"):
        gather(tmp_path / "nowhere.sqlite")
    assert list(tmp_path.glob("nowhere*")) == []


def test_a_truncated_database_is_one_clear_error(tmp_path: Path) -> None:
    path = tuned(tmp_path / "t.sqlite")
    path.write_bytes(path.read_bytes()[:1024])
    with pytest.raises(DatabaseError, match=r"t\.sqlite"):
        gather(path)
    assert path.stat().st_size == 1024


def test_the_environment_variable_names_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DB", str(tuned(tmp_path / "t.sqlite")))
    assert len(gather()) == 1


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"gpu": "NVIDIA_H200"}, 1),
        ({"gpu": "NVIDIA H200 NVL"}, 0),
        ({"problem": "other"}, 0),
        ({"case_key": CASE.key}, 1),
    ],
    ids=str,
)
def test_filters_narrow_what_is_shown(tmp_path: Path, asked: dict[str, str], found: int) -> None:
    assert len(gather(tuned(tmp_path / "t.sqlite"), **asked)) == found  # type: ignore[arg-type]


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    path = tuned(tmp_path / "t.sqlite")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    gather(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
