"""The oracle: each op of the chain in plain PyTorch, in any float dtype.

Run in float32 or float64 it is the truth; run in the problem's own dtype it is the eager block whose rounding error
sets the tolerance. Half-split rotary pairing over the first `cos.shape[-1]` dims of each head; the rest pass through.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.kernel_templates.base import Tensors
from tilewright.problem import WorkloadCase

# Query rows whose scores are held at once; bounds the memory of long sequences.
QUERY_BLOCK = 2048


def qkv_projection(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    parts = [F.linear(t["hidden_states"], t[f"{n}_proj_weight"], t.get(f"{n}_proj_bias")) for n in "qkv"]
    return {"qkv": torch.cat(parts, dim=-1)}


def qk_norm(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    q, k, v = split_heads(t["qkv"], case)
    eps = t["rms_norm_eps"]
    return {"qkv": join_heads(_rms_norm(q, t["q_norm_weight"], eps), _rms_norm(k, t["k_norm_weight"], eps), v)}


def rope(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    q, k, v = split_heads(t["qkv"], case)
    cos, sin = t["cos"][:, :, None], t["sin"][:, :, None]
    return {"qkv": join_heads(_rotate(q, cos, sin), _rotate(k, cos, sin), v)}


def attention(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in split_heads(t["qkv"], case))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    rows = [_attend(q, k, v, start) for start in range(0, q.shape[2], QUERY_BLOCK)]
    return {"context": torch.cat(rows, dim=2).transpose(1, 2).flatten(2)}


def output_projection(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return {"output": F.linear(t["context"], t["o_proj_weight"])}


OPS: Mapping[str, Callable[[Tensors, WorkloadCase], Mapping[str, Tensor]]] = {
    "qkv_projection": qkv_projection,
    "qk_norm": qk_norm,
    "rope": rope,
    "attention": attention,
    "output_projection": output_projection,
}


def split_heads(qkv: Tensor, case: WorkloadCase) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, S, heads, head_dim] of the packed rows [B, S, (q heads + 2 kv heads) * head_dim]."""
    heads, kv_heads = case["num_attention_heads"], case["num_key_value_heads"]
    x = qkv.view(*qkv.shape[:-1], heads + 2 * kv_heads, case["head_dim"])
    return x[:, :, :heads], x[:, :, heads : heads + kv_heads], x[:, :, heads + kv_heads :]


def join_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((q, k, v), dim=2).flatten(2)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computed in at least float32, rounded to x's dtype before the weight is applied, as published models do."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, passed = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, passed), dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of query rows from `start` on, at most QUERY_BLOCK of them."""
    rows = q[:, :, start : start + QUERY_BLOCK]
    end = start + rows.shape[2]
    scores = rows @ k[:, :, :end].transpose(2, 3) * q.shape[-1] ** -0.5
    mask = torch.ones(rows.shape[2], end, dtype=torch.bool, device=q.device).triu(start + 1)
    scores = scores.masked_fill(mask, float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, -1, dtype=wide).to(q.dtype) @ v[:, :, :end]
