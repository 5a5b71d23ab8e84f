"""What the worker keeps of the case in hand: input sets, the eager chain, wide references. Imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernel_templates.base import Template, Tensors, Values, allocate, run_kernel
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.kernel_templates.reference import cast, run_ops
from tilewright.problem import WorkloadCase
from tilewright.search.outcome import Candidate

GUARD_ELEMENTS = 1024  # before and behind every checked tensor; keeps 16-byte alignment


@dataclass(frozen=True)
class Expected:
    """The wide reference of one tensor, and how far the eager block is from it: over all, and in its worst row."""

    value: torch.Tensor
    eager_error: float
    eager_row_error: float


@dataclass(frozen=True)
class Segment:
    """The ops that a candidate covers, as positions in the chain, and its stages."""

    first: int
    last: int  # inclusive
    steps: tuple[tuple[Template, Values], ...]


class CaseState:
    """Device memory of one case, made on first use and dropped as a whole."""

    def __init__(self, case: WorkloadCase, family: Family, device: torch.device) -> None:
        self.case = case
        self.family = family
        self.device = device
        self._inputs: dict[InputOptions, dict[str, Any]] = {}
        self._snapshots: dict[tuple[InputOptions, int], dict[str, torch.Tensor]] = {}
        self._expected: dict[tuple[InputOptions, int, int], dict[str, Expected]] = {}
        self._sums: dict[InputOptions, dict[str, int]] = {}

    def segment(self, candidate: Candidate) -> Segment:
        """Where the candidate sits in the chain."""
        ops = self.case.problem.op_names
        registry = self.family.registry
        if isinstance(candidate, FusionPlan):
            return Segment(0, len(ops) - 1, tuple((registry[s.template], s.values) for s in candidate.stages))
        template = registry[candidate.template]
        covered = template.segment(ops)
        first = ops.index(covered[0])
        return Segment(first, first + len(covered) - 1, ((template, candidate.values),))

    def inputs(self, options: InputOptions) -> dict[str, Any]:
        if options not in self._inputs:
            self._inputs[options] = make_inputs(self.case, self.device, options)
        return self._inputs[options]

    def before(self, options: InputOptions, op: int) -> dict[str, torch.Tensor]:
        """Intermediates as the eager chain has them before op number `op`."""
        if op == 0:
            return {}
        if (options, op) not in self._snapshots:
            state = {**self.inputs(options), **self.before(options, op - 1)}
            made = run_ops(self.family.ops, self.case.problem.op_names[op - 1 : op], state, self.case)
            names = [spec.name for spec in self.case.problem.intermediates if spec.name in made]
            self._snapshots[options, op] = {name: made[name].contiguous() for name in names}
        return self._snapshots[options, op]

    def expected(self, options: InputOptions, first: int, last: int) -> dict[str, Expected]:
        """What ops first..last write, in float32 on a GPU and float64 elsewhere, and the eager block's error."""
        key = (options, first, last)
        if key not in self._expected:
            names = self.case.problem.op_names[first : last + 1]
            state = {**self.inputs(options), **self.before(options, first)}
            eager = run_ops(self.family.ops, names, state, self.case)
            wide = run_ops(self.family.ops, names, cast(state, self._wide), self.case)
            self._expected[key] = {
                name: Expected(wide[name], *errors(eager[name], wide[name]))
                for name in self.case.problem.ops[last].writes
            }
        return self._expected[key]

    def prepare(self) -> None:
        """Makes what every candidate of the case needs, so that no candidate pays for it."""
        self.expected(InputOptions(), 0, len(self.case.problem.ops) - 1)

    def changed_inputs(self, options: InputOptions) -> list[str]:
        """Inputs whose bits differ from when they were made."""
        now = {name: _checksum(t) for name, t in self.inputs(options).items() if isinstance(t, torch.Tensor)}
        before = self._sums.setdefault(options, now)
        return [name for name in now if now[name] != before[name]]

    def note_inputs(self, options: InputOptions) -> None:
        """Takes the checksums that `changed_inputs` compares with; call it before the candidate runs."""
        self.changed_inputs(options)

    def forget_inputs(self, options: InputOptions) -> None:
        """After a candidate spoiled them: everything made from these inputs is made anew."""
        self._inputs.pop(options, None)
        self._sums.pop(options, None)
        self._snapshots = {key: value for key, value in self._snapshots.items() if key[0] != options}
        self._expected = {key: value for key, value in self._expected.items() if key[0] != options}

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cuda" else torch.float64


