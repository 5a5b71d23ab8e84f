"""A device that answers from a formula, and a family of templates that nothing launches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.db.environment import Environment
from tilewright.db.rows import RecordRow, Status, TrialRow
from tilewright.kernel_templates.base import Choice, Limits, Template, Values
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.plan import FusionPlan, Registry, Stage
from tilewright.problem import Ceilings, WorkloadCase, load_problem
from tilewright.search.context import Context
from tilewright.search.effort import Effort
from tilewright.search.outcome import Candidate, FinalEntry, FinalSamples, MeasureOptions, TrialOutcome
from tilewright.search.progress import Silent

LIMITS = Limits("cuda", 90, 227 * 1024, 132)
ENVIRONMENT = Environment("cuda", "NVIDIA H200", 132, 150 << 30, "9.0", "3.6.0")
EFFORT = Effort("quick", 12, 6, 2, 3, 12, MeasureOptions())


def template(name: str, *covers: str, tiles: tuple[int, ...] = (16, 32, 64, 128), kind: str = "triton") -> Template:
    return Template(
        name=name,
        kind=kind,
        covers=covers,
        choices=lambda case, limits: (Choice("TILE", tiles), Choice("WARPS", (2, 4, 8))),
        constraints=(tile_fits,),
        default=lambda case, limits: {"TILE": tiles[0], "WARPS": 4},
        launch=lambda tensors, values, case, run: None,
        module=__name__,
    )


def tile_fits(values: Values, case: WorkloadCase, limits: Limits) -> bool:
    return not (values["TILE"] == 128 and values["WARPS"] == 2)


FAMILY = Family(
    Registry(
        [
            template("split_projection", "qkv_projection"),
            template("norm_rope", "qk_norm", "rope"),
            template("fused_projection", "qkv_projection", "qk_norm", "rope"),
            template("attention", "attention"),
            template("library_output", "output_projection", kind="library"),
            template("output", "output_projection"),
        ]
    ),
    ops={},
    baselines={},
)

BASE_US = {"split_projection": 60, "norm_rope": 30, "fused_projection": 70, "attention": 50, "output": 40}


def stage_us(stage: Stage) -> float:
    tile, warps = int(stage.values["TILE"]), int(stage.values["WARPS"])
    return BASE_US.get(stage.template, 45) * (1 + abs(tile - 64) / 64 + abs(warps - 4) / 10)


@dataclass
class FormulaDevice:
    """Times by `stage_us`; `fault` may answer otherwise for a candidate."""

    fault: Callable[[Candidate], TrialOutcome | None] = lambda candidate: None
    strict: Callable[[FusionPlan], TrialOutcome] = lambda plan: TrialOutcome(Status.OK)
    baseline_us: float = 400.0
    evaluated: list[Candidate] = field(default_factory=list)

    def evaluate(
        self, case: WorkloadCase, candidate: Candidate, options: MeasureOptions, *, run_limit_s: float
    ) -> TrialOutcome:
        self.evaluated.append(candidate)
        return self.fault(candidate) or TrialOutcome(Status.OK, samples_us=self._times(candidate, 8), error_ratio=1.0)

    def final(
        self,
        case: WorkloadCase,
        entries: list[FinalEntry],
        *,
        rounds: int,
        options: MeasureOptions,
        time_budget_s: float,
    ) -> FinalSamples:
        return FinalSamples(
            {e.name: self._times(e.plan, rounds) if e.plan else (self.baseline_us,) * rounds for e in entries}
        )

    def verify_strict(self, case: WorkloadCase, plan: FusionPlan) -> "Strict":
        outcome = self.strict(plan)
        return Strict(outcome.status, outcome.reason)

    @staticmethod
    def _times(candidate: Candidate, count: int) -> tuple[float, ...]:
        stages = candidate.stages if isinstance(candidate, FusionPlan) else (candidate,)
        return tuple(sum(map(stage_us, stages)) * (1 + 1e-4 * i) for i in range(count))


@dataclass(frozen=True)
class Strict:
    status: Status
    reason: str = ""
    deterministic: bool = True


@dataclass
class MemoryStore:
    """Trials and records in lists, with the part of the store's behaviour that the tuner relies on."""

    trials: list[TrialRow] = field(default_factory=list)
    records: dict[str, RecordRow] = field(default_factory=dict)

    def record_trial(self, case: WorkloadCase, row: TrialRow) -> None:
        self.trials.append(row)

    def known_trials(self, case: WorkloadCase) -> list[TrialRow]:
        return [row for row in self.trials if row.case_key == case.key]

    def activate(self, case: WorkloadCase, record: RecordRow) -> None:
        self.records[case.key] = record

    def active(self, case: WorkloadCase) -> RecordRow | None:
        return self.records.get(case.key)

    def winners(self, case: WorkloadCase) -> list[tuple[WorkloadCase, FusionPlan]]:
        cases = {key: case.problem.case(**_axes(key)) for key in self.records}
        return [(cases[key], FusionPlan.from_json(record.plan)) for key, record in self.records.items()]


def _axes(key: str) -> dict[str, Any]:
    pairs = (pair.partition("=") for pair in key.rpartition("|")[2].split(","))
    return {name: int(value) for name, _, value in pairs}


def a_case(name: str = "b4s512") -> WorkloadCase:
    return load_problem().parse_case(name)


def a_context(device: FormulaDevice, store: MemoryStore, **changes: Any) -> Context:
    settings: Mapping[str, Any] = {
        "family": FAMILY,
        "device": device,
        "compiler": _compiler(),
        "environment": ENVIRONMENT,
        "limits": LIMITS,
        "effort": EFFORT,
        "progress": Silent(),
        "record_trial": store.record_trial,
        "known_trials": store.known_trials,
        "ceilings": Ceilings(790e12, 4.3e12),
        "baselines": ("library",),
        **changes,
    }
    return Context(**settings)


def _compiler() -> Any:
    from tilewright.search.context import NoCompiler

    return NoCompiler()
