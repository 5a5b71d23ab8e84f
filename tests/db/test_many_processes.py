"""Many processes, and processes that die: nothing is lost, nothing is left behind."""

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
from db_child import start
from db_factories import a_case, a_run, a_trial, an_env, fill

from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus
from tilewright.db.store import Store
from tilewright.errors import StoreLocked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.sqlite"


def say(child: "subprocess.Popen[str]", line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def heard(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    line = child.stdout.readline().strip()
    if not line:
        _, err = child.communicate()
        pytest.fail(f"a child ended with {child.returncode}: {err}")
    return line


def run_together(children: list["subprocess.Popen[str]"]) -> None:
    for child in children:
        assert heard(child) == "ready"
    for child in children:
        say(child, "go")
    for child in children:
        _, err = child.communicate(timeout=120)
        assert child.returncode == 0, err


def assert_intact(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert other.execute("PRAGMA foreign_key_check").fetchall() == []


def labels(path: Path) -> list[str]:
    with Reader.open(path) as reader:
        return sorted(stored.trial.label for stored in reader.trials())


def names(writers: int, trials: int) -> list[str]:
    return sorted(f"w{writer}.{trial}" for writer in range(writers) for trial in range(trials))


def test_eight_processes_that_start_at_once_on_no_file_store_all_their_trials(path: Path) -> None:
    run_together([start("write", path, f"w{i}", 5, "none") for i in range(8)])
    assert labels(path) == names(8, 5)
    assert_intact(path)


@pytest.mark.parametrize("mode", ["delete", "truncate"])
def test_four_writers_without_wal_store_all_their_trials(path: Path, mode: str) -> None:
    run_together([start("write", path, f"w{i}", 5, mode) for i in range(4)])
    assert labels(path) == names(4, 5)
    assert_intact(path)


def test_a_foreign_write_lock_is_waited_for_and_nothing_is_lost(path: Path) -> None:
    fill(path, trials=0)
    with closing(sqlite3.connect(path, isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        child = start("write", path, "w0", 3, "none")
        assert heard(child) == "ready"
        say(child, "go")
        time.sleep(2.0)
        assert child.poll() is None
        with Reader.open(path) as reader:  # readers do not wait
            assert reader.trials() == []
        foreign.execute("COMMIT")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert labels(path) == names(1, 3)


def test_a_lock_that_is_never_released_is_one_clear_error(path: Path) -> None:
    with Store.open(path, busy_timeout_s=0.1) as store, closing(sqlite3.connect(path, isolation_level=None)) as foreign:
        run = store.begin_run(a_run(), an_env())
        foreign.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreLocked, match=r"is being written by another process; retry when it is done"):
            store.add_trial(run, a_case(), an_env(), a_trial())
        foreign.execute("COMMIT")
        assert store.add_trial(run, a_case(), an_env(), a_trial()) == 1


def cold_starts(folder: Path, writers: int, readers: int, rounds: int) -> None:
    children = [start("open_each", role) for role in ("writer",) * writers + ("reader",) * readers]
    try:
        for child in children:
            assert heard(child) == "ready"
        for number in range(rounds):
            path = folder / f"round{number}.sqlite"
            path.touch()
            for child in children:
                say(child, str(path))
            assert {heard(child) for child in children} == {"done"}
            with Reader.open(path) as reader:
                assert (len(reader.trials()), len(reader.active_records())) == (writers, 1)
            assert_intact(path)
    finally:
        finish(children)


def finish(children: Iterable["subprocess.Popen[str]"]) -> None:
    for child in children:
        child.kill()
        child.communicate()


def test_processes_that_open_one_empty_file_with_readers_beside_them_meet_no_error(tmp_path: Path) -> None:
    cold_starts(tmp_path, writers=6, readers=2, rounds=5)


@pytest.mark.slow
def test_many_processes_that_open_one_empty_file_with_readers_beside_them_meet_no_error(tmp_path: Path) -> None:
    cold_starts(tmp_path, writers=32, readers=4, rounds=30)


def killed_after(path: Path, acknowledgements: int, pause_s: float) -> set[str]:
    """What a writer had acknowledged when it was killed."""
    child = start("write_for_ever", path)
    acknowledged = {heard(child) for _ in range(acknowledgements)}
    time.sleep(pause_s)
    child.send_signal(signal.SIGKILL)
    out, _ = child.communicate()
    return acknowledged | {line for line in out.splitlines(keepends=True) if line.endswith("\n")}


def test_a_writer_killed_at_any_point_loses_no_acknowledged_trial(path: Path) -> None:
    chance = random.Random(0)
    acknowledged: set[str] = set()
    for _ in range(5):
        lines = killed_after(path, chance.randint(1, 20), chance.random() * 0.02)
        acknowledged |= {line.strip() for line in lines}
        stored = labels(path)
        assert acknowledged <= set(stored)
        assert len(stored) == len(set(stored))
        assert_intact(path)


def test_the_next_run_closes_what_a_killed_one_left_running(path: Path) -> None:
    killed_after(path, 1, 0.0)
    with Reader.open(path) as reader:
        assert [run.status for run in reader.runs()] == [RunStatus.RUNNING]
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.finish_run(run, RunStatus.DONE)
    with Reader.open(path) as reader:
        latest, killed = reader.runs()
    assert (latest.status, killed.status) == (RunStatus.DONE, RunStatus.INTERRUPTED)
    assert killed.finished_at is not None


@pytest.mark.parametrize("module", ["store", "reader", "records_json"])
def test_the_database_needs_neither_torch_nor_triton_nor_optuna(module: str) -> None:
    unwanted = {"torch", "triton", "optuna"} | ({"sqlalchemy", "alembic"} if module == "records_json" else set())
    source = Path(__file__).resolve().parents[2] / ".src"
    code = f"import sys, tilewright.db.{module}; print(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