class Bound:
    """A candidate over one input set, with its own outputs, intermediates and scratch; `poison`ed memory holds NaN."""

    def __init__(self, state: CaseState, candidate: Candidate, options: InputOptions, *, guarded: bool = False) -> None:
        segment = state.segment(candidate)
        case = state.case
        ops = case.problem.ops[segment.first : segment.last + 1]
        source = state.before(options, segment.first)
        written = list(dict.fromkeys(name for op in ops for name in op.writes))
        self._case = case
        self._steps = segment.steps
        self._guards: dict[str, torch.Tensor] = {}
        self.made = {name: self._new(state, name, guarded) for name in written}
        scratch = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=state.device)
            for template, values in segment.steps
            for name, spec in template.scratch(values, case).items()
        }
        self._poisoned = [*self.made.values(), *scratch.values()]
        self.restores = [(self.made[name], source[name]) for name in written if name in source]
        self.tensors: Tensors = {**state.inputs(options), **source, **scratch, **self.made}
        self.writes = ops[-1].writes

    def _new(self, state: CaseState, name: str, guarded: bool) -> torch.Tensor:
        plain: torch.Tensor = allocate(state.case, [name], "meta")[name]
        if not guarded:
            return torch.empty(plain.shape, dtype=plain.dtype, device=state.device)
        size = plain.numel()
        flat = torch.full((size + 2 * GUARD_ELEMENTS,), 7.0, dtype=plain.dtype, device=state.device)
        self._guards[name] = flat
        return flat[GUARD_ELEMENTS : GUARD_ELEMENTS + size].view(plain.shape)

    def poison(self) -> None:
        """NaN everywhere the candidate writes, then the values that it expects to find there."""
        for tensor in self._poisoned:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            else:
                tensor.fill_(-1)
        self.restore()

    def restore(self) -> None:
        """Puts back what the candidate changes in place."""
        for target, source in self.restores:
            target.copy_(source)

    def run(self) -> None:
        for template, values in self._steps:
            template.launch(self.tensors, values, self._case, run_kernel)

    def overrun(self) -> list[str]:
        """Tensors beside which something was written."""
        bad = []
        for name, flat in self._guards.items():
            edges = torch.cat((flat[:GUARD_ELEMENTS], flat[-GUARD_ELEMENTS:]))
            if not bool((edges == 7.0).all()):
                bad.append(name)
        return bad


def errors(found: torch.Tensor, wide: torch.Tensor) -> tuple[float, float]:
    """Relative Frobenius error over all, and that of the worst row; infinite where anything is not finite."""
    difference = found.to(wide.dtype) - wide
    rows, norms = difference.flatten(0, -2).norm(dim=-1), wide.flatten(0, -2).norm(dim=-1)
    total = rows.norm() / norms.norm().clamp_min(1e-30)
    worst = (rows / norms.clamp_min(1e-30)).max()
    values = torch.stack((total, worst)).tolist()
    return tuple(x if x == x else float("inf") for x in values)  # type: ignore[return-value]


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits, position included: any single change shows, in one pass over the memory."""
    words = tensor.contiguous().view(torch.uint8).view(-1)
    whole = words[: words.numel() // 8 * 8].view(torch.int64)
    rest = words[words.numel() // 8 * 8 :].to(torch.int64)
    position = torch.arange(1, 1025, device=tensor.device, dtype=torch.int64) * 2 + 1
    folded = whole[: whole.numel() // 1024 * 1024].view(-1, 1024)
    total = (folded * position).sum() + whole[whole.numel() // 1024 * 1024 :].sum() * 3 + rest.sum() * 5
    return int(total)


Inputs = Mapping[str, Any]
