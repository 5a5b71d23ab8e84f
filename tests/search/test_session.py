"""One bad candidate costs itself and at most one restart of the worker; everything else goes on."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import faulty
import psutil
import pytest
from child_processes import children, environment, gone
from toys import EFFORT, MemoryStore, a_context

from tilewright.db.rows import Status
from tilewright.kernel_templates.device import INTERPRETER_LIMITS
from tilewright.search.outcome import FinalEntry, MeasureOptions, TrialOutcome
from tilewright.search.session import DeviceSession
from tilewright.search.tune import Tuner

OPTIONS = MeasureOptions()
CASE = faulty.a_case()


@pytest.fixture(scope="module")
def session() -> Iterator[DeviceSession]:
    """Shared: every test leaves it usable, which is what is tested."""
    faulty.register()
    with DeviceSession("interpret", hooks=(faulty.LYING_TIMER,)) as made:
        yield made


def evaluate(session: DeviceSession, fault: str = "none", limit_s: float = 20.0) -> TrialOutcome:
    return session.evaluate(CASE, faulty.stage(fault), OPTIONS, run_limit_s=limit_s, compile_limit_s=limit_s)


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("endless", Status.TIMEOUT, "compile limit 1 s"),
        ("abort", Status.CRASHED, f"signal {int(signal.SIGABRT)}) in phase launch"),
        ("segfault", Status.CRASHED, f"signal {int(signal.SIGSEGV)}) in phase launch"),
        ("killed", Status.CRASHED, f"signal {int(signal.SIGKILL)}) in phase launch"),
        ("exit", Status.CRASHED, "exit code 0) in phase launch"),
    ],
)
def test_candidate_that_takes_the_worker_costs_itself_and_one_restart(
    session: DeviceSession, fault: str, status: Status, reason: str
) -> None:
    assert evaluate(session).status is Status.OK
    before, restarts = children(), session.respawns
    outcome = evaluate(session, fault, limit_s=1.0)
    assert outcome.status is status
    assert reason in outcome.reason
    assert outcome.samples_us == ()
    assert not children() & before  # the worker is gone with all that it started
    begun = time.monotonic()
    assert evaluate(session).status is Status.OK
    assert time.monotonic() - begun < 15
    assert session.respawns == restarts + 1


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("out_of_memory", Status.OUT_OF_RESOURCES, "device out of memory"),
        ("raises", Status.ERROR, "ValueError: injected"),
        ("writes_input", Status.WRONG, "changes its input x"),
        ("wrong_and_writes_input", Status.WRONG, "y: relative error"),
        ("wrong", Status.WRONG, "y: relative error"),
        ("nan", Status.WRONG, "y: 128 of 128 values are not finite"),
        ("half", Status.WRONG, "y: 64 of 128 values are not finite"),
        ("overrun", Status.WRONG, "writes outside y"),
        ("nan_time", Status.INVALID_TIME, "the timer gave nan"),
        ("none_time", Status.INVALID_TIME, "the timer gave None"),
        ("zero_time", Status.INVALID_TIME, "the timer gave 0.0"),
        ("negative_time", Status.INVALID_TIME, "the timer gave -3.0"),
        ("infinite_time", Status.INVALID_TIME, "the timer gave inf"),
    ],
)
def test_candidate_that_fails_is_told_apart_and_the_worker_goes_on(
    session: DeviceSession, fault: str, status: Status, reason: str
) -> None:
    assert evaluate(session).status is Status.OK
    restarts = session.respawns
    outcome = evaluate(session, fault)
    assert outcome.status is status
    assert reason in outcome.reason
    assert outcome.samples_us == ()
    assert evaluate(session).status is Status.OK
    assert session.respawns == restarts


def test_worker_killed_between_two_candidates_costs_none_of_them(session: DeviceSession) -> None:
    assert evaluate(session).status is Status.OK
    [worker] = children()
    os.kill(worker, signal.SIGKILL)
    assert evaluate(session).status is Status.OK


def test_signals_to_the_whole_group_leave_the_worker_to_its_parent(session: DeviceSession) -> None:
    """Ctrl-C and a supervisor's SIGTERM reach every process of the group; no candidate may be blamed for it."""
    assert evaluate(session).status is Status.OK
    [worker] = children()
    os.kill(worker, signal.SIGINT)
    os.kill(worker, signal.SIGTERM)
    assert evaluate(session).status is Status.OK
    assert children() == {worker}


