"""Is a plan that nobody tuned here right here? A small check against the eager block, before it may serve."""

import torch

from tilewright.kernel_templates.base import allocate
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.kernel_templates.plan import BoundPlan, FusionPlan
from tilewright.kernel_templates.reference import cast, run_ops
from tilewright.kernel_templates.tolerance import Expected, compare, wide_dtype
from tilewright.problem import WorkloadCase

# Those of the public protocol, and others that show a norm weight left out and an epsilon that counts.
CHECKED = (InputOptions(), InputOptions(101, random_norm_weights=True, faint=True))


def complaint_against(plan: FusionPlan, case: WorkloadCase, family: Family, device: torch.device) -> str:
    """Why the plan's outputs are wrong at this case; empty when they are right. Raises whatever the plan raises.

    Inputs are drawn, because those of a first call may be anything.
    """
    names = [spec.name for spec in case.problem.outputs]
    bound = BoundPlan(family.registry, plan, case, device)
    for options in CHECKED:
        inputs = make_inputs(case, device, options)
        wanted = _expected(family, case, inputs, names, device)
        outputs = allocate(case, names, device)
        for tensor in (*outputs.values(), *bound.workspace.values()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        bound({**inputs, **outputs})
        complaints = (compare(name, outputs[name], wanted[name])[0] for name in names)
        complaint = next(filter(None, complaints), "")
        if complaint:
            return complaint
    return ""


def _expected(
    family: Family, case: WorkloadCase, inputs: dict[str, object], names: list[str], device: torch.device
) -> dict[str, Expected]:
    ops = case.problem.op_names
    eager = run_ops(family.ops, ops, inputs, case)
    wide = run_ops(family.ops, ops, cast(inputs, wide_dtype(device)), case)
    return {name: Expected.of(eager[name], wide[name]) for name in names}
