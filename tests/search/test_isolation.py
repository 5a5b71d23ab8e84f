"""Isolation: what a candidate does to the worker costs that candidate alone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import bad_candidates
import psutil
import pytest
from toys import MemoryStore, a_context

from tilewright.db.rows import Status
from tilewright.errors import MachineUnfit
from tilewright.kernel_templates.device import INTERPRETER_LIMITS
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import WorkloadCase, load_problem
from tilewright.search.effort import Effort
from tilewright.search.outcome import FinalEntry, MeasureOptions, TrialOutcome
from tilewright.search.session import DeviceSession
from tilewright.search.tune import Tuner

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = MeasureOptions(min_samples=2, max_samples=2)
RIGHT = Stage("right", {})


def a_case() -> WorkloadCase:
    return load_problem().at_suite("smoke").parse_case("b1s7")


@pytest.fixture(scope="module")
def session() -> Iterator[DeviceSession]:
    with DeviceSession("interpret", hooks=bad_candidates.HOOKS) as opened:
        yield opened


def evaluate(session: DeviceSession, stage: Stage, *, limit_s: float = 30.0) -> TrialOutcome:
    return session.evaluate(a_case(), stage, OPTIONS, run_limit_s=limit_s, compile_limit_s=limit_s)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if "resource_tracker" not in _line(child)}


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "resource_tracker"


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("aborts", Status.CRASHED, "signal 6"),
        ("segfaults", Status.CRASHED, "signal 11"),
        ("exits", Status.CRASHED, "exit code 3"),
        ("is_killed", Status.CRASHED, "signal 9"),
        ("faults", Status.CRASHED, "illegal memory access"),
        ("runs_out_of_memory", Status.OUT_OF_RESOURCES, "device out of memory"),
        ("raises", Status.ERROR, "ZeroDivisionError: a mistake of the candidate's own"),
        ("changes_its_input", Status.WRONG, "changes its input o_proj_weight"),
        ("writes_beside_its_output", Status.WRONG, "writes outside output"),
        ("writes_nothing", Status.WRONG, "values are not finite"),
    ],
)
def test_fault_costs_itself_alone(session: DeviceSession, fault: str, status: Status, reason: str) -> None:
    outcome = evaluate(session, Stage(fault, {}))
    assert (outcome.status, reason in outcome.reason) == (status, True), outcome.reason
    begun = time.monotonic()
    assert evaluate(session, RIGHT).status is Status.OK
    assert time.monotonic() - begun < 15
    assert len(children()) == 1


def test_endless_launch_is_cut_off_within_its_limit(session: DeviceSession) -> None:
    assert evaluate(session, RIGHT).status is Status.OK
    begun = time.monotonic()
    outcome = evaluate(session, Stage("endless", {}), limit_s=1.0)
    assert (outcome.status, outcome.reason) == (Status.TIMEOUT, "compile limit 1 s")
    assert time.monotonic() - begun < 10
    assert children() == set()
    assert evaluate(session, RIGHT).status is Status.OK


def test_fault_in_the_final_costs_that_contestant(session: DeviceSession) -> None:
    registry = load_family("gqa_attention").registry
    stages = registry.default_plan(a_case(), INTERPRETER_LIMITS, kinds=("library", "triton")).stages
    head = tuple(stage for stage in stages if "output" not in stage.template)
    plans = {
        name: FusionPlan((*head, Stage("sdpa", {"BACKEND": "auto"}), Stage(name, {}))) for name in ("right", "aborts")
    }
    entries = [FinalEntry(name, plan, "candidate") for name, plan in plans.items()]
    entries.append(FinalEntry("eager", None, "baseline"))
    entries.append(FinalEntry("no such baseline", None, "baseline"))
    samples = session.final(a_case(), entries, rounds=6, options=OPTIONS, time_budget_s=30)
    assert set(samples.rounds) == {"right", "eager"}
    assert {len(times) for times in samples.rounds.values()} == {6}
    assert "signal 6" in samples.failures["aborts"]
    assert "no baseline" in samples.failures["no such baseline"]


@pytest.mark.parametrize("value", ["nan", "none", "zero", "negative", "infinite"])
def test_time_that_is_none_is_no_time(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_TIME", value)
    with DeviceSession("interpret", hooks=(*bad_candidates.HOOKS, "bad_candidates:install_bad_timer")) as session:
        outcome = evaluate(session, RIGHT)
    assert outcome.status is Status.INVALID_TIME
    assert outcome.samples_us == ()


def test_every_candidate_failing_is_an_answer_not_an_accident() -> None:
    """All stored with reasons, no record, nothing left running."""
    store = MemoryStore()
    effort = Effort("quick", 1, 1, 1, 2, 6, OPTIONS)
    with DeviceSession("interpret", hooks=(*bad_candidates.HOOKS, "bad_candidates:install_bad_timer")) as session:
        os.environ["FAULTY_TIME"] = "nan"
        context = a_context(
            session,  # type: ignore[arg-type]
            store,
            family=load_family("gqa_attention"),
            limits=INTERPRETER_LIMITS,
            effort=effort,
            baselines=(),
        )
        [result] = Tuner(context, store).run([a_case()])
    assert result.record is None
    assert store.trials
    assert {row.status for row in store.trials} == {Status.INVALID_TIME}
    assert store.records == {}


def test_start_method_of_the_program_is_left_alone(session: DeviceSession) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    assert evaluate(session, RIGHT).status is Status.OK
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_device_that_is_not_there_is_told_as_such() -> None:
    if psutil.Process().pid and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    with DeviceSession("cuda:0") as session, pytest.raises(MachineUnfit, match="cuda:0"):
        session.describe()


def test_worker_does_not_outlive_its_parent() -> None:
    """Even a parent that is killed without a word leaves no process behind."""
    program = (
        "from tilewright.search.session import DeviceSession\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    session = DeviceSession('interpret'); session.describe()\n"
        "    print(session._process.pid, flush=True); time.sleep(60)\n"
    )
    script = ROOT / ".pytest_cache" / "orphan.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert psutil.pid_exists(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
