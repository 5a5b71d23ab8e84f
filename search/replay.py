"""A recording as a device: every candidate is answered from the file, and the recorded device seconds are the clock.

The space of a replay is what was recorded, so that template sources may have changed since. What a final's rounds were
is not stored; they are rebuilt so that each contestant has its recorded median and interval against the holder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tilewright.db.environment import Environment
from tilewright.db.rows import Level, Status, TrialRow
from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Value, Values
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, named_limits
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.plan import FusionPlan, Registry, Stage
from tilewright.problem import Ceilings, WorkloadCase
from tilewright.search.context import Compiled, Context
from tilewright.search.final import interval_rank
from tilewright.search.outcome import Candidate, Facts, FinalEntry, FinalSamples, MeasureOptions, TrialOutcome
from tilewright.search.recording import Part, Recording, read_recording
from tilewright.search.request import REPLAY
from tilewright.search.session import Strict

if TYPE_CHECKING:
    from tilewright.search.describe import Described

NOT_RECORDED = TrialOutcome(Status.ERROR, "not recorded")


@dataclass(frozen=True)
class RecordedTemplate(Template):
    """A template whose space is what was recorded of it; its default is the first that was measured."""

    recorded_hash: str = ""
    points: Mapping[str, tuple[Values, ...]] = field(default_factory=dict)  # by key of the case
    keys: frozenset[tuple[str, str]] = frozenset()  # case and stage

    @property
    def source_hash(self) -> str:
        return self.recorded_hash

    def every_config(self, case: WorkloadCase, limits: Limits) -> Iterator[Values]:
        yield from self.points.get(case.key, ())

    def rejection(self, values: Values, case: WorkloadCase, limits: Limits) -> str | None:
        return None if (case.key, Stage(self.name, values).digest) in self.keys else "not_recorded"

    def check_values(self, values: Values, case: WorkloadCase, limits: Limits) -> None:
        if self.rejection(values, case, limits):
            raise UsageError(f"{self.name} {dict(values)} was not recorded at {case.name}")


def recorded_family(recording: Recording) -> Family:
    """The templates as they were when they were recorded, without kernels."""
    return Family(Registry(_template(name, part, recording) for name, part in recording.parts.items()), {}, {})


def _template(name: str, part: Part, recording: Recording) -> RecordedTemplate:
    points = {one.case.key: tuple(row.config for row in one.stages(name)) for one in recording.cases}

    def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
        values: dict[str, dict[Value, None]] = {}
        for point in points.get(case.key, ()):
            for parameter, value in point.items():
                values.setdefault(parameter, {})[value] = None
        return tuple(Choice(parameter, tuple(found)) for parameter, found in values.items())

    def default(case: WorkloadCase, limits: Limits) -> Values:
        return next(iter(points.get(case.key, ())), {})

    return RecordedTemplate(
        name=name,
        kind=part.kind,
        covers=part.covers,
        optional=part.optional,
        choices=choices,
        constraints=(),
        default=default,
        launch=_nothing_to_launch,
        recorded_hash=part.source_hash,
        points=points,
        keys=frozenset((key, Stage(name, point).digest) for key, found in points.items() for point in found),
    )


def _nothing_to_launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    raise UsageError("a recorded template has no kernel")


class ReplayDevice:
    """Stands where a worker's session and a compile pool do; `gpu_s` is what the device would have been held."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.family = recorded_family(recording)
        self.gpu_s = 0.0
        self._cases = {one.case.key: one for one in recording.cases}
        self._rows = {(row.case_key, row.level, row.digest): row for one in recording.cases for row in one.trials}

    @classmethod
    def open(cls, device: str) -> Self:
        """From `replay:FILE`; raises UsageError for a file that cannot be replayed."""
        return cls(read_recording(Path(device.removeprefix(REPLAY))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def describe(self) -> "Described":
        """The recorded device under the kind `replay`, so that nothing found here is served as if measured here."""
        from tilewright.search.describe import Described

        env = self.recording.environment
        ceilings = None
        if env.peak_flops_per_s and env.peak_bytes_per_s:
            ceilings = Ceilings(env.peak_flops_per_s, env.peak_bytes_per_s)
        return Described(replace(env, kind="replay"), limits_of_recorded(env), ceilings)

    def adapt(self, context: Context) -> Context:
        """The same rules on recorded templates, recorded plans, recorded baselines and the recorded clock."""
        finals = (_finalists(one.record.evidence) for one in self.recording.cases if one.record is not None)
        baselines = dict.fromkeys(name for final in finals for name, entry in final.items() if not entry.get("plan"))
        return replace(
            context,
            family=self.family,
            device=self,
            compiler=self,
            baselines=tuple(baselines),
            may_measure=self.holds,
            now_s=lambda: self.gpu_s,
        )

    def holds(self, case: WorkloadCase, plan: FusionPlan) -> bool:
        """Whether the whole block was measured with this plan."""
        return (case.key, Level.PLAN, plan.digest) in self._rows

    def submit(self, stage: Stage, case: WorkloadCase) -> None:
        pass

    def result(self, stage: Stage, case: WorkloadCase) -> Compiled:
        """The recorded facts; a recorded failure is told by `evaluate`."""
        row = self._rows.get((case.key, Level.STAGE, stage.digest))
        return Compiled() if row is None else Compiled(facts=_facts(row), seconds=row.compile_s)

    def evaluate(
        self, case: WorkloadCase, candidate: Candidate, options: MeasureOptions, *, run_limit_s: float
    ) -> TrialOutcome:
        level = Level.STAGE if isinstance(candidate, Stage) else Level.PLAN
        row = self._rows.get((case.key, level, candidate.digest))
        if row is None:
            return NOT_RECORDED
        self.gpu_s += row.gpu_s or 0.0
        return TrialOutcome(
            status=row.status,
            reason=row.reason,
            samples_us=_samples(row),
            error_ratio=row.error_ratio,
            compile_s=row.compile_s,
            gpu_s=row.gpu_s,
            facts=_facts(row),
            noisy="",  # what was doubtful was repeated when it was recorded
        )

    def final(
        self,
        case: WorkloadCase,
        entries: list[FinalEntry],
        *,
        rounds: int,
        options: MeasureOptions,
        time_budget_s: float,
    ) -> FinalSamples:
        """The recorded final as far as it holds these contestants; a plan that was not in it has its trial's time."""
        record = self._cases[case.key].record if case.key in self._cases else None
        recorded = _finalists(record.evidence if record else {})
        holder = next((entry["time_us"][0] for entry in recorded.values() if _is_holder(entry)), None)
        samples: dict[str, tuple[float, ...]] = {}
        failures: dict[str, str] = {}
        for entry in entries:
            found = recorded.get(entry.name, {})
            row = self._rows.get((case.key, Level.PLAN, entry.name))
            if found.get("ratio_to_holder") and holder:
                median, low, high = (holder * ratio for ratio in found["ratio_to_holder"])
                samples[entry.name] = spread(low, median, high, count=rounds, tail=interval_rank(rounds) + 1)
            elif row is not None and row.median_us is not None:
                samples[entry.name] = (row.median_us,) * rounds
            else:
                failures[entry.name] = found.get("failure") or "not recorded"
        return FinalSamples(samples, failures)

    def verify_strict(self, case: WorkloadCase, plan: FusionPlan) -> Strict:
        """What failed when it was recorded fails; of the others only the winner was ever asked."""
        record = self._cases[case.key].record
        failure = (record.evidence.get("failures") or {}).get(plan.digest) if record else None
        if failure:
            return Strict(Status.WRONG, failure)
        return Strict(Status.OK, deterministic=record.deterministic if record else True)


def spread(low: float, middle: float, high: float, *, count: int, tail: int) -> tuple[float, ...]:
    """Values whose order statistics at `tail` from either end are `low` and `high`, and whose median is `middle`."""
    tail = max(0, min(tail, (count - 1) // 2))
    return (*[low] * tail, *[middle] * (count - 2 * tail), *[high] * tail)


def _samples(row: TrialRow) -> tuple[float, ...]:
    """As many as were taken, with their median and quartiles."""
    if row.status is not Status.OK or row.median_us is None:
        return ()
    low = row.median_us if row.q1_us is None else row.q1_us
    high = row.median_us if row.q3_us is None else row.q3_us
    count = max(1, row.samples)
    return spread(low, row.median_us, high, count=count, tail=(count + 1) // 4 + ((count + 1) % 4 > 0))


def limits_of_recorded(environment: Environment) -> Limits:
    """What the recorded device allows."""
    if environment.kind == "interpret":
        return INTERPRETER_LIMITS
    return named_limits(int(environment.capability.replace(".", "")), environment.sm_count)


def _facts(row: TrialRow) -> Facts:
    return Facts(row.registers, row.shared_memory_bytes, row.spill_bytes)


def _finalists(evidence: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: Sequence[dict[str, Any]] = evidence.get("finalists") or ()
    return {str(entry.get("name")): entry for entry in found}


def _is_holder(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("time_us")) and entry.get("ratio_to_holder") == [1.0, 1.0, 1.0]
