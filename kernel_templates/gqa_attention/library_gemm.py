"""Library projections: cuBLAS through torch, writing where the block wants it."""

import torch

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.inputs import adjacent
from tilewright.problem import WorkloadCase

NAMES = "qkv"


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return ()


def default(case: WorkloadCase, limits: Limits) -> Values:
    return {}


@torch.no_grad()
def launch_qkv(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    """One GEMM over packed weights, else three into column ranges of the packed rows."""
    x = tensors["hidden_states"].reshape(-1, case["hidden_size"])
    qkv = tensors["qkv"].view(x.shape[0], -1)
    weights = [tensors[f"{name}_proj_weight"] for name in NAMES]
    biases = [tensors[name] for name in (f"{n}_proj_bias" for n in NAMES) if name in tensors]
    if case.weight_mode == "packed" and adjacent(weights) and adjacent(biases):
        _linear(x, _joined(weights), _joined(biases) if biases else None, qkv)
        return
    start = 0
    for weight, bias in zip(weights, biases or [None] * 3, strict=True):
        _linear(x, weight, bias, qkv[:, start : start + weight.shape[0]])
        start += weight.shape[0]


@torch.no_grad()
def launch_output(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    weight = tensors["o_proj_weight"]
    context = tensors["context"].reshape(-1, weight.shape[1])
    torch.mm(context, weight.t(), out=tensors["output"].view(-1, weight.shape[0]))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """cuBLAS takes a leading dimension for its output, so a column range needs no copy."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """One view over tensors that lie end to end."""
    first = parts[0]
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())


QKV = Template(
    name="cublas_qkv",
    kind="library",
    covers=("qkv_projection",),
    choices=choices,
    constraints=(),
    default=default,
    launch=launch_qkv,
    module=__name__,
)
OUTPUT = Template(
    name="cublas_output",
    kind="library",
    covers=("output_projection",),
    choices=choices,
    constraints=(),
    default=default,
    launch=launch_output,
    module=__name__,
)
TEMPLATES = (QKV, OUTPUT)
