"""What the worker keeps of the case in hand: input sets, the eager chain, wide references. Imports torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernel_templates.base import Template, Values, allocate, run_kernel
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.inputs import InputOptions, make_inputs, pack
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.kernel_templates.reference import cast, run_ops
from tilewright.kernel_templates.tolerance import Expected, wide_dtype
from tilewright.problem import WorkloadCase
from tilewright.search.outcome import Candidate

GUARD = 7.0
GUARD_ELEMENTS = 1024  # before and behind every checked tensor; keeps 16-byte alignment


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
        self._sums: dict[tuple[InputOptions, int], dict[str, int]] = {}

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
            state = self.outside(options, first)
            eager = run_ops(self.family.ops, names, state, self.case)
            wide = run_ops(self.family.ops, names, cast(state, wide_dtype(self.device)), self.case)
            self._expected[key] = {
                name: Expected.of(eager[name], wide[name]) for name in self.case.problem.ops[last].writes
            }
        return self._expected[key]

    def prepare(self, *every: InputOptions) -> None:
        """Makes what every candidate of the case needs, so that no candidate pays for it."""
        for options in every:
            self.expected(options, 0, len(self.case.problem.ops) - 1)

    def outside(self, options: InputOptions, first: int) -> dict[str, Any]:
        """What a candidate that begins at op `first` finds: inputs, and intermediates as the eager chain has them."""
        return {**self.inputs(options), **self.before(options, first)}

    def note_inputs(self, options: InputOptions, first: int) -> None:
        """Takes the checksums that `changed_inputs` compares with; call it before the candidate runs."""
        if (options, first) not in self._sums:
            self._sums[options, first] = self._checksums(options, first)

    def changed_inputs(self, options: InputOptions, first: int) -> list[str]:
        """Tensors whose bits differ from when they were noted; they are made anew when they are next asked for."""
        before = self._sums[options, first]
        changed = [name for name, total in self._checksums(options, first).items() if total != before[name]]
        if changed:
            self.forget_inputs(options)
        return changed

    def forget_inputs(self, options: InputOptions) -> None:
        """Drops an input set and everything made from it."""
        self._inputs.pop(options, None)
        self._snapshots = {key: value for key, value in self._snapshots.items() if key[0] != options}
        self._expected = {key: value for key, value in self._expected.items() if key[0] != options}

    def _checksums(self, options: InputOptions, first: int) -> dict[str, int]:
        found = {n: _checksum(t) for n, t in self.outside(options, first).items() if isinstance(t, torch.Tensor)}
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))  # the host waits once


class Bound:
    """A candidate over one input set, with its own outputs, intermediates and scratch; `poison`ed memory holds NaN."""

    def __init__(self, state: CaseState, candidate: Candidate, options: InputOptions) -> None:
        segment = state.segment(candidate)
        case = state.case
        ops = case.problem.ops[segment.first : segment.last + 1]
        outside = state.outside(options, segment.first)
        written = list(dict.fromkeys(name for op in ops for name in op.writes))
        empty = allocate(case, written, "meta")
        self._state = state
        self._case = case
        self.segment = segment
        self.made = {name: self._new(name, empty[name].shape, empty[name].dtype) for name in written}
        self.scratch = {
            name: self._new(name, spec.shape, spec.dtype)
            for template, values in segment.steps
            for name, spec in template.scratch(values, case).items()
        }
        self.restores = [(self.made[name], outside[name]) for name in written if name in outside]
        self.tensors: dict[str, Any] = {**outside, **self.scratch, **self.made}
        self.writes = ops[-1].writes

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._state.device)

    def poison(self, *, scratch: bool = True) -> None:
        """NaN everywhere the candidate writes, then the values that it expects to find there."""
        for tensor in (*self.made.values(), *(self.scratch.values() if scratch else ())):
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
        for template, values in self.segment.steps:
            template.launch(self.tensors, values, self._case, run_kernel)


class Checked(Bound):
    """A candidate in guarded memory over private copies of its inputs, which can be loaded with another input set."""

    def __init__(self, state: CaseState, candidate: Candidate, options: InputOptions) -> None:
        self._guards: dict[str, torch.Tensor] = {}
        super().__init__(state, candidate, options)
        self._own = _copied(
            state.case, {n: t for n, t in self.tensors.items() if n not in self.made and n not in self.scratch}
        )
        self.tensors.update(self._own)
        self._loaded = options

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        flat = torch.full((size + 2 * GUARD_ELEMENTS,), GUARD, dtype=dtype, device=self._state.device)
        self._guards[name] = flat
        return flat[GUARD_ELEMENTS : GUARD_ELEMENTS + size].view(shape)

    def load(self, options: InputOptions) -> None:
        """Other values in the same memory, as the next call of a served block has them."""
        outside = self._state.outside(options, self.segment.first)
        for name, tensor in self._own.items():
            tensor.copy_(outside[name])
        self.restores = [(tensor, outside[name]) for name, tensor in self.made.items() if name in outside]
        self._loaded = options

    def changed(self) -> list[str]:
        """Inputs whose bits are no longer those that were loaded."""
        outside = self._state.outside(self._loaded, self.segment.first)
        return [name for name, tensor in self._own.items() if not _same_bits(tensor, outside[name])]

    def overrun(self) -> list[str]:
        """Tensors beside which something was written."""
        bad = []
        for name, flat in self._guards.items():
            edges = torch.cat((flat[:GUARD_ELEMENTS], flat[-GUARD_ELEMENTS:]))
            if not bool((edges == GUARD).all()):
                bad.append(name)
        return bad


def _copied(case: WorkloadCase, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies that lie end to end where the case's weights do."""
    copies: dict[str, Any] = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if case.weight_mode == "packed":
        for parts in case.problem.packings.values():
            pack(copies, [name for name in parts if name in copies])
    return copies


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Of the bits, position included: any single change shows, in one pass over the memory."""
    words = tensor.contiguous().view(torch.uint8).view(-1)
    whole = words[: words.numel() // 8 * 8].view(torch.int64)
    rest = words[words.numel() // 8 * 8 :].to(torch.int64)
    position = torch.arange(1, 1025, device=tensor.device, dtype=torch.int64) * 2 + 1
    folded = whole[: whole.numel() // 1024 * 1024].view(-1, 1024)
    return (folded * position).sum() + whole[whole.numel() // 1024 * 1024 :].sum() * 3 + rest.sum() * 5
