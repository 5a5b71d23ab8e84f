"""A run that is stopped, politely or not, loses nothing that had ended, and the next one does only what is left."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from child_processes import ROOT, environment, gone

from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus

TUNE = ("tune", "--case", "b1s16", "--device", "interpret", "--effort", "quick", "--json")


def start(database: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tilewright.cli", *TUNE, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(TILEWRIGHT_DB=str(database)),
    )


def stored(database: Path) -> list[tuple[str, str, str]]:
    """What identifies each trial; empty where nothing is stored yet."""
    if not database.exists():
        return []
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            return connection.execute("select level, digest, regime from trials order by id").fetchall()
        except sqlite3.OperationalError:
            return []


def wait_for_trials(run: "subprocess.Popen[str]", database: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(stored(database)) < count:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(database: Path) -> list[RunStatus]:
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        return [RunStatus(status) for (status,) in connection.execute("select status from runs order by id")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_run_with_its_code_and_everything_stored(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    database = tmp_path / "tuned.sqlite"
    run = start(database, "--trials", "40")
    wait_for_trials(run, database, 2)
    workers = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(number)
    begun = time.monotonic()
    out, err = run.communicate(timeout=30)
    assert run.returncode == code, err
    assert time.monotonic() - begun < 15
    assert "Traceback" not in err
    assert "stopping after this trial" in err
    assert f"stopped by signal {int(number)}; everything finished is stored" in err
    assert out == ""
    assert 2 <= len(stored(database)) < 40
    assert runs(database) == [RunStatus.INTERRUPTED]
    assert workers
    assert all(gone(worker.pid, within_s=5) for worker in workers)


def test_killed_run_is_resumed_and_nothing_is_done_twice(tmp_path: Path) -> None:
    database = tmp_path / "tuned.sqlite"
    killed = start(database, "--trials", "40")
    wait_for_trials(killed, database, 3)
    killed.kill()
    killed.communicate()
    kept = stored(database)

    resumed = start(database, "--trials", "3")
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    [case] = json.loads(out)["cases"]
    after = stored(database)
    assert after[: len(kept)] == kept
    assert len(after) == len(kept) + 3
    assert case["reused"] == len(kept)
    assert max(Counter(after).values()) == 1
    assert runs(database) == [RunStatus.INTERRUPTED, RunStatus.DONE]
    with Reader.open(database) as reader:
        assert len(reader.active_records()) == 1


def test_twenty_kills_at_random_moments_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """From before the database is there to the middle of a trial, a final or a write."""
    database, moments = tmp_path / "tuned.sqlite", random.Random(4)
    begun = time.monotonic()
    undisturbed = start(tmp_path / "undisturbed.sqlite", "--trials", "3")
    undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0
    whole_s = time.monotonic() - begun
    before: list[tuple[str, str, str]] = []
    killed = 0
    for _ in range(20):
        run = start(database, "--trials", "3")
        try:
            run.wait(moments.uniform(0.2, 1.1) * whole_s)
        except subprocess.TimeoutExpired:
            run.kill()
            killed += 1
        run.communicate()
        after = stored(database)
        assert after[: len(before)] == before
        before = after
    assert killed >= 10
    last = start(database, "--trials", "1")
    out, err = last.communicate(timeout=120)
    assert last.returncode == 0, err
    assert max(Counter(stored(database)).values()) == 1
    assert RunStatus.RUNNING not in runs(database)
    [case] = json.loads(out)["cases"]
    assert case["reused"] == len(before)
    with Reader.open(database) as reader:
        [record] = reader.active_records()
    assert case["record"]["plan"] == record.record.plan
