"""Every record that could answer a lookup, in the order in which they would be used, and what stands against each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.errors import UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.runtime.layers import record_sets
from tilewright.runtime.machine import Device, machine_of
from tilewright.runtime.serving import Asked, Grade, Lookup, PassedOver

ORDER = tuple(Grade)


@dataclass(frozen=True)
class Candidate:
    """A record of the asked case, or of a near shape: how it differs from what is here, and what becomes of it."""

    found: PassedOver
    use: str  # in words

    def to_json(self) -> dict[str, Any]:
        stored = self.found.record
        environment = stored.environment
        return {
            "case": stored.case_name,
            "grade": self.found.grade.value,
            "layer": self.found.layer.value,
            "source": self.found.source,
            "gpu": environment.gpu_name,
            "triton": environment.triton,
            "label": _label(self.found),
            "median_us": stored.record.median_us,
            "differences": list(self.found.differences),
            "use": self.use,
        }


def candidates(found: Lookup, device: Device = None, *, db: str | Path | None = None) -> list[Candidate]:
    """Those of the asked case, and those near enough to lend their plan; what is served comes first."""
    asked = Asked(found.case, machine_of(device), load_family(found.case.problem.family).registry)
    every = [replace(one, obstacle=asked.obstacle(one)) for one in _every(asked, db)]
    ordered = sorted(every, key=lambda one: (one.record is not found.record, ORDER.index(one.grade)))
    return [Candidate(one, _use(one, found)) for one in ordered]


def _every(asked: Asked, db: str | Path | None) -> Iterator[PassedOver]:
    sets = record_sets(db)
    case = asked.case
    for records in sets:
        for record in records.of_case.get(case.key, ()):
            yield asked.grade(record, records)
    separate: WorkloadCase = replace(case, weight_mode="separate")
    for variant in dict.fromkeys((case.variant_key, separate.variant_key)):
        near = sorted(asked.near(variant, sets), key=lambda one: one[0])
        yield from (replace(one, grade=Grade.TRANSFERRED) for _, one in near)


def _use(one: PassedOver, found: Lookup) -> str:
    """One clause a person can act on."""
    if one.record is found.record:
        return "served after a check" if one.grade is Grade.STALE else "served"
    if one.grade is Grade.FOREIGN:
        return "never served here: it was tuned on another card"
    if one.obstacle:
        return f"not served: {one.obstacle}"
    if one.grade is Grade.STALE:
        return "not served without --allow-stale or TILEWRIGHT_ALLOW_STALE=1, and then only after a check"
    return "next best"


def _label(one: PassedOver) -> str:
    try:
        return FusionPlan.from_json(one.record.record.plan).label
    except UsageError:
        return "unreadable plan"
