"""What the search of one case works with: the device, the compile pool, the store, and the rules of this run."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import Protocol

from tilewright.db.environment import Environment
from tilewright.db.rows import Level, Status, TrialRow
from tilewright.kernel_templates.base import Limits, Template, Values
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import Ceilings, WorkloadCase
from tilewright.search.effort import Effort
from tilewright.search.outcome import Candidate, Facts, FinalEntry, FinalSamples, MeasureOptions, TrialOutcome
from tilewright.search.progress import Progress
from tilewright.search.study import Point, PointStudy

PAUSE_S = 0.1  # between two looks at what other boards measure


class Device(Protocol):
    """Who runs candidates: an isolated worker, a recording, a fake. A bad candidate is an answer, no exception."""

    def evaluate(
        self, case: WorkloadCase, candidate: Candidate, options: MeasureOptions, *, run_limit_s: float
    ) -> TrialOutcome: ...

    def final(
        self,
        case: WorkloadCase,
        entries: list[FinalEntry],
        *,
        rounds: int,
        options: MeasureOptions,
        time_budget_s: float,
    ) -> FinalSamples: ...

    def verify_strict(self, case: WorkloadCase, plan: FusionPlan) -> "StrictOutcome": ...


class StrictOutcome(Protocol):
    @property
    def status(self) -> Status: ...
    @property
    def reason(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...


@dataclass(frozen=True)
class Compiled:
    """The compile pool's answer; status is ok, or why the candidate ends here."""

    status: Status = Status.OK
    reason: str = ""
    facts: Facts = field(default_factory=Facts)
    seconds: float | None = None


class CompileAhead(Protocol):
    """Compiles in the background; `result` waits for one stage that was submitted."""

    def submit(self, stage: Stage, case: WorkloadCase) -> None: ...
    def result(self, stage: Stage, case: WorkloadCase) -> Compiled: ...


class NoCompiler:
    """For devices that have nothing to compile."""

    def submit(self, stage: Stage, case: WorkloadCase) -> None:
        pass

    def result(self, stage: Stage, case: WorkloadCase) -> Compiled:
        return Compiled()


class Share(Protocol):
    """A case that several boards search: what the others know, and who decides."""

    def known(self, case: WorkloadCase, default: str, yardstick_us: float) -> list[TrialRow]:
        """Everyone's trials, each time as its ratio to the default plan on its own board, times `yardstick_us`."""
        ...

    def study(
        self, points: Sequence[Point], *, budget: int, sampler: str, seed: int, name: Sequence[str]
    ) -> PointStudy: ...

    def is_last(self) -> bool:
        """Whether all other boards are done; true for one board alone, which then runs the final."""
        ...


@dataclass(frozen=True)
class Context:
    """Everything that does not change from case to case in one run."""

    family: Family
    device: Device
    compiler: CompileAhead
    environment: Environment
    limits: Limits
    effort: Effort
    progress: Progress
    record_trial: Callable[[WorkloadCase, TrialRow], None]
    known_trials: Callable[[WorkloadCase], Sequence[TrialRow]]
    ceilings: Ceilings | None = None
    kinds: tuple[str, ...] = ("triton", "library")
    baselines: tuple[str, ...] = ()
    sampler: str = "auto"
    seed: int = 0
    min_gain: float = 0.01
    look_ahead: int = 8  # candidates that compile while one is measured
    may_measure: Callable[[WorkloadCase, FusionPlan], bool] = lambda case, plan: True  # a recording holds some plans
    stopping: Callable[[], bool] = lambda: False
    now_s: Callable[[], float] = lambda: 0.0
    share: Share | None = None

    @property
    def measures(self) -> bool:
        """False where times are no measurements."""
        return self.limits.kind != "interpret"


def open_study(context: Context, points: Sequence[Point], budget: int, *name: str) -> PointStudy:
    """This run's own, or, of a shared case, the one that the boards have in common under this name."""
    if context.share is None:
        return PointStudy(points, budget=budget, sampler=context.sampler, seed=context.seed)
    return context.share.study(points, budget=budget, sampler=context.sampler, seed=context.seed, name=name)


def waits_for_others(studies: Iterable[PointStudy]) -> bool:
    """True after a pause: every board goes on with the same results, and a dead one's points are taken over."""
    if not any(study.waits() for study in studies):
        return False
    time.sleep(PAUSE_S)
    return True


def stage_row(case: WorkloadCase, template: Template, values: Values, outcome: TrialOutcome, regime: str) -> TrialRow:
    stage = Stage(template.name, values)
    return _row(
        case, Level.STAGE, template.name, stage.label, dict(values), stage.digest, template.source_hash, outcome, regime
    )


def plan_row(case: WorkloadCase, family: Family, plan: FusionPlan, outcome: TrialOutcome, regime: str) -> TrialRow:
    source_hash = family.registry.source_hash(plan)
    return _row(case, Level.PLAN, "", plan.label, plan.to_json(), plan.digest, source_hash, outcome, regime)


def _row(
    case: WorkloadCase,
    level: Level,
    template: str,
    label: str,
    config: object,
    digest: str,
    source_hash: str,
    outcome: TrialOutcome,
    regime: str,
) -> TrialRow:
    samples = outcome.samples_us
    q1, q3 = quartiles(samples)
    return TrialRow(
        case_key=case.key,
        level=level,
        template=template,
        label=label,
        config=config,
        digest=digest,
        source_hash=source_hash,
        status=outcome.status,
        reason=outcome.reason,
        regime=regime,
        compile_s=outcome.compile_s,
        gpu_s=outcome.gpu_s,
        median_us=median(samples) if samples else None,
        q1_us=q1,
        q3_us=q3,
        samples=len(samples),
        error_ratio=outcome.error_ratio,
        registers=outcome.facts.registers,
        shared_memory_bytes=outcome.facts.shared_memory_bytes,
        spill_bytes=outcome.facts.spill_bytes,
        noisy=outcome.noisy,
        finished_at=datetime.now(UTC),
    )


def quartiles(samples: Sequence[float]) -> tuple[float | None, float | None]:
    """First and third quartile; None where there are fewer than two samples."""
    if len(samples) < 2:
        return None, None
    first, _, third = quantiles(samples, n=4)
    return first, third
