"""Isolation and measuring on a real GPU."""

import time
from collections.abc import Iterator
from statistics import median

import pytest
import torch

from tilewright.db.rows import Status
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import WorkloadCase, load_problem
from tilewright.search.outcome import MeasureOptions, TrialOutcome
from tilewright.search.session import DeviceSession

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OPTIONS = MeasureOptions(min_samples=10, max_samples=20, budget_ms=20)
RIGHT = Stage("cublas_output", {})


def a_case() -> WorkloadCase:
    return load_problem().parse_case("b1s128")


@pytest.fixture(scope="module")
def session() -> Iterator[DeviceSession]:
    with DeviceSession("cuda:0", hooks=("bad_candidates:install", "bad_kernels:install")) as opened:
        yield opened


def evaluate(session: DeviceSession, stage: Stage, *, run_limit_s: float = 10.0) -> TrialOutcome:
    return session.evaluate(a_case(), stage, OPTIONS, run_limit_s=run_limit_s)


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("reads_far_out_of_bounds", Status.CRASHED, "illegal memory access"),
        ("endless_kernel", Status.TIMEOUT, "run limit 3 s"),
        ("takes_all_memory", Status.OUT_OF_RESOURCES, "out of memory"),
    ],
)
def test_fault_of_a_kernel_costs_itself_alone(session: DeviceSession, fault: str, status: Status, reason: str) -> None:
    assert evaluate(session, RIGHT).status is Status.OK
    outcome = evaluate(session, Stage(fault, {}), run_limit_s=3.0)
    assert (outcome.status, reason in outcome.reason) == (status, True), outcome.reason
    begun = time.monotonic()
    assert evaluate(session, RIGHT).status is Status.OK
    assert time.monotonic() - begun < 15


def test_same_candidate_measured_again_has_the_same_time(session: DeviceSession) -> None:
    times = [median(evaluate(session, RIGHT).samples_us) for _ in range(4)]
    assert max(times) / min(times) < 1.1


def test_this_process_never_touches_the_gpu(session: DeviceSession) -> None:
    assert evaluate(session, RIGHT).status is Status.OK
    assert not torch.cuda.is_initialized()


def test_every_default_is_right_at_ragged_lengths(session: DeviceSession) -> None:
    limits = session.describe().limits
    problem = load_problem()
    for name in ("b2s1", "b3s63", "b2s129", "b1s1000"):
        case = problem.parse_case(name)
        for template in load_family("gqa_attention").registry.values():
            values = template.default(case, limits)
            if template.rejection(values, case, limits) is None:
                outcome = session.evaluate(case, Stage(template.name, values), OPTIONS, run_limit_s=20)
                assert outcome.status is Status.OK, f"{template.name} at {name}: {outcome.reason}"
