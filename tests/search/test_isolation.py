"""Isolation with the attention family: a final with a crashing contestant, and a run in which everything fails."""

import os
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


def test_device_that_is_not_there_is_told_as_such() -> None:
    if psutil.Process().pid and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    with DeviceSession("cuda:0") as session, pytest.raises(MachineUnfit, match="cuda:0"):
        session.describe()
