"""What a problem and a workload case are: axes, tensors, the op chain, and the floor that the hardware sets."""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Self

from tilewright import expressions
from tilewright.errors import ProblemError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
SUITES = ("full", "smoke")
WeightMode = Literal["separate", "packed"]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name; `shape` holds axis names, expressions or numbers, and is None for a scalar."""

    name: str
    shape: tuple[str, ...] | None
    dtype: str


@dataclass(frozen=True)
class Op:
    """One link of the chain; `flops` is an expression over the axes."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: str


@dataclass(frozen=True)
class Problem:
    """A definition with its op chain; the framework knows nothing else about what is computed."""

    name: str
    family: str
    description: str
    variable_axes: tuple[str, ...]
    constants: Mapping[str, int]
    derived: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    intermediates: tuple[TensorSpec, ...]
    ops: tuple[Op, ...]
    packings: Mapping[str, tuple[str, ...]]
    abbreviations: Mapping[str, str]
    scalars: Mapping[str, float]
    draws: Mapping[str, str]  # how test inputs are drawn where the name does not say it
    reference: str
    suites: Mapping[str, tuple[Mapping[str, int], ...]] = field(default_factory=dict)
    smoke_constants: Mapping[str, int] = field(default_factory=dict)
    tuned_plan_constants: Mapping[str, int] = field(default_factory=dict)  # small, and still a fit for tuned tiles

    @property
    def op_names(self) -> tuple[str, ...]:
        return tuple(op.name for op in self.ops)

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by name: inputs, intermediates, outputs, in this order."""
        return {spec.name: spec for spec in (*self.inputs, *self.intermediates, *self.outputs)}

    def with_constants(self, **constants: int) -> Self:
        """The same problem at other constant axes (hidden size, head counts, ...)."""
        unknown = sorted(set(constants) - set(self.constants))
        if unknown:
            raise ProblemError(
                f"{self.name} has no constant axis {unknown[0]!r}; it has {', '.join(sorted(self.constants))}"
            )
        return dataclasses.replace(self, constants={**self.constants, **constants})

    def with_dtype(self, dtype: str) -> Self:
        """The same problem with every 16-bit tensor in `dtype` (bfloat16 or float16)."""
        if dtype not in ("bfloat16", "float16"):
            raise ProblemError(f"dtype must be bfloat16 or float16, got {dtype!r}")

        def cast(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(dataclasses.replace(s, dtype=dtype) if DTYPE_BYTES[s.dtype] == 2 else s for s in specs)

        return dataclasses.replace(
            self, inputs=cast(self.inputs), outputs=cast(self.outputs), intermediates=cast(self.intermediates)
        )

    @property
    def dtype(self) -> str:
        """Element type of the first output."""
        return self.outputs[0].dtype

    def case(self, *, weight_mode: WeightMode = "separate", **axes: int) -> "WorkloadCase":
        """The case at these variable axes; constant axes may be repeated but not contradicted."""
        return WorkloadCase(self, self._resolve(axes), weight_mode)

    def _resolve(self, axes: Mapping[str, int]) -> Mapping[str, int]:
        known = {*self.variable_axes, *self.constants, *self.derived}
        for name, value in axes.items():
            if name not in known:
                raise ProblemError(f"unknown axis {name!r}; {self.name} has {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ProblemError(f"axis {name} must be a whole number of at least 1, got {value!r}")
        missing = [name for name in self.variable_axes if name not in axes]
        if missing:
            raise ProblemError(f"axis {missing[0]} is missing; {self.name} needs {', '.join(self.variable_axes)}")
        resolved = {**{name: axes[name] for name in self.variable_axes}, **self.constants}
        for name, expression in self.derived.items():
            resolved[name] = expressions.evaluate(expression, resolved)
        for name, value in axes.items():
            if resolved[name] != value:
                raise ProblemError(f"axis {name}={value} contradicts {self.name}, where it is {resolved[name]}")
        return resolved

    def parse_case(self, text: str, *, weight_mode: WeightMode = "separate") -> "WorkloadCase":
        """The case that `b4s512` or `batch_size=4,seq_len=512` names."""
        return self.case(weight_mode=weight_mode, **self._parse_axes(text))

    def _parse_axes(self, text: str) -> dict[str, int]:
        accepted = "".join(f"{short}N" for short in self.abbreviations)
        long_form = ",".join(f"{name}=N" for name in self.variable_axes)
        complaint = f"case {text!r} is not understood; write {accepted} or {long_form}"
        if "=" in text:
            pairs = [part.partition("=") for part in text.split(",")]
        else:
            pattern = "".join(rf"({short})(-?\d+)" for short in self.abbreviations)
            found = re.fullmatch(pattern, text.strip())
            if found is None:
                raise ProblemError(complaint)
            groups = found.groups()
            pairs = [(self.abbreviations[groups[i]], "=", groups[i + 1]) for i in range(0, len(groups), 2)]
        axes: dict[str, int] = {}
        for name, _, value in pairs:
            if not re.fullmatch(r"-?\d+", value.strip()):
                raise ProblemError(complaint)
            if name.strip() in axes:
                raise ProblemError(f"case {text!r} names axis {name.strip()} twice")
            axes[name.strip()] = int(value)
        return axes

    def at_suite(self, name: str) -> Self:
        """The problem at a suite's constants: `full` is as published, `smoke` is small enough for the interpreter."""
        if name not in self.suites:
            raise ProblemError(f"suite must be one of {', '.join(sorted(self.suites))}, got {name!r}")
        return self.with_constants(**self.smoke_constants) if name == "smoke" else self

    def suite(self, name: str, *, weight_mode: WeightMode = "separate") -> tuple["WorkloadCase", ...]:
        """The cases of a suite."""
        problem = self.at_suite(name)
        return tuple(problem.case(weight_mode=weight_mode, **axes) for axes in self.suites[name])


