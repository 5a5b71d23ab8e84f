"""Problem and case from the shapes of real tensors; knows axes and expressions, and nothing of what is computed."""

import dataclasses
from collections.abc import Iterable, Mapping

from tilewright import expressions
from tilewright.errors import UsageError
from tilewright.problem import Problem, TensorSpec, WeightMode, WorkloadCase

Shapes = Mapping[str, tuple[int, ...]]


def without(problem: Problem, *, ops: Iterable[str] = (), inputs: Iterable[str] = ()) -> Problem:
    """The problem with these ops and inputs switched off; inputs that no op reads any more go too."""
    gone_ops, gone_inputs = set(ops), set(inputs)
    kept_ops = tuple(
        dataclasses.replace(op, reads=tuple(name for name in op.reads if name not in gone_inputs))
        for op in problem.ops
        if op.name not in gone_ops
    )
    read = {name for op in kept_ops for name in op.reads}
    packings = {name: tuple(p for p in parts if p in read) for name, parts in problem.packings.items()}
    return dataclasses.replace(
        problem,
        ops=kept_ops,
        inputs=tuple(spec for spec in problem.inputs if spec.name in read),
        packings={name: parts for name, parts in packings.items() if parts},
        scalars={name: value for name, value in problem.scalars.items() if name in read},
    )


def infer_case(problem: Problem, shapes: Shapes, *, weight_mode: WeightMode, known: Mapping[str, int]) -> WorkloadCase:
    """The case whose inputs have these shapes; UsageError names the tensor that does not fit, and what would."""
    axes = _Axes(problem, known)
    specs = [spec for spec in problem.inputs if spec.shape is not None]
    for spec in specs:
        axes.bind(spec, shapes[spec.name])
    axes.solve()
    problem = problem.with_constants(**{name: axes.value(name) for name in problem.constants})
    case = problem.case(weight_mode=weight_mode, **{name: axes.value(name) for name in problem.variable_axes})
    for spec in specs:
        if case.shape(spec.name) != shapes[spec.name]:
            raise UsageError(_complaint(spec, shapes[spec.name], f"= {case.shape(spec.name)}"))
    return case


def _complaint(spec: TensorSpec, shape: tuple[int, ...], detail: str) -> str:
    return f"{spec.name} has shape {tuple(shape)}, expected ({', '.join(spec.shape or ())}) {detail}".rstrip()


class _Axes:
    """Axes found so far, each with the tensor that it was read from."""

    def __init__(self, problem: Problem, known: Mapping[str, int]) -> None:
        self._problem = problem
        self._values = dict(known)
        self._sources = dict.fromkeys(known, "the call")

    def bind(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        """Reads every dimension that is a plain axis; the others are checked once the case is known."""
        assert spec.shape is not None
        if len(shape) != len(spec.shape):
            raise UsageError(_complaint(spec, shape, f"with {len(spec.shape)} dimensions"))
        for dim, size in zip(spec.shape, shape, strict=True):
            if not dim.isidentifier():
                continue
            if self._values.setdefault(dim, size) != size:
                raise UsageError(_complaint(spec, shape, f"where {dim} is {self._values[dim]} ({self._sources[dim]})"))
            self._sources.setdefault(dim, spec.name)

    def solve(self) -> None:
        """Finds constants that only appear inside derived axes: `num_heads` of `num_heads * head_dim`."""
        for derived, expression in self._problem.derived.items():
            unknown = [name for name in expressions.names(expression) if name not in self._values]
            if len(unknown) == 1 and derived in self._values:
                self._values[unknown[0]] = self._root(unknown[0], derived, expression)

    def _root(self, unknown: str, derived: str, expression: str) -> int:
        """Expressions are linear in each axis; anything else fails the check at the end."""
        wanted = self._values[derived]
        at_zero, at_one = (expressions.evaluate(expression, {**self._values, unknown: x}) for x in (0, 1))
        slope = at_one - at_zero
        root = (wanted - at_zero) // slope if slope else 0
        if root < 1 or expressions.evaluate(expression, {**self._values, unknown: root}) != wanted:
            known = ", ".join(f"{name}={self._values[name]}" for name in expressions.names(expression) - {unknown})
            source = self._sources[derived]
            raise UsageError(
                f"{source} gives {derived}={wanted}, which is not {expression} for any {unknown} with {known}"
            )
        return root

    def value(self, axis: str) -> int:
        if axis not in self._values:
            raise UsageError(f"{axis} cannot be told from the shapes of the inputs; pass {axis}=...")
        return self._values[axis]
