"""The fewest plans that serve every case nearly as well as its best: what a small set of kernels would cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.db.environment import Environment, normalised_gpu_name
from tilewright.db.reader import Reader
from tilewright.db.rows import Level, Status, StoredTrial
from tilewright.errors import NothingFound, UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Registry
from tilewright.problem import load_problem

Times = Mapping[str, Mapping[str, float]]  # case -> digest of a plan -> median, us


@dataclass(frozen=True)
class Kept:
    """One plan of the set, with its slowdown against the best measured plan at each case that it is to serve."""

    plan: FusionPlan
    serves: Mapping[str, float]


@dataclass(frozen=True)
class Compressed:
    """The answer; `distinct` counts the plans that are best somewhere."""

    environment: Environment
    max_slowdown: float
    kept: tuple[Kept, ...]
    distinct: int
    measured: int

    @property
    def cases(self) -> int:
        return sum(len(kept.serves) for kept in self.kept)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "tilewright.compress/1",
            "gpu": self.environment.gpu_name,
            "max_slowdown": self.max_slowdown,
            "cases": self.cases,
            "plans_measured": self.measured,
            "best_plans": self.distinct,
            "plans": [
                {
                    "label": kept.plan.label,
                    "digest": kept.plan.digest,
                    "plan": kept.plan.to_json(),
                    "serves": {case: round(slowdown, 4) for case, slowdown in kept.serves.items()},
                }
                for kept in self.kept
            ],
        }

    def text(self) -> str:
        lines = [
            f"{self.environment.gpu_name}: {len(self.kept)} plans serve {self.cases} cases within "
            f"{self.max_slowdown:g} of the best measured plan ({self.distinct} plans are best somewhere, "
            f"{self.measured} were measured)"
        ]
        for kept in self.kept:
            lines.append(f"{kept.plan.digest}  {kept.plan.label}")
            lines += [f"    {case:<10} {slowdown:.3f}" for case, slowdown in sorted(kept.serves.items())]
        return "\n".join(lines)


def compress(problem: str, *, max_slowdown: float, db: str | None, gpu: str | None, regime: str) -> Compressed:
    """From whole blocks measured with today's sources in the newest environment; raises NothingFound for none."""
    if not max_slowdown >= 1:
        raise UsageError(f"--max-slowdown must be at least 1, got {max_slowdown:g}")
    loaded = load_problem(problem)
    with Reader.open(db) as reader:
        found = reader.trials(problem=loaded.name, level=Level.PLAN, statuses=[Status.OK])
    usable = list(_usable(found, load_family(loaded.family).registry, gpu=gpu, regime=regime))
    if not usable:
        raise NothingFound(f"no measured plan of {loaded.name} under today's sources; `tilewright tune` makes some")
    environment = max(usable, key=lambda stored: stored.id).environment
    plans: dict[str, FusionPlan] = {}
    times: dict[str, dict[str, float]] = {}
    for stored in usable:
        if stored.environment.digest == environment.digest and stored.trial.median_us is not None:
            plans[stored.trial.digest] = FusionPlan.from_json(stored.trial.config)
            packed = " packed" if "|packed|" in stored.trial.case_key else ""
            times.setdefault(stored.case_name + packed, {})[stored.trial.digest] = stored.trial.median_us
    best = {case: min(of_plan.values()) for case, of_plan in times.items()}
    kept = [
        Kept(plans[digest], {case: times[case][digest] / best[case] for case in cases})
        for digest, cases in assigned(times, fewest(times, max_slowdown)).items()
    ]
    distinct = {min(of_plan, key=lambda digest: (of_plan[digest], digest)) for of_plan in times.values()}
    return Compressed(environment, max_slowdown, tuple(kept), len(distinct), len(plans))


def _usable(found: Iterable[StoredTrial], registry: Registry, *, gpu: str | None, regime: str) -> Iterable[StoredTrial]:
    for stored in found:
        row = stored.trial
        if stored.invalid or row.regime != regime or stored.environment.kind != "cuda":
            continue
        if gpu is not None and stored.environment.gpu_name != normalised_gpu_name(gpu):
            continue
        plan = FusionPlan.from_json(row.config)
        known = all(stage.template in registry for stage in plan.stages)
        if known and registry.source_hash(plan) == row.source_hash:
            yield stored


def fewest(times: Times, max_slowdown: float) -> tuple[str, ...]:
    """A smallest set of plans with one within `max_slowdown` of the best at every case; exact, by branching.

    A plan counts only where it was measured.
    """
    fits = {
        case: {digest for digest, us in of_plan.items() if us <= max_slowdown * min(of_plan.values())}
        for case, of_plan in times.items()
    }
    for size in range(1, len(fits) + 1):
        found = _cover(fits, size)
        if found is not None:
            return tuple(sorted(found))
    return ()


def _cover(fits: Mapping[str, set[str]], size: int) -> list[str] | None:
    """At most `size` plans that meet every case's set; branches on the case with the fewest plans."""
    if not fits:
        return []
    if size == 0:
        return None
    reach: dict[str, int] = {}
    for digests in fits.values():
        for digest in digests:
            reach[digest] = reach.get(digest, 0) + 1
    if size * max(reach.values()) < len(fits):
        return None
    case = min(fits, key=lambda name: (len(fits[name]), name))
    for digest in sorted(fits[case], key=lambda digest: (-reach[digest], digest)):
        rest = _cover({name: digests for name, digests in fits.items() if digest not in digests}, size - 1)
        if rest is not None:
            return [digest, *rest]
    return None


def assigned(times: Times, kept: Sequence[str]) -> dict[str, list[str]]:
    """The cases of each kept plan: each case goes to the fastest of them that was measured there."""
    cases: dict[str, list[str]] = {digest: [] for digest in kept}
    for case, of_plan in times.items():
        there = [digest for digest in kept if digest in of_plan]
        cases[min(there, key=lambda digest: (of_plan[digest], digest))].append(case)
    return cases
