"""The projections through torch's matrix library (cuBLAS on CUDA), so that a tuned plan never loses to it."""

import torch

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention.common import packed_rows, rows
from tilewright.kernel_templates.gqa_attention.gemm import qkv_widths
from tilewright.problem import WorkloadCase


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return ()


def default(case: WorkloadCase, limits: Limits) -> Values:
    return {}


@torch.no_grad()
def launch_qkv(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    a = rows(tensors["hidden_states"])
    qkv = tensors["qkv"].view(a.shape[0], sum(qkv_widths(case)))
    weights = [tensors[f"{name}_proj_weight"] for name in "qkv"]
    biases = [tensors.get(f"{name}_proj_bias") for name in "qkv"]
    if case.weight_mode == "packed":
        # A contiguous result lets cuBLASLt add the bias in its epilogue.
        weights = [packed_rows(weights)]
        biases = [None if biases[0] is None else torch.cat(biases)]
    # Column slices are written in place through the leading dimension; their bias is laid down first, then added to.
    for weight, bias, out in zip(weights, biases, qkv.split([w.shape[0] for w in weights], dim=1), strict=True):
        if bias is None:
            torch.mm(a, weight.t(), out=out)
        else:
            torch.addmm(bias, a, weight.t(), out=out)


@torch.no_grad()
def launch_output(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    a, w = rows(tensors["context"]), tensors["o_proj_weight"]
    torch.mm(a, w.t(), out=tensors["output"].view(a.shape[0], w.shape[0]))


HELPERS = (
    "tilewright.kernel_templates.gqa_attention.common",
    "tilewright.kernel_templates.gqa_attention.gemm",
)
TEMPLATES = (
    Template(
        name="cublas_qkv",
        kind="library",
        covers=("qkv_projection",),
        choices=choices,
        constraints=(),
        default=default,
        launch=launch_qkv,
        module=__name__,
        helpers=HELPERS,
    ),
    Template(
        name="cublas_output",
        kind="library",
        covers=("output_projection",),
        choices=choices,
        constraints=(),
        default=default,
        launch=launch_output,
        module=__name__,
        helpers=HELPERS,
    ),
)
