"""Shows that the tuner can be believed here: wrong kernels are caught, faults cost only themselves, times repeat."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

from tilewright.db.rows import Status
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import load_family, seeded_module
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.kernel_templates.seeded_faults import FAULTS
from tilewright.problem import DEFAULT_PROBLEM, WorkloadCase, load_problem
from tilewright.search.outcome import MeasureOptions
from tilewright.search.repeatability import noise_floor, twins
from tilewright.search.request import INTERPRET, resolve_device
from tilewright.search.session import DeviceSession

OPTIONS = MeasureOptions(min_samples=4, max_samples=8, budget_ms=10)
RUN_LIMIT_S = 60.0
FAULT_LIMIT_S = 2.0
NEXT_WITHIN_S = 15.0
GPU_CASES = ("b1s128", "b4s512")  # on a GPU; the interpreter takes the shortest smoke case
TWIN_FINALS, MOST_CALLED_DIFFERENT = 100, 5
LEAST_US, MOST_NOISE_PERCENT = 50.0, 1.0


@dataclass(frozen=True)
class Check:
    """One thing that was shown, or not."""

    name: str
    passed: bool
    detail: str
    seconds: float

    @property
    def line(self) -> str:
        return f"{'ok' if self.passed else 'FAIL':<5}{self.name:<46} {self.detail}"


def to_json(device: str, checks: list[Check]) -> dict[str, Any]:
    return {
        "schema": "tilewright.selftest/1",
        "tool_version": version("tilewright"),
        "device": device,
        "passed": all(check.passed for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def run_selftest(device: str, says: Callable[[str], None]) -> dict[str, Any]:
    """Every check, one line each as it ends; `device` as for `tune`."""
    chosen = resolve_device(device)
    checks: list[Check] = []
    for check in _checks(chosen):
        checks.append(check)
        says(check.line)
    return to_json(chosen, checks)


def _checks(device: str) -> Iterator[Check]:
    problem = load_problem(DEFAULT_PROBLEM)
    case = problem.suite("smoke")[0] if device == INTERPRET else problem.parse_case(GPU_CASES[0])
    seeded = import_module(seeded_module(problem.family))
    with DeviceSession(device, hooks=(f"{seeded.__name__}:register",)) as session:
        for entry in seeded.SEEDED:
            yield _timed(f"rejects {entry.fault}", partial(_rejects, session, case, entry, seeded))
        controls = [Stage(control.name, {}) for control in seeded.CONTROLS]
        for control in controls:
            yield _timed(f"accepts {control.template}", partial(_accepts, session, case, control))
        for fault in FAULTS:
            if device != INTERPRET or not fault.needs_gpu:
                yield _timed(f"survives {fault.name}", partial(_survives, session, case, fault, controls[0]))
    with DeviceSession(device) as session:
        limits = session.describe().limits
        for stage in _defaults(case, limits):
            yield _timed(f"accepts default of {stage.template}", partial(_accepts, session, case, stage))
        plan = load_family(problem.family).registry.default_plan(case, limits)
        yield _timed("accepts the default plan, strictly", partial(_accepts_strictly, session, case, plan))
        if device != INTERPRET:
            yield _timed("tells no plan from itself", partial(_twins_agree, session, case, plan))
            for each in map(problem.parse_case, GPU_CASES):
                yield _timed(f"times repeat at {each.name}", partial(_times_repeat, session, each, limits))


def _timed(name: str, act: Callable[[], tuple[bool, str]]) -> Check:
    begun = time.monotonic()
    passed, detail = act()
    return Check(name, passed, detail, round(time.monotonic() - begun, 2))


def _rejects(session: DeviceSession, case: WorkloadCase, entry: Any, seeded: Any) -> tuple[bool, str]:
    """By the check that can see it, and for its own reason."""
    found: Any
    if entry.strict:
        found = session.verify_strict(case, seeded.plan_with(entry.template, case))
    else:
        stage = Stage(entry.template.name, {})
        found = session.evaluate(case, stage, OPTIONS, run_limit_s=RUN_LIMIT_S)
    return found.status is Status.WRONG and entry.reason in found.reason, f"{found.status.value}: {found.reason}"


def _accepts(session: DeviceSession, case: WorkloadCase, stage: Stage) -> tuple[bool, str]:
    found = session.evaluate(case, stage, OPTIONS, run_limit_s=RUN_LIMIT_S)
    ratio = f"{found.error_ratio:.2f} of the eager error" if found.error_ratio is not None else ""
    return found.status is Status.OK, found.reason or ratio


def _accepts_strictly(session: DeviceSession, case: WorkloadCase, plan: FusionPlan) -> tuple[bool, str]:
    found = session.verify_strict(case, plan)
    return found.status is Status.OK, found.reason or plan.label


def _survives(session: DeviceSession, case: WorkloadCase, fault: Any, control: Stage) -> tuple[bool, str]:
    """Its status is right, and the next candidate succeeds in time."""
    ready = session.evaluate(case, control, OPTIONS, run_limit_s=RUN_LIMIT_S)
    found = session.evaluate(
        case, Stage(fault.name, {}), OPTIONS, run_limit_s=FAULT_LIMIT_S, compile_limit_s=FAULT_LIMIT_S
    )
    begun = time.monotonic()
    following = session.evaluate(case, control, OPTIONS, run_limit_s=RUN_LIMIT_S)
    seconds = time.monotonic() - begun
    right = found.status.value == fault.status and fault.reason in found.reason
    passed = right and ready.status is following.status is Status.OK and seconds < NEXT_WITHIN_S
    return passed, f"{found.status.value}: {found.reason}; next {following.status.value} after {seconds:.1f} s"


def _defaults(case: WorkloadCase, limits: Limits) -> list[Stage]:
    templates = load_family(case.problem.family).registry.values()
    pairs = [(template, template.default(case, limits)) for template in templates]
    return [Stage(t.name, values) for t, values in pairs if t.rejection(values, case, limits) is None]


def _twins_agree(session: DeviceSession, case: WorkloadCase, plan: FusionPlan) -> tuple[bool, str]:
    found = twins(session, case, plan, TWIN_FINALS)
    different = found["called_different"]
    return different <= MOST_CALLED_DIFFERENT, f"called different in {different} of {TWIN_FINALS} finals"


def _times_repeat(session: DeviceSession, case: WorkloadCase, limits: Limits) -> tuple[bool, str]:
    """The noise of short blocks is told, not judged."""
    plan = load_family(case.problem.family).registry.default_plan(case, limits)
    found = noise_floor(session, case, plan)
    noise, median_us = found["paired_iqr_percent"], found["median_us"]
    detail = f"{noise:.2f} % of {median_us:.1f} us paired, {found['iqr_percent']:.2f} % taken alone"
    return noise <= MOST_NOISE_PERCENT or median_us < LEAST_US, detail
