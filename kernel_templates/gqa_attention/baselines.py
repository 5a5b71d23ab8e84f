"""What a user would run instead; each writes tensors["output"] in place and compiles on its first call, not before.

In the compiled ones the last projection is cuBLAS writing straight into `output`: inside torch.compile it would be
followed by a copy, which no user pays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.kernel_templates.base import Tensors
from tilewright.kernel_templates.families import Baseline
from tilewright.kernel_templates.gqa_attention.library_attention import attend
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.reference import run_ops
from tilewright.problem import WorkloadCase

Function = Callable[..., Any]
VERSIONS = 4096


def eager(case: WorkloadCase) -> Callable[[Tensors], None]:
    """The definition's math, op by op, scores in memory."""

    def run(tensors: Tensors) -> None:
        tensors["output"].copy_(run_ops(OPS, case.problem.op_names, tensors, case)["output"])

    return run


def torch_compile(case: WorkloadCase) -> Callable[[Tensors], None]:
    return _compiled(case, "default")


def torch_compile_max_autotune(case: WorkloadCase) -> Callable[[Tensors], None]:
    """Without graphs of its own: every contestant is captured alike."""
    return _compiled(case, "max-autotune-no-cudagraphs")


def cublas_cudnn(case: WorkloadCase) -> Callable[[Tensors], None]:
    """Library calls composed by hand around one compiled norm and rotation."""
    norm_rope = _compile(_norm_rope, "default")
    backend = "cudnn" if case["seq_len"] > 1 else "auto"

    @torch.no_grad()
    def run(tensors: Tensors) -> None:
        q, k, v = _projections(tensors, case)
        q, k = norm_rope(q, k, *_norm_arguments(tensors, case), *_tables(tensors, case))
        context = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), backend)
        _project_output(context.transpose(1, 2), tensors)

    return run


BASELINES: Mapping[str, Baseline] = {
    "eager": eager,
    "torch_compile": torch_compile,
    "torch_compile_max_autotune": torch_compile_max_autotune,
    "cublas_cudnn": cublas_cudnn,
}
CPU_BASELINES = ("eager",)


def baselines_for(kind: str) -> Mapping[str, Baseline]:
    """Those that make sense on a device kind: without a GPU, eager alone."""
    return BASELINES if kind == "cuda" else {name: BASELINES[name] for name in CPU_BASELINES}


def _compiled(case: WorkloadCase, mode: str) -> Callable[[Tensors], None]:
    block = _compile(_block, mode)

    @torch.no_grad()
    def run(tensors: Tensors) -> None:
        weights = [tensors[f"{name}_proj_weight"] for name in "qkv"]
        biases = [tensors.get(f"{name}_proj_bias") for name in "qkv"]
        norm, tables = _norm_arguments(tensors, case), _tables(tensors, case)
        context = block(tensors["hidden_states"], weights, biases, norm, tables, case["head_dim"])
        _project_output(context, tensors)

    return run


def _compile(function: Function, mode: str) -> Function:
    """One version a case: torch keeps eight of a function before it refuses, and a suite has more cases than that."""
    import torch._dynamo  # costs a second or two, which no process pays that only launches kernels

    torch._dynamo.config.recompile_limit = VERSIONS
    torch._dynamo.config.accumulated_recompile_limit = VERSIONS
    compiled: Function = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
    return compiled


def _block(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    norm: tuple[Any, ...],
    tables: tuple[Any, ...],
    head_dim: int,
) -> torch.Tensor:
    """hidden_states to context [B, S, Hq, D]."""
    q, k, v = (F.linear(x, w, b).unflatten(-1, (-1, head_dim)) for w, b in zip(weights, biases, strict=True))
    q, k = _norm_rope(q, k, *norm, *tables)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _projections(tensors: Tensors, case: WorkloadCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [B, S, heads, D]: one GEMM where the case's weights are packed, else three."""
    x, head_dim = tensors["hidden_states"], case["head_dim"]
    weights = [tensors[f"{name}_proj_weight"] for name in "qkv"]
    biases = [tensors.get(f"{name}_proj_bias") for name in "qkv"]
    if case.weight_mode == "packed":
        bias = None if biases[0] is None else _joined(biases)
        qkv = F.linear(x, _joined(weights), bias)
        parts = list(qkv.split([w.shape[0] for w in weights], dim=-1))
    else:
        parts = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts)
    return q, k, v


def _joined(parts: list[Any]) -> torch.Tensor:
    """One view over tensors that lie end to end."""
    first = parts[0]
    rows = sum(part.shape[0] for part in parts)
    view: torch.Tensor = first.as_strided((rows, *first.shape[1:]), first.stride())
    return view


def _norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q_weight is not None and k_weight is not None:
        q, k = _rms_norm(q, q_weight, eps), _rms_norm(k, k_weight, eps)
    if cos is not None and sin is not None:
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    return q, k


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = x[..., :width] * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _norm_arguments(tensors: Tensors, case: WorkloadCase) -> tuple[Any, ...]:
    if "qk_norm" not in case.problem.op_names:
        return None, None, 0.0
    return tensors["q_norm_weight"], tensors["k_norm_weight"], float(tensors["rms_norm_eps"])


def _tables(tensors: Tensors, case: WorkloadCase) -> tuple[Any, ...]:
    """cos and sin [B or 1, S, 1, rotary width]."""
    if "rope" not in case.problem.op_names:
        return None, None
    return tensors["cos"][:, :, None], tensors["sin"][:, :, None]


def _project_output(context: torch.Tensor, tensors: Tensors) -> None:
    weight, output = tensors["o_proj_weight"], tensors["output"]
    torch.mm(context.reshape(-1, weight.shape[1]), weight.t(), out=output.view(-1, weight.shape[0]))
