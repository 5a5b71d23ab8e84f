"""A reader answers whatever state the file was left in, and leaves no trace."""

import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from db_child import start
from db_factories import a_case, a_record, a_run, a_trial, an_env, fill
from sqlalchemy.orm import Session

from tilewright.db import queries
from tilewright.db.reader import FileSource, Reader
from tilewright.db.rows import Status
from tilewright.db.store import Store
from tilewright.errors import MissingDatabase


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.sqlite"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="tilewright-test-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def leave_a_log(path: Path) -> int:
    """Writes until killed, so that the file keeps its log; returns the number of trials acknowledged."""
    with start("write_for_ever", path) as child:
        assert child.stdout is not None
        for _ in range(5):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        acknowledged = 5 + len(child.stdout.read().splitlines())
    assert path.with_name(path.name + "-wal").stat().st_size > 0
    return acknowledged


def test_nothing_is_written_beside_a_closed_database(path: Path) -> None:
    fill(path)
    before = contents(path.parent)
    with Reader.open(path) as reader:
        assert (len(reader.active_records()), len(reader.trials())) == (1, 3)
        assert contents(path.parent) == before
    assert contents(path.parent) == before


def test_a_dead_writers_trials_are_read_and_its_files_left_alone(path: Path) -> None:
    acknowledged = leave_a_log(path)
    before = contents(path.parent)
    with Reader.open(path) as reader:
        assert len(reader.trials()) >= acknowledged
    assert contents(path.parent) == before


def test_a_log_without_its_index_is_read(path: Path) -> None:
    acknowledged = leave_a_log(path)
    path.with_name(path.name + "-shm").unlink()
    before = contents(path.parent)
    with Reader.open(path) as reader:
        assert len(reader.trials()) >= acknowledged
    assert contents(path.parent) == before


def test_a_link_reads_what_its_target_holds(path: Path) -> None:
    acknowledged = leave_a_log(path)
    link = path.parent / "link.sqlite"
    link.symlink_to(path)
    with Reader.open(link) as reader:
        assert len(reader.trials()) >= acknowledged


def test_a_dead_writers_rollback_journal_is_rolled_back_in_a_copy(path: Path) -> None:
    Store.open(path, journal_mode="delete").close()
    fill(path, trials=200)
    committed = path.read_bytes()
    torn = path.parent / "torn"
    torn.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size = 1")  # so that changes reach the file before the commit
        writer.execute("BEGIN")
        writer.execute("UPDATE trials SET status = 'wrong'")
        for suffix in ("", "-journal"):
            shutil.copy(f"{path}{suffix}", torn / f"tuned.sqlite{suffix}")
        writer.execute("ROLLBACK")
    assert (torn / "tuned.sqlite").read_bytes()[: len(committed)] != committed
    before = contents(torn)
    with Reader.open(torn / "tuned.sqlite") as reader:
        assert [stored.trial.status for stored in reader.trials()] == [Status.OK] * 200
    assert contents(torn) == before


@pytest.mark.parametrize("mode", ["wal", "delete", "truncate"])
def test_an_open_reader_sees_what_a_live_writer_stores(path: Path, mode: str) -> None:
    with Store.open(path, journal_mode=mode) as store, Reader.open(path) as reader:  # type: ignore[arg-type]
        run = store.begin_run(a_run(), an_env())
        for number in range(5):
            store.add_trial(run, a_case(), an_env(), a_trial(number))
            assert len(reader.trials()) == number + 1


def test_a_reader_does_not_free_the_locks_of_a_store_in_its_process(path: Path) -> None:
    """Another process that finds no lock may switch the journal mode."""
    switch = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('PRAGMA journal_mode = delete')"
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        with Reader.open(path) as reader:
            reader.runs()
        done = subprocess.run([sys.executable, "-c", switch], capture_output=True, text=True)
        assert "database is locked" in done.stderr
        assert store.add_trial(run, a_case(), an_env(), a_trial()) == 1


def test_a_reader_that_was_opened_before_the_writer_sees_its_trials(path: Path) -> None:
    fill(path, trials=1)
    with Reader.open(path) as reader:
        assert len(reader.trials()) == 1
        with Store.open(path) as store:
            store.add_trial(1, a_case(), an_env(), a_trial(7))
            assert len(reader.trials()) == 2
        assert len(reader.trials()) == 2


