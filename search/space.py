"""The candidates of a case: valid configs of each template, and plans composed of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

from torch.quasirandom import SobolEngine

from tilewright.kernel_templates.base import Limits, Template, Values
from tilewright.kernel_templates.plan import FusionPlan, Registry, Stage, tilings
from tilewright.problem import WorkloadCase

KINDS = ("triton", "library")
SOBOL_POINTS = 16  # of the raw space, drawn for each config that is wanted


@dataclass(frozen=True)
class StageSpace:
    """One template's configs at a case: those that may run, and why the others may not."""

    template: Template
    valid: tuple[Values, ...]
    rejected: Mapping[str, int]  # reason -> count
    examples: Mapping[str, Values] = field(default_factory=dict)  # reason -> one config

    @property
    def raw_size(self) -> int:
        return len(self.valid) + sum(self.rejected.values())


def stage_space(template: Template, case: WorkloadCase, limits: Limits) -> StageSpace:
    """Every config of the template, sorted into valid ones and rejections by reason, before anything is compiled."""
    valid: list[Values] = []
    rejected: Counter[str] = Counter()
    examples: dict[str, Values] = {}
    for values in template.every_config(case, limits):
        reason = template.rejection(values, case, limits)
        if reason is None:
            valid.append(values)
        else:
            rejected[reason] += 1
            examples.setdefault(reason, values)
    return StageSpace(template, tuple(valid), dict(rejected), examples)


def space_filling(space: StageSpace, case: WorkloadCase, limits: Limits, *, count: int, seed: int = 0) -> StageSpace:
    """The space itself up to `count` valid configs; else its default and the first ones of a scrambled Sobol sequence.

    Rejected points of the sequence are skipped; where it meets too few valid configs, random ones fill up.
    """
    if len(space.valid) <= count:
        return space
    choices = space.template.choices(case, limits)
    left = {_key(values): values for values in space.valid}
    default = _key(space.template.default(case, limits))
    chosen = [left.pop(default)] if default in left else []
    engine = SobolEngine(len(choices), scramble=True, seed=seed)
    for point in engine.draw(SOBOL_POINTS * count).tolist():
        values = {
            c.name: c.values[min(int(x * len(c.values)), len(c.values) - 1)]
            for c, x in zip(choices, point, strict=True)
        }
        if len(chosen) < count and _key(values) in left:
            chosen.append(left.pop(_key(values)))
    chosen += Random(seed).sample(list(left.values()), count - len(chosen))
    return replace(space, valid=tuple(chosen))


def _key(values: Values) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(values.items()))


def case_spaces(
    registry: Registry, case: WorkloadCase, limits: Limits, kinds: Sequence[str] = KINDS
) -> dict[str, StageSpace]:
    """Spaces of the templates that occur in some tiling whose every template has a valid config."""
    spaces = {t.name: stage_space(t, case, limits) for t in registry.values() if t.kind in kinds}
    usable = [registry[name] for name, space in spaces.items() if space.valid]
    used = {template.name for tiling in tilings(case.problem.op_names, usable) for template in tiling}
    return {name: space for name, space in spaces.items() if name in used}


def compositions(
    registry: Registry, case: WorkloadCase, ranked: Mapping[str, Sequence[tuple[Stage, float]]]
) -> list[tuple[float, FusionPlan]]:
    """Every plan made of these stages, with the sum of its stage times (us), shortest first; ties in lexical order."""
    usable = [registry[name] for name in registry if ranked.get(name)]
    plans: list[tuple[float, FusionPlan]] = []
    for tiling in tilings(case.problem.op_names, usable):
        for combination in product(*(ranked[template.name] for template in tiling)):
            plan = FusionPlan(tuple(stage for stage, _ in combination))
            plans.append((sum(time for _, time in combination), plan))
    return sorted(plans, key=lambda entry: (entry[0], entry[1].digest))


def plans_of(registry: Registry, case: WorkloadCase, names: Sequence[str]) -> Iterator[str]:
    """Labels of the tilings by these templates."""
    for tiling in tilings(case.problem.op_names, [registry[name] for name in names]):
        yield " | ".join(template.name for template in tiling)


def coordinates(plan: FusionPlan, ranked: Mapping[str, Sequence[tuple[Stage, float]]]) -> dict[str, str | int]:
    """A plan as a point: which tiling, and for each of its templates the rank of the stage."""
    point: dict[str, str | int] = {"plan": plan.label}
    for stage in plan.stages:
        digests = [entry.digest for entry, _ in ranked[stage.template]]
        point[stage.template] = digests.index(stage.digest)
    return point
