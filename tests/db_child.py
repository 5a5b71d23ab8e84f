"""What the tests of the database run in processes of their own: `python db_child.py <function> <arguments>`."""

import os
import subprocess
import sys
from pathlib import Path

from db_factories import a_case, a_record, a_run, a_trial, an_env

from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus
from tilewright.db.store import Store
from tilewright.errors import DatabaseError

_TESTS = Path(__file__).resolve().parent


def start(function: str, *arguments: object) -> "subprocess.Popen[str]":
    """A child that speaks lines over its pipes; warnings are errors there too."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS.parent / ".src"), str(_TESTS)])}
    command = [sys.executable, "-W", "error", str(_TESTS / "db_child.py"), function, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def write(path: str, name: str, trials: str, journal_mode: str) -> None:
    """Waits for a line, then opens the store and writes its trials."""
    print("ready", flush=True)
    sys.stdin.readline()
    with Store.open(path, journal_mode=None if journal_mode == "none" else journal_mode) as store:  # type: ignore[arg-type]
        run = store.begin_run(a_run(), an_env())
        for number in range(int(trials)):
            store.add_trial(run, a_case(), an_env(), a_trial(number, label=f"{name}.{number}"))
        store.finish_run(run, RunStatus.DONE)


def open_each(role: str) -> None:
    """For every line, a path: writers store a trial and a record there, readers ask everything."""
    print("ready", flush=True)
    for line in sys.stdin:
        path = line.strip()
        if role == "writer":
            with Store.open(path) as store:
                run = store.begin_run(a_run(), an_env())
                store.add_trial(run, a_case(), an_env(), a_trial())
                store.activate(run, a_case(), an_env(), a_record())
                store.finish_run(run, RunStatus.DONE)
        with Reader.open(path) as reader:
            seen = (len(reader.trials()), len(reader.active_records()), len(reader.runs()))
        assert role == "reader" or min(seen) >= 1, seen
        print("done", flush=True)


def write_for_ever(path: str) -> None:
    """Acknowledges every trial once it is stored."""
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.activate(run, a_case(), an_env(), a_record())
        number = 0
        while True:
            label = f"{run}.{number}"
            store.add_trial(run, a_case(), an_env(), a_trial(number, label=label))
            print(label, flush=True)
            number += 1


def read_unprivileged(path: str, trained_on: str) -> None:
    """Reads as nobody, then tries to write; everything that is imported late is used once before."""
    with Store.open(trained_on) as store, Reader.open(trained_on) as reader:
        store.begin_run(a_run(), an_env())
        reader.active_records()
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    with Reader.open(path) as reader:
        print(len(reader.active_records()), len(reader.trials()), flush=True)
    try:
        Store.open(path)
    except DatabaseError as error:
        print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