@dataclass(frozen=True)
class Ceilings:
    """What a card can do: `flops_per_s` of its matrix units, `bytes_per_s` of its memory."""

    flops_per_s: float
    bytes_per_s: float

    def floor_us(self, flops: int, size_bytes: int) -> float:
        """Speed of light: the longer of computing and moving, microseconds."""
        return max(flops / self.flops_per_s, size_bytes / self.bytes_per_s) * 1e6


@dataclass(frozen=True)
class WorkloadCase:
    """One problem at concrete axes; equal `key` means equal work."""

    problem: Problem
    axes: Mapping[str, int]
    weight_mode: WeightMode = "separate"

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkloadCase) and other.key == self.key

    @property
    def name(self) -> str:
        """Short form, such as b4s512."""
        return "".join(f"{short}{self.axes[axis]}" for short, axis in self.problem.abbreviations.items())

    @property
    def shape_axes(self) -> Mapping[str, int]:
        """The variable axes alone."""
        return {name: self.axes[name] for name in self.problem.variable_axes}

    @cached_property
    def variant_key(self) -> str:
        """What decides which kernels fit, variable axes aside: chain, inputs, constants, dtype, weights."""
        problem = self.problem
        constants = ",".join(f"{name}={value}" for name, value in sorted(problem.constants.items()))
        inputs = "+".join(spec.name for spec in problem.inputs)
        digest = hashlib.sha256(inputs.encode()).hexdigest()[:8]
        chain = "+".join(problem.op_names)
        return f"{problem.family}|{chain}|{problem.dtype}|{constants}|inputs={digest}|{self.weight_mode}"

    @cached_property
    def key(self) -> str:
        """Identity of the work, stable across processes and machines."""
        return f"{self.variant_key}|" + ",".join(f"{name}={self.axes[name]}" for name in self.problem.variable_axes)

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Concrete shape of a tensor; None for a scalar."""
        spec = self.problem.tensors[tensor]
        if spec.shape is None:
            return None
        return tuple(expressions.evaluate(dim, self.axes) for dim in spec.shape)

    def numel(self, tensor: str) -> int:
        """Elements of a tensor; 1 for a scalar."""
        product = 1
        for dim in self.shape(tensor) or ():
            product *= dim
        return product

    def bytes_of(self, *tensors: str) -> int:
        """Size of these tensors together, bytes; scalars travel as arguments and count nothing."""
        specs = self.problem.tensors
        return sum(
            self.numel(name) * DTYPE_BYTES[specs[name].dtype] for name in tensors if specs[name].shape is not None
        )

    def op_flops(self, op: Op) -> int:
        return expressions.evaluate(op.flops, self.axes)

    def op_bytes(self, op: Op) -> int:
        """Fewest bytes that the op alone moves: what it reads and what it writes, once each."""
        return self.bytes_of(*op.reads, *op.writes)

    @property
    def flops(self) -> int:
        return sum(self.op_flops(op) for op in self.problem.ops)

    @property
    def bytes(self) -> int:
        """Fewest bytes that the whole block moves: inputs and outputs once, intermediates never."""
        return self.bytes_of(*(spec.name for spec in (*self.problem.inputs, *self.problem.outputs)))

    def floor_us(self, ceilings: Ceilings) -> float:
        """Speed of light of the case, microseconds."""
        return ceilings.floor_us(self.flops, self.bytes)
