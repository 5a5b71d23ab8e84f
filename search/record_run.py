"""What `tilewright record` calls: the trials of some cases, from the database into a recording."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from tilewright.db.environment import Environment, normalised_gpu_name
from tilewright.db.reader import Reader
from tilewright.db.rows import Level, RecordRow, StoredTrial, TrialRow
from tilewright.errors import NothingFound
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Registry
from tilewright.problem import Problem, WeightMode, WorkloadCase, load_problem
from tilewright.search.effort import SPACE
from tilewright.search.recording import Coverage, Part, RecordedCase, Recording
from tilewright.search.replay import limits_of_recorded, recorded_family
from tilewright.search.run import TuneReport, TuneRequest, Watcher, run_tune
from tilewright.search.space import stage_space

EVERY, SAMPLE, SEARCHED = "every valid config", "space-filling sample", "chosen by a search"
CUT_OFF = "random part, the budget ended"


@dataclass(frozen=True)
class RecordRequest:
    """Which trials: the options of `tilewright record`."""

    problem: str
    cases: Sequence[str]
    suite: str = "full"
    db: str | None = None
    gpu: str | None = None
    regime: str = "graph"
    weights: WeightMode = "separate"
    points: int | None = None  # configs that `record --space` wanted of each template


def measure_space(request: RecordRequest, device: str, budget_s: float, watch: Callable[[bool], Watcher]) -> TuneReport:
    """Into the database: every valid config of each template or a space-filling sample, plans of the best, a final."""
    regime, _, warm = request.regime.partition("-")
    return run_tune(
        TuneRequest(
            problem=request.problem,
            cases=request.cases,
            suite=request.suite,
            device=device,
            effort=SPACE.name,
            budget=budget_s,
            regime=regime,
            warm_l2=bool(warm),
            weights=request.weights,
            db=request.db,
        ),
        watch,
    )


@dataclass(frozen=True)
class Exported:
    """The recording, and what was left out of it and why."""

    recording: Recording
    notes: tuple[str, ...]


def export_recording(request: RecordRequest) -> Exported:
    """The latest attempt of each candidate, of the newest environment, protocol and sources; NothingFound for none."""
    problem = load_problem(request.problem).at_suite(request.suite)
    cases = [problem.parse_case(text, weight_mode=request.weights) for text in request.cases]
    with Reader.open(request.db) as reader:
        found = [row for case in cases for row in reader.trials(case_key=case.key)]
        protocols = {run.id: run.run.protocol for run in reader.runs()}
        found = [row for row in found if not row.invalid and row.trial.regime == request.regime]
        if request.gpu is not None:
            wanted = normalised_gpu_name(request.gpu)
            found = [row for row in found if row.environment.gpu_name == wanted]
        found = [row for row in found if row.environment.kind != "replay"]
        if not found:
            names = ", ".join(case.name for case in cases)
            raise NothingFound(f"the database has no trial of {names} in regime {request.regime}; `tilewright tune`")
        newest = max(found, key=lambda row: row.id)
        environment, protocol = newest.environment, protocols[newest.run_id]
        same = [
            row for row in found if row.environment.digest == environment.digest and protocols[row.run_id] == protocol
        ]
        active = [
            stored.record
            for case in cases
            for stored in reader.active_records(case_key=case.key, env=environment, regime=request.regime)
            if not stored.invalid
        ]
    notes = [f"{len(found) - len(same)} trials of another environment or protocol"] if len(found) > len(same) else []
    recording, left_out = _recording(request, problem, cases, environment, protocol, same, active)
    return Exported(recording, (*notes, *left_out))


def _recording(
    request: RecordRequest,
    problem: Problem,
    cases: Iterable[WorkloadCase],
    environment: Environment,
    protocol: str,
    found: Sequence[StoredTrial],
    active: Sequence[RecordRow],
) -> tuple[Recording, list[str]]:
    registry = load_family(problem.family).registry
    parts = _parts(registry, found)
    empty = Recording(problem, environment, request.regime, protocol, parts, (), version("tilewright"))
    then = recorded_family(empty).registry
    recorded: list[RecordedCase] = []
    for case in cases:
        kept: dict[tuple[Level, str], TrialRow] = {}
        for stored in found:
            row = stored.trial
            if row.case_key == case.key and _hash_of(row, then) == row.source_hash:
                kept[row.level, row.digest] = row
        record = next((r for r in active if r.case_key == case.key and _plan_hash(r.plan, then) == r.source_hash), None)
        one = RecordedCase(case, tuple(kept.values()), record)
        if one.trials:
            recorded.append(replace(one, coverage=_coverage(one, registry, parts, environment, request.points)))
    total = sum(len(one.trials) for one in recorded)
    notes = [f"{len(found) - total} trials of earlier sources or repeated"] if len(found) > total else []
    missing = [case.name for case in cases if case not in [one.case for one in recorded]]
    notes += [f"case {name}: nothing is stored" for name in missing]
    return replace(empty, cases=tuple(recorded)), notes


def _parts(registry: Registry, found: Sequence[StoredTrial]) -> dict[str, Part]:
    """The templates that are still here, each with the sources of its latest trial."""
    parts = {}
    for stored in found:
        name = stored.trial.template
        if stored.trial.level is Level.STAGE and name in registry:
            template = registry[name]
            parts[name] = Part(template.kind, template.covers, template.optional, stored.trial.source_hash)
    return parts


def _hash_of(row: TrialRow, then: Registry) -> str | None:
    if row.level is Level.STAGE:
        return then[row.template].source_hash if row.template in then else None
    return _plan_hash(row.config, then)


def _plan_hash(content: object, then: Registry) -> str | None:
    plan = FusionPlan.from_json(content)
    return then.source_hash(plan) if all(stage.template in then for stage in plan.stages) else None


def _coverage(
    one: RecordedCase, registry: Registry, parts: dict[str, Part], environment: Environment, points: int | None
) -> dict[str, Coverage]:
    """Counted against the space of today where the sources are those of today."""
    coverage = {}
    for name, part in parts.items():
        recorded = len(one.stages(name))
        if not recorded:
            continue
        valid = None
        if registry[name].source_hash == part.source_hash:
            valid = len(stage_space(registry[name], one.case, limits_of_recorded(environment)).valid)
        how = SEARCHED if points is None else SAMPLE if recorded >= points else CUT_OFF
        coverage[name] = Coverage(recorded, valid, EVERY if recorded == valid else how)
    return coverage
