"""Which plan serves a case here, and how well it fits.

Rule, in this order, over the layers explicit, user, shipped:

1. A record of the same case whose environment is equal in every identity field (kind, GPU model, SM count, memory
   class, capability, MIG slice, Triton's public version) and whose templates have the same source: `exact`, or
   `compatible` where only torch, CUDA, driver or ptxas differ.
2. Else, among such records of the same variant, the nearest shape: smallest ratio of the products of the variable
   axes (tokens), then of each axis from the last, then the case's name; never outside a factor of MOST_RATIO in the
   product or in any axis; and the plan must pass every constraint at the asked case: `transferred`. A case with packed
   weights then looks at the records of separate ones, whose plans it can run.
3. Else, only where allowed, a record of the same case and card from another source or compiler, the newest compiler
   first: `stale`. The engine compiles and checks it before it serves.
4. Else the family's default plan: `default`.

Plans in quarantine are passed over everywhere. Records from another card (`foreign`) are reported, never served.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from tilewright.db.rows import StoredRecord
from tilewright.errors import UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Registry
from tilewright.problem import WorkloadCase
from tilewright.runtime.differences import beside_differences, identity_differences
from tilewright.runtime.layers import Layer, RecordSet, record_sets
from tilewright.runtime.log import forget_warnings, logger, warn_once
from tilewright.runtime.machine import Device, Machine, machine_of
from tilewright.runtime.memo import Memo, clear_all
from tilewright.runtime.quarantine import Failed, reason_against
from tilewright.runtime.stale import compiler_of, stale_allowed

MOST_RATIO = 2


class Grade(StrEnum):
    """How well what is served fits the call, best first."""

    EXACT = "exact"
    COMPATIBLE = "compatible"
    TRANSFERRED = "transferred"
    STALE = "stale"
    FOREIGN = "foreign"
    DEFAULT = "default"


_RANK = {grade: rank for rank, grade in enumerate(Grade)}


@dataclass(frozen=True)
class PassedOver:
    """A record of the asked case that was not served, the fields that differ from here, and what forbids its plan."""

    layer: Layer
    source: str
    record: StoredRecord
    grade: Grade
    differences: tuple[str, ...]
    obstacle: str = ""


@dataclass(frozen=True)
class Lookup:
    """The plan that serves `case`, and why this one."""

    case: WorkloadCase
    plan: FusionPlan
    grade: Grade
    layer: Layer
    reason: str
    source: str = ""  # database or folder that the record comes from
    record: StoredRecord | None = None
    differences: tuple[str, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Schema 1 of `tilewright lookup --json`."""
        row = self.record.record if self.record else None
        return {
            "schema": 1,
            "case": self.case.name,
            "key": self.case.key,
            "grade": self.grade.value,
            "layer": self.layer.value,
            "source": self.source,
            "reason": self.reason,
            "differences": list(self.differences),
            "plan": self.plan.to_json(),
            "label": self.plan.label,
            "record_case": row.case_key if row else None,
            "median_us": row.median_us if row and self.grade in (Grade.EXACT, Grade.COMPATIBLE) else None,
            "passed_over": [
                {
                    "layer": p.layer.value,
                    "source": p.source,
                    "grade": p.grade.value,
                    "differences": list(p.differences),
                    "obstacle": p.obstacle,
                }
                for p in self.passed_over
            ],
        }


_lookups: Memo[tuple[str, Machine, str | Path | None, bool | None], Lookup] = Memo()


def lookup(
    case: WorkloadCase, device: Device = None, *, db: str | Path | None = None, allow_stale: bool | None = None
) -> Lookup:
    """The plan for this case on this device; memoised, safe in threads, and no exception for want of a record.
    `allow_stale` None leaves it to TILEWRIGHT_ALLOW_STALE."""
    machine = machine_of(device)
    key = (case.key, machine, db, allow_stale)
    return _lookups.get(key) or _lookups.keep(key, _find(case, machine, record_sets(db), allow_stale))


def lookup_again(case: WorkloadCase, machine: Machine) -> Lookup:
    """As `lookup`, after a plan was put in quarantine."""
    _lookups.drop((case.key, machine, None, None))
    return lookup(case, machine)