def test_a_question_during_which_the_file_was_written_is_asked_again(path: Path) -> None:
    fill(path, trials=1)
    source = FileSource(path, busy_timeout_s=30.0)
    answers: list[int] = []

    def count(session: Session) -> int:
        answers.append(len(queries.trials(session)))
        if len(answers) == 1:
            fill(path, trials=1)
        return answers[-1]

    assert (source.read(count), answers) == (2, [1, 2])
    source.close()


def test_a_missing_path_is_reported_and_not_created(path: Path) -> None:
    with pytest.raises(MissingDatabase, match=r"no database at .*tuned\.sqlite; `tilewright tune` makes one"):
        Reader.open(path)
    assert contents(path.parent) == {}


def test_a_database_removed_under_a_reader_is_missing(path: Path) -> None:
    fill(path)
    with Reader.open(path) as reader:
        path.unlink()
        with pytest.raises(MissingDatabase):
            reader.runs()


def test_an_empty_file_reads_as_a_database_without_rows(path: Path) -> None:
    path.touch()
    with Reader.open(path) as reader:
        assert (reader.active_records(), reader.trials(), reader.runs(), reader.counts()) == ([], [], [], {})
    assert path.stat().st_size == 0
    assert len(contents(path.parent)) == 1


def test_records_are_found_by_case_problem_and_gpu_in_any_spelling(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.activate(run, a_case(), an_env(), a_record(100.0))
        store.activate(run, a_case(), an_env(gpu_name="NVIDIA H200 NVL"), a_record(110.0))
    with Reader.open(path) as reader:

        def medians(**asked: str) -> list[float | None]:
            return [stored.record.median_us for stored in reader.active_records(**asked)]  # type: ignore[arg-type]

        assert medians() == [110.0, 100.0]
        assert medians(gpu="NVIDIA_H200") == medians(gpu=" NVIDIA  H200") == [100.0]
        assert medians(gpu="NVIDIA H100 80GB HBM3") == []
        assert medians(case_key=a_case().key, problem=a_case().problem.name) == [110.0, 100.0]
        assert medians(case_key=a_case("b1s128").key) == []
        assert medians(problem="other") == []


@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        ("plan", '[{"template": "ge', "plan"),
        ("plan", "[7]", "plan"),
        ("evidence", "", "evidence"),
        ("verdict", "superb", "verdict"),
    ],
)
def test_a_broken_record_is_marked_and_hides_no_other(path: Path, column: str, text: str, reason: str) -> None:
    fill(path)
    with Store.open(path) as store:
        sound = store.activate(1, a_case("b1s128"), an_env(), a_record(50.0, a_case("b1s128")))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute(f"UPDATE records SET {column} = ? WHERE id <> ?", (text, sound))
    with Reader.open(path) as reader:
        found = {stored.id: stored.invalid for stored in reader.active_records()}
    assert found.pop(sound or 0) == ""
    assert all(invalid.startswith(reason) for invalid in found.values())
    assert len(found) == 1


def test_a_broken_trial_is_marked_for_readers_and_left_out_for_the_search(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE trials SET config = '{\"BLO' WHERE id = 1")
        other.execute("UPDATE trials SET status = 'superb' WHERE id = 2")
    with Reader.open(path) as reader:
        assert [bool(stored.invalid) for stored in reader.trials()] == [True, True, False]
    with Store.open(path) as store:
        assert [trial.config["number"] for trial in store.trials()] == [2]


@pytest.mark.parametrize("left_by", ["closed", "dead writer", "live writer"])
def test_a_read_only_file_in_a_read_only_folder_serves_and_refuses_writers_at_once(
    path: Path, open_folder: Path, left_by: str
) -> None:
    target = open_folder / "tuned.sqlite"
    if left_by == "dead writer":
        leave_a_log(target)
    else:
        fill(target)
    live = Store.open(target) if left_by == "live writer" else None
    if live is not None:
        live.add_trial(1, a_case(), an_env(), a_trial(9))
    for file in open_folder.iterdir():
        file.chmod(0o444)
    open_folder.chmod(0o555)
    before = contents(open_folder) if live is None else {}
    with start("read_unprivileged", target, path) as child:
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    seen, refusal = out.splitlines()
    records, trials = map(int, seen.split())
    assert records == 1
    assert trials >= {"closed": 3, "dead writer": 5, "live writer": 4}[left_by]
    assert refusal.startswith("NotWritable")
    assert str(open_folder) in refusal
    if live is None:
        assert contents(open_folder) == before
    else:
        live.close()


def test_copies_that_were_needed_are_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = path.parent / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    leave_a_log(path)
    with Reader.open(path):
        assert os.listdir(scratch)
    assert not os.listdir(scratch)
