"""`kernel.py`: the tuned plans of one problem as one file that needs torch and Triton alone."""

import ast
import pprint
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import Problem
from tilewright.report.exchange.inline import Inliner, Key
from tilewright.report.text import clean

RESERVED = ("run", "Case", "launch_kernel", "CONSTANTS", "STAGES", "PLANS", "DEFAULT_PLAN", "OPS")

_SHIM = '''
class Case:
    """The axes and shapes of one call, as the launch functions ask for them."""

    weight_mode = "separate"

    def __init__(self, axes, shapes):
        self.axes, self.shapes, self.problem = axes, shapes, self
        self.op_names = OPS

    def __getitem__(self, axis):
        return self.axes[axis]

    def shape(self, tensor):
        return self.shapes[tensor]


def launch_kernel(kernel, grid, /, *args, **options):
    return kernel[grid](*args, **options)
'''


@dataclass(frozen=True)
class TunedPlan:
    """A plan for the variable axes that it was tuned at; `evidence` stands beside it as a comment."""

    axes: Mapping[str, int]
    plan: FusionPlan
    evidence: str = ""


def kernel_file(problem: Problem, tuned: Sequence[TunedPlan], default: FusionPlan, header: Iterable[str]) -> str:
    """The text; `run(inputs..., outputs...)` writes the outputs in place and dispatches by the variable axes."""
    registry = load_family(problem.family).registry
    inliner = Inliner(RESERVED)
    used = sorted({stage.template for plan in (*(t.plan for t in tuned), default) for stage in plan.stages})
    where = {name: [_taken(inliner, f) for f in (registry[name].launch, registry[name].scratch)] for name in used}
    body = inliner.text()
    stages = "".join(
        f"    {name!r}: ({', '.join(inliner.new_names[k] for k in keys)}),\n" for name, keys in where.items()
    )
    parts = [
        "\n".join(f"# {clean(line)}".rstrip() for line in header),
        body.rstrip(),
        "# ---- dispatch",
        f"CONSTANTS = {pprint.pformat(dict(problem.constants), sort_dicts=False)}\nOPS = {problem.op_names!r}",
        f"STAGES = {{  # template: what launches it, and the memory that it needs\n{stages}}}",
        _plans(problem, tuned),
        f"DEFAULT_PLAN = {_plan(default, 0)}  # any other shape",
        _SHIM.strip(),
        _run(problem),
    ]
    return "\n\n\n".join(parts) + "\n"


def _taken(inliner: Inliner, function: Any) -> Key:
    """A template's functions are plain ones at the top of a module."""
    return inliner.add(function.__module__, function.__name__)


def _plans(problem: Problem, tuned: Sequence[TunedPlan]) -> str:
    entries = []
    for one in tuned:
        key = tuple(one.axes[axis] for axis in problem.variable_axes)
        comment = f"    # {clean(one.evidence)}\n" if one.evidence else ""
        entries.append(f"{comment}    {key!r}: {_plan(one.plan, 4)},\n")
    return f"PLANS = {{  # by {', '.join(problem.variable_axes)}\n{''.join(entries)}}}"


def _plan(plan: FusionPlan, indent: int) -> str:
    stages = [(stage.template, dict(stage.values)) for stage in plan.stages]
    lines = [f"{' ' * (indent + 4)}({name!r}, {values!r}),\n" for name, values in stages]
    return f"[\n{''.join(lines)}{' ' * indent}]"


def _run(problem: Problem) -> str:
    inputs, outputs = [s.name for s in problem.inputs], [s.name for s in problem.outputs]
    axes = [f'        "{axis}": {_read_off(problem, axis)},\n' for axis in problem.variable_axes]
    derived = [f'    axes["{name}"] = {_over_axes(text)}\n' for name, text in problem.derived.items()]
    shapes = ", ".join(f'"{s.name}": {s.name}.shape' for s in problem.inputs if s.shape is not None)
    made = "".join(
        f'        "{spec.name}": torch.empty(({", ".join(_over_axes(dim) for dim in spec.shape or ())},), '
        f"dtype=torch.{spec.dtype}, device=device),\n"
        for spec in problem.intermediates
    )
    first = next(spec.name for spec in problem.inputs if spec.shape is not None)
    given = ", ".join(f'"{name}": {name}' for name in (*inputs, *outputs))
    return f'''def run({", ".join((*inputs, *outputs))}):
    """Writes {", ".join(outputs)} in place; memory for what lies between is asked for at every call."""
    axes = {{
        **CONSTANTS,
{"".join(axes)}    }}
{"".join(derived)}    case = Case(axes, {{{shapes}}})
    device = {first}.device
    tensors = {{
        {given},
{made}    }}
    for name, values in PLANS.get(({", ".join(f'axes["{axis}"]' for axis in problem.variable_axes)},), DEFAULT_PLAN):
        launch, scratch = STAGES[name]
        for part, wanted in scratch(values, case).items():
            tensors[part] = torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
        launch(tensors, values, case, launch_kernel)'''


def _read_off(problem: Problem, axis: str) -> str:
    """The first dimension that is this axis."""
    for spec in problem.inputs:
        for position, dim in enumerate(spec.shape or ()):
            if dim == axis:
                return f"{spec.name}.shape[{position}]"
    raise UsageError(f"no input of {problem.name} has axis {axis} as a dimension, so a solution cannot dispatch by it")


def _over_axes(expression: str) -> str:
    """Arithmetic over axes as Python over a dictionary of them."""

    class Lookup(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Subscript(ast.Name("axes"), ast.Constant(node.id))

    return ast.unparse(Lookup().visit(ast.parse(expression, mode="eval")))