def forget() -> None:
    """Drops every remembered lookup, layer and prepared call: the next one reads the databases again."""
    clear_all()
    forget_warnings()


def _find(case: WorkloadCase, machine: Machine, sets: tuple[RecordSet, ...], allow_stale: bool | None) -> Lookup:
    registry = load_family(case.problem.family).registry
    asked = Asked(case, machine, registry)
    passed_over: list[PassedOver] = []
    stale = stale_allowed(allow_stale)
    for records in sets:
        graded = sorted((asked.grade(record, records) for record in records.of_case.get(case.key, ())), key=_preference)
        for found in graded:
            plan = asked.usable_plan(found) if found.grade in (Grade.EXACT, Grade.COMPATIBLE) else None
            if plan is not None:
                reason = f"tuned for this case on {found.record.environment.gpu_name}"
                return _served(case, plan, found, reason)
            wanted = found.grade in (Grade.EXACT, Grade.COMPATIBLE) or (stale and found.grade is Grade.STALE)
            obstacle = asked.obstacle(found) if wanted else ""
            passed_over.append(replace(found, obstacle=obstacle))
    return (
        asked.nearest(case.variant_key, sets, tuple(passed_over))
        or (
            asked.nearest(_separate(case).variant_key, sets, tuple(passed_over))
            if case.weight_mode == "packed"
            else None
        )
        or (asked.stale(tuple(passed_over)) if stale else None)
        or _default(case, machine, registry, tuple(passed_over))
    )


def _separate(case: WorkloadCase) -> WorkloadCase:
    return replace(case, weight_mode="separate")


def _served(case: WorkloadCase, plan: FusionPlan, found: PassedOver, reason: str) -> Lookup:
    return Lookup(case, plan, found.grade, found.layer, reason, found.source, found.record, found.differences)


def _default(case: WorkloadCase, machine: Machine, registry: Registry, passed_over: tuple[PassedOver, ...]) -> Lookup:
    plan = registry.default_plan(case, machine.limits)
    # A record that cannot be used was warned of already.
    warned = any(found.obstacle for found in passed_over) or warn_once(
        ("untuned", case.variant_key, machine.label),
        "no record for %s (%s, %s) on %s: the default plan runs; `tilewright tune --case %s` finds a better one. "
        "Searched for %s; further untuned shapes are logged at level INFO",
        case.name, case.problem.name, case.problem.dtype, machine.label, case.name, case.key,
    )  # fmt: skip
    if not warned:
        logger.info("no record for %s (%s) on %s", case.name, case.problem.dtype, machine.label)
    reason = "no record of this case or of a near shape fits this machine"
    return Lookup(case, plan, Grade.DEFAULT, Layer.DEFAULT, reason, passed_over=passed_over)


def _preference(found: PassedOver) -> tuple[Any, ...]:
    """Best grade, then graph over eager timing, then the newest, then the digest: the same order in every process."""
    row = found.record.record
    age = -row.created_at.timestamp() if row.created_at else 0.0
    return (_RANK[found.grade], row.regime != "graph", age, row.digest)


