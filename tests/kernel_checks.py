"""Checks that every kernel template must pass, whatever it computes."""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from tilewright.kernel_templates.base import Limits, Template, Values, run_kernel
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.kernel_templates.plan import stage_reads, stage_writes
from tilewright.kernel_templates.reference import ReferenceOps, cast, run_ops
from tilewright.problem import Op, Problem, TensorSpec, WorkloadCase, load_problem

# A kernel may err this many times as much as the eager block in the same dtype ...
ERROR_RATIO = 2.0
# ... plus this many rounding steps at the output's largest value, for outputs that eager happens to get exactly.
ROUNDING_STEPS = 0.5


def a_case(
    *, batch_size: int = 1, seq_len: int = 16, dtype: str = "bfloat16", packed: bool = False, bias: bool = True,
    norm: bool = True, rotary_width: int | None = None, shared_table: bool = False, **constants: int,
) -> WorkloadCase:  # fmt: skip
    """A small case of the shipped problem, with the variants that published models have."""
    problem = load_problem()
    problem = problem.with_constants(**{**problem.smoke_constants, **constants}).with_dtype(dtype)
    if not bias:
        problem = without_inputs(problem, "q_proj_bias", "k_proj_bias", "v_proj_bias")
    if not norm:
        ops = tuple(op for op in problem.ops if op.name != "qk_norm")
        problem = without_inputs(
            dataclasses.replace(problem, ops=ops), "q_norm_weight", "k_norm_weight", "rms_norm_eps"
        )
    batch = "1" if shared_table else "batch_size"
    width = str(rotary_width) if rotary_width else "head_dim"
    problem = dataclasses.replace(problem, inputs=tuple(_with_table(s, batch, width) for s in problem.inputs))
    return problem.case(weight_mode="packed" if packed else "separate", batch_size=batch_size, seq_len=seq_len)


def without_inputs(problem: Problem, *names: str) -> Problem:
    """The problem whose chain never reads these."""

    def reduced(op: Op) -> Op:
        return dataclasses.replace(op, reads=tuple(name for name in op.reads if name not in names))

    inputs = tuple(spec for spec in problem.inputs if spec.name not in names)
    return dataclasses.replace(problem, inputs=inputs, ops=tuple(reduced(op) for op in problem.ops))


def _with_table(spec: TensorSpec, batch: str, width: str) -> TensorSpec:
    return dataclasses.replace(spec, shape=(batch, "seq_len", width)) if spec.name in ("cos", "sin") else spec


def stage_inputs(template: Template, case: WorkloadCase, ops: ReferenceOps) -> dict[str, Any]:
    """What the stage reads: harsh inputs, and intermediates as the eager ops before it leave them."""
    inputs = make_inputs(case, "cpu", InputOptions(seed=7, random_norm_weights=True))
    before = case.problem.op_names[: case.problem.op_names.index(template.segment(case.problem.op_names)[0])]
    state = run_ops(ops, before, inputs, case)
    return {name: state[name] for name in stage_reads(template, case)}


def outputs_of(template: Template, values: Values, case: WorkloadCase, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the stage writes into tensors that held NaN before."""
    tensors = dict(inputs)
    for name in stage_writes(template, case):
        if name in inputs:
            tensors[name] = inputs[name].clone()  # in place by contract
        else:
            dtype = getattr(torch, case.problem.tensors[name].dtype)
            tensors[name] = torch.full(case.shape(name) or (), float("nan"), dtype=dtype)
    for name, scratch in template.scratch(values, case).items():
        tensors[name] = torch.full(scratch.shape, float("nan")).to(scratch.dtype)
    template.launch(tensors, values, case, run_kernel)
    return {name: tensors[name] for name in stage_writes(template, case)}


def assert_stage_correct(template: Template, values: Values, case: WorkloadCase, ops: ReferenceOps) -> None:
    """Outputs are finite, complete and at most ERROR_RATIO times as wrong as eager; inputs stay as they were."""
    inputs = stage_inputs(template, case, ops)
    kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    written = outputs_of(template, values, case, inputs)
    for name, value in kept.items():
        assert torch.equal(value, inputs[name]), f"{template.name} {dict(values)} modified {name}"
    segment = template.segment(case.problem.op_names)
    truth = run_ops(ops, segment, cast(inputs, torch.float64), case)
    eager = run_ops(ops, segment, inputs, case)
    for name, got in written.items():
        assert_close(got, truth[name], eager[name], f"{template.name} {dict(values)} at {case.key}: {name}")


def assert_close(got: torch.Tensor, truth: torch.Tensor, eager: torch.Tensor, what: str) -> None:
    """The largest and the root mean square error, each against eager's."""
    assert got.shape == truth.shape, what
    assert got.dtype == eager.dtype, what
    assert bool(torch.isfinite(got).all()), f"{what} is not finite"
    error, allowed = (got.double() - truth).abs(), (eager.double() - truth).abs()
    step = torch.finfo(eager.dtype).eps * truth.abs().max() * ROUNDING_STEPS
    assert error.max() <= ERROR_RATIO * allowed.max() + step, (
        f"{what}: error {error.max():.3g}, eager {allowed.max():.3g}"
    )
    rms, allowed_rms = error.square().mean().sqrt(), allowed.square().mean().sqrt()
    assert rms <= ERROR_RATIO * allowed_rms + step / 16, f"{what}: rms error {rms:.3g}, eager {allowed_rms:.3g}"


def sampled_configs(template: Template, case: WorkloadCase, limits: Limits, at_most: int) -> Iterator[Values]:
    """Valid configs spread evenly over the space, the same ones every time."""
    configs = template.valid_configs(case, limits)
    step = max(1, len(configs) // at_most)
    return islice(configs, 0, None, step)
