"""Fusion plans: tilings of the op chain by templates, and how one is run."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch

from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Limits, Run, Template, Tensors, Values, allocate, run_kernel
from tilewright.problem import WorkloadCase


@dataclass(frozen=True)
class Stage:
    """One template with its config."""

    template: str
    values: Values

    @property
    def label(self) -> str:
        return self.template

    def to_json(self) -> dict[str, Any]:
        return {"template": self.template, "values": dict(sorted(self.values.items()))}

    @cached_property
    def digest(self) -> str:
        """Identity of template and config, independent of the order in which values were given."""
        return _digest(self.to_json())


@dataclass(frozen=True)
class FusionPlan:
    """What is run, stored and served: stages that together cover the whole chain."""

    stages: tuple[Stage, ...]

    @property
    def label(self) -> str:
        return " | ".join(stage.label for stage in self.stages)

    def to_json(self) -> list[dict[str, Any]]:
        return [stage.to_json() for stage in self.stages]

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Raises UsageError for anything but what to_json writes."""
        try:
            return cls(tuple(Stage(str(entry["template"]), dict(entry["values"])) for entry in content))
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"not a fusion plan: {content!r}") from error

    @cached_property
    def digest(self) -> str:
        return _digest(self.to_json())


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def tilings(ops: tuple[str, ...], templates: Iterable[Template]) -> Iterator[tuple[Template, ...]]:
    """Every way to cover the chain by templates, in the order in which these are given."""
    candidates = tuple(templates)
    if not ops:
        yield ()
        return
    for template in candidates:
        segment = template.segment(ops)
        if segment and ops[: len(segment)] == segment:
            for rest in tilings(ops[len(segment) :], candidates):
                yield (template, *rest)


class Registry(Mapping[str, Template]):
    """The templates of one problem family, by name."""

    def __init__(self, templates: Iterable[Template]) -> None:
        self._templates = {template.name: template for template in templates}

    def __getitem__(self, name: str) -> Template:
        if name not in self._templates:
            raise UsageError(f"no template {name!r}; registered: {', '.join(self._templates)}")
        return self._templates[name]

    def add(self, template: Template) -> None:
        """One more template, the public hook for candidates from elsewhere; UsageError for a name that is taken."""
        if template.name in self._templates:
            raise UsageError(f"template {template.name!r} is registered already")
        self._templates[template.name] = template

    def __contains__(self, name: object) -> bool:
        return name in self._templates

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def source_hash(self, plan: FusionPlan) -> str:
        """Identity of the sources that a plan runs."""
        return _digest([self[stage.template].source_hash for stage in plan.stages])

    def check(self, plan: FusionPlan, case: WorkloadCase, limits: Limits) -> None:
        """Raises UsageError unless the plan tiles the case's chain and every stage may run there."""
        ops = case.problem.op_names
        covered = tuple(op for stage in plan.stages for op in self[stage.template].segment(ops))
        if covered != ops:
            raise UsageError(f"plan {plan.label} covers {'+'.join(covered)}, the chain is {'+'.join(ops)}")
        for stage in plan.stages:
            template = self[stage.template]
            template.check_values(stage.values, case, limits)
            reason = template.rejection(stage.values, case, limits)
            if reason is not None:
                raise UsageError(f"{template.name} {dict(stage.values)} is rejected at {case.name}: {reason}")

    def default_plan(
        self, case: WorkloadCase, limits: Limits, *, kinds: tuple[str, ...] = ("triton", "library")
    ) -> FusionPlan:
        """The first tiling, in the family's order of preference, whose defaults may all run."""
        usable = [t for t in self.values() if t.kind in kinds and self._default_fits(t, case, limits)]
        for tiling in tilings(case.problem.op_names, usable):
            return FusionPlan(tuple(Stage(t.name, t.default(case, limits)) for t in tiling))
        raise UsageError(f"no template covers {case.name} ({case.problem.dtype}) on this device")

    @staticmethod
    def _default_fits(template: Template, case: WorkloadCase, limits: Limits) -> bool:
        return template.rejection(template.default(case, limits), case, limits) is None


def stage_reads(template: Template, case: WorkloadCase) -> tuple[str, ...]:
    """Tensors that the stage needs from outside itself."""
    ops = _ops(template, case)
    written: set[str] = set()
    reads: list[str] = []
    for op in ops:
        reads += [name for name in op.reads if name not in written and name not in reads]
        written.update(op.writes)
    return tuple(reads)


def stage_writes(template: Template, case: WorkloadCase) -> tuple[str, ...]:
    """Tensors that are valid after the stage: those its last ops write."""
    ops = _ops(template, case)
    last_read = {name for op in ops for name in op.reads}
    writes = [name for op in ops for name in op.writes]
    kept = [name for name in writes if name not in last_read or name in ops[-1].writes]
    return tuple(dict.fromkeys(kept))


def left_behind(registry: Registry, plan: FusionPlan, case: WorkloadCase) -> frozenset[str]:
    """Tensors that hold their final value once the plan has run; a stage may keep to itself what it alone reads."""
    left: frozenset[str] = frozenset()
    for stage in plan.stages:
        template = registry[stage.template]
        touched = {name for op in _ops(template, case) for name in op.writes}
        left = (left - touched) | frozenset(stage_writes(template, case))
    return left


def _ops(template: Template, case: WorkloadCase) -> list[Any]:
    segment = template.segment(case.problem.op_names)
    return [op for op in case.problem.ops if op.name in segment]


class BoundPlan:
    """A plan with its intermediates and scratch allocated; calling it launches every stage in order."""

    def __init__(self, registry: Registry, plan: FusionPlan, case: WorkloadCase, device: torch.device | str) -> None:
        self.plan = plan
        self.case = case
        self._steps = [(registry[stage.template], stage.values) for stage in plan.stages]
        self.workspace: dict[str, torch.Tensor] = dict(
            allocate(case, [spec.name for spec in case.problem.intermediates], device)
        )
        for template, values in self._steps:
            for name, scratch in template.scratch(values, case).items():
                self.workspace[name] = torch.empty(scratch.shape, dtype=scratch.dtype, device=device)

    def __call__(self, tensors: Tensors, run: Run = run_kernel) -> None:
        """`tensors` holds the problem's inputs and outputs; outputs are written in place."""
        everything = {**self.workspace, **tensors}
        for template, values in self._steps:
            template.launch(everything, values, self.case, run)
