"""Library attention: torch's scaled_dot_product_attention over strided views of qkv, no head repeated in memory.

Its result is a tensor of its own, so `sdpa` copies it into context; `sdpa_output` covers the output projection too and
needs no copy.
"""

from typing import Any

import torch
import torch.nn.functional as F

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.problem import WorkloadCase


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (Choice("BACKEND", ("cudnn", "flash", "auto") if limits.kind == "cuda" else ("auto",)),)


def default(case: WorkloadCase, limits: Limits) -> Values:
    fused = limits.kind == "cuda" and limits.capability >= 90 and case["seq_len"] > 1
    return {"BACKEND": "cudnn" if fused else "auto"}


def cudnn_has_more_than_one_token(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """cuDNN's causal kernel refuses single rows."""
    return c["BACKEND"] != "cudnn" or case["seq_len"] > 1


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str) -> torch.Tensor:
    """Causal attention of [B, H, S, D] views, laid out in memory as q is; kv heads are shared, not expanded.

    The named backends are called as ops: the context manager that selects them costs more than a short kernel.
    """
    if backend == "cudnn":
        op: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        context: torch.Tensor = op(q, k, v, None, False, 0.0, True, False)[0]
        return context
    if backend == "flash":
        op = torch.ops.aten._scaled_dot_product_flash_attention.default
        context = op(q, k, v, 0.0, True, False)[0]
        return context
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def heads(qkv: torch.Tensor, case: WorkloadCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views [B, H, S, D] of q, k and v."""
    q_heads, kv_heads = case["num_attention_heads"], case["num_key_value_heads"]
    every = qkv.unflatten(-1, (q_heads + 2 * kv_heads, case["head_dim"])).transpose(1, 2)
    q, k, v = every.split([q_heads, kv_heads, kv_heads], dim=1)
    return q, k, v


@torch.no_grad()
def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    context = attend(*heads(tensors["qkv"], case), str(values["BACKEND"]))
    tensors["context"].unflatten(-1, (-1, case["head_dim"])).copy_(context.transpose(1, 2))


@torch.no_grad()
def launch_with_output(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    context = attend(*heads(tensors["qkv"], case), str(values["BACKEND"])).transpose(1, 2)
    output, weight = tensors["output"], tensors["o_proj_weight"]
    torch.mm(context.reshape(-1, weight.shape[1]), weight.t(), out=output.view(-1, weight.shape[0]))


SDPA = Template(
    name="sdpa",
    kind="library",
    covers=("attention",),
    choices=choices,
    constraints=(cudnn_has_more_than_one_token,),
    default=default,
    launch=launch,
    module=__name__,
)
SDPA_OUTPUT = Template(
    name="sdpa_output",
    kind="library",
    covers=("attention", "output_projection"),
    choices=choices,
    constraints=(cudnn_has_more_than_one_token,),
    default=default,
    launch=launch_with_output,
    module=__name__,
)
TEMPLATES = (SDPA, SDPA_OUTPUT)