@dataclass(frozen=True)
class Asked:
    """One question: judges records for this case, machine and template sources."""

    case: WorkloadCase
    machine: Machine
    registry: Registry

    def grade(self, record: StoredRecord, records: RecordSet) -> PassedOver:
        """How the record's environment and source compare with what is here."""
        differences = list(identity_differences(record.environment, self.machine.environment))
        stale_source = self._source_difference(record)
        grade = Grade.EXACT
        if any(not text.startswith("triton ") for text in differences):
            grade = Grade.FOREIGN
        elif differences or stale_source:
            grade = Grade.STALE
        beside = beside_differences(record.environment, self.machine.environment)
        if grade is Grade.EXACT and beside:
            grade = Grade.COMPATIBLE
        return PassedOver(records.layer, records.source, record, grade, (*differences, *stale_source, *beside))

    def _source_difference(self, record: StoredRecord) -> tuple[str, ...]:
        try:
            plan = FusionPlan.from_json(None if record.invalid else record.record.plan)
        except UsageError:
            return ()  # `usable_plan` says what is wrong with it
        gone = [stage.template for stage in plan.stages if stage.template not in set(self.registry)]
        if gone:
            return (f"template {gone[0]} is not here any more",)
        there, here = record.record.source_hash, self.registry.source_hash(plan)
        return () if here == there else (f"template source {there} there, {here} here",)

    def obstacle(self, found: PassedOver) -> str:
        """Why the record's plan may not run at the asked case; empty when every stage may."""
        try:
            if found.record.invalid:
                raise UsageError(found.record.invalid)
            plan = FusionPlan.from_json(found.record.record.plan)
            self.registry.check(plan, self.case, self.machine.limits)
        except UsageError as error:
            return str(error)
        reason = reason_against(Failed.of(self.case, plan, self.registry, self.machine.environment))
        return f"in quarantine: {reason}" if reason else ""

    def usable_plan(self, found: PassedOver) -> FusionPlan | None:
        """The record's plan unless something forbids it; of a record of the asked case that is said once."""
        row, obstacle = found.record.record, self.obstacle(found)
        if not obstacle:
            return FusionPlan.from_json(row.plan)
        if row.case_key == self.case.key:
            warn_once(
                ("obstacle", found.source, row.case_key, row.digest),
                "record %s of %s in %s is skipped: %s", row.digest, self.case.name, found.source, obstacle,
            )  # fmt: skip
        return None

    def stale(self, passed_over: tuple[PassedOver, ...]) -> Lookup | None:
        """Rule 3: of the first layer that has one, the record of the newest compiler."""
        newest = sorted(passed_over, key=lambda found: compiler_of(found.record), reverse=True)
        for layer in Layer:
            for found in newest:
                plan = self.usable_plan(found) if (found.layer, found.grade) == (layer, Grade.STALE) else None
                if plan is not None:
                    reason = "stale records are allowed; it is compiled and checked here before it first serves"
                    rest = tuple(other for other in passed_over if other is not found)
                    return replace(_served(self.case, plan, found, reason), passed_over=rest)
        return None

    def nearest(self, variant: str, sets: tuple[RecordSet, ...], passed_over: tuple[PassedOver, ...]) -> Lookup | None:
        """Rule 2 over one variant's records; layers only break ties of distance and name."""
        for _, found in sorted(self.near(variant, sets), key=lambda near: near[0]):
            plan = self.usable_plan(found)
            if plan is not None:
                there = ",".join(f"{name}={value}" for name, value in found.record.axes.items())
                weights = "" if variant == self.case.variant_key else ", tuned with separate weights"
                reason = f"nearest tuned shape {there} is within a factor of {MOST_RATIO}{weights}"
                served = _served(self.case, plan, replace(found, grade=Grade.TRANSFERRED), reason)
                return replace(served, passed_over=passed_over)
        return None

    def near(self, variant: str, sets: tuple[RecordSet, ...]) -> Iterator[tuple[Any, PassedOver]]:
        for order, records in enumerate(sets):
            for record in records.of_variant.get(variant, ()):
                distance = _distance(record, self.case)
                if distance is None or record.record.case_key == self.case.key:
                    continue
                found = self.grade(record, records)
                if found.grade in (Grade.EXACT, Grade.COMPATIBLE):
                    yield (*distance, order, _preference(found)), found


def _distance(record: StoredRecord, case: WorkloadCase) -> tuple[Any, ...] | None:
    """Exact ratios in the order of the rule, ending in the name; None outside the bound."""
    here = case.shape_axes
    if set(record.axes) != set(here):
        return None
    ratios = [_ratio(prod(record.axes.values()), prod(here.values()))]
    ratios += [_ratio(record.axes[axis], here[axis]) for axis in reversed(case.problem.variable_axes)]
    if any(ratio > MOST_RATIO for ratio in ratios):
        return None
    return (*ratios, record.case_name)


def _ratio(a: int, b: int) -> Fraction:
    """At least 1, and ordered as |log2(a / b)| is, without rounding."""
    return Fraction(max(a, b), min(a, b)) if min(a, b) > 0 else Fraction(10**9)