def final(session: DeviceSession, *faults: str) -> tuple[dict[str, tuple[float, ...]], dict[str, str]]:
    entries = [FinalEntry(fault, faulty.plan(fault), "default" if fault == "none" else "candidate") for fault in faults]
    samples = session.final(CASE, entries, rounds=6, options=OPTIONS, time_budget_s=5)
    return samples.rounds, samples.failures


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("abort", "crashed: the worker process died"), ("wrong", "relative error"), ("zero_time", "the timer gave 0.0")],
)
def test_fault_in_a_final_costs_that_contestant_alone(session: DeviceSession, fault: str, reason: str) -> None:
    rounds, failures = final(session, fault, "none")
    assert reason in failures[fault]
    assert {name: len(times) for name, times in rounds.items()} == {"none": 6}
    assert set(failures) == {fault}


def test_contestant_that_crashes_only_when_timed_is_found_by_name(session: DeviceSession) -> None:
    """First among the candidates, so that striking the last one would strike the wrong one."""
    evaluate(session, "abort")  # a new process: the fault counts its calls
    rounds, failures = final(session, "none", "abort_when_timed", "late")
    assert set(failures) == {"abort_when_timed"}
    assert set(rounds) == {"none", "late"}


def test_every_contestant_failing_leaves_no_times(session: DeviceSession) -> None:
    rounds, failures = final(session, "wrong", "nan")
    assert rounds == {}
    assert set(failures) == {"wrong", "nan"}


def tune(session: DeviceSession, n: int) -> tuple[MemoryStore, str]:
    store = MemoryStore()
    context = a_context(
        session,  # type: ignore[arg-type]
        store,
        family=faulty.FAMILY,
        limits=INTERPRETER_LIMITS,
        effort=replace(EFFORT, stage_trials=30),
        baselines=(),
    )
    [result] = Tuner(context, store).run([faulty.a_case(n)])
    return store, result.message


def test_every_candidate_failing_makes_no_record_and_keeps_every_trial(session: DeviceSession) -> None:
    store, message = tune(session, 1)
    assert store.records == {}
    assert message == "no valid plan was found"
    assert {row.status for row in store.trials} == {Status.ERROR, Status.WRONG, Status.INVALID_TIME}
    assert len([row for row in store.trials if row.template]) == 3
    assert all(row.reason and row.median_us is None for row in store.trials)


def test_invalid_times_leave_the_best_to_the_others(session: DeviceSession) -> None:
    store, _ = tune(session, 2)
    stages = {row.config["FAULT"]: row for row in store.trials if row.template}
    bad = {name for name, row in stages.items() if row.status is Status.INVALID_TIME}
    assert bad == {"nan_time", "none_time", "zero_time"}
    assert all(stages[name].reason.startswith("the timer gave") for name in bad)
    [record] = store.records.values()
    assert record.plan == faulty.plan("none").to_json()


def test_user_start_method_is_untouched() -> None:
    code = (
        "import multiprocessing as m\n"
        "m.set_start_method('fork')\n"
        "from tilewright.search.session import DeviceSession\n"
        "def main():\n"
        "    with DeviceSession('interpret') as s: print(s.describe().environment.kind, m.get_start_method())\n"
        "if __name__ == '__main__': main()\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert answer.stdout.split() == ["interpret", "fork"], answer.stderr


PARENT = """
import sys, time
from tilewright.search.session import DeviceSession
if __name__ == "__main__":
    session = DeviceSession("interpret", hooks=(sys.argv[1],))
    session._start()
    print(session._process.pid, flush=True)
    time.sleep(float(sys.argv[2]))
"""


def _parent(tmp_path: Path, seconds: float) -> tuple["subprocess.Popen[str]", int]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), faulty.HOOK, str(seconds)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    parent, worker = _parent(tmp_path, 60)
    time.sleep(1.0)
    assert psutil.pid_exists(worker)
    parent.kill()
    parent.communicate()
    assert gone(worker, within_s=5)


def test_session_that_is_never_closed_does_not_keep_the_program(tmp_path: Path) -> None:
    parent, worker = _parent(tmp_path, 0)
    assert parent.wait(timeout=20) == 0
    parent.communicate()
    assert gone(worker, within_s=5)


def test_start_method_of_this_process_is_as_it_was(session: DeviceSession) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    evaluate(session)
    assert multiprocessing.get_start_method(allow_none=True) == before
