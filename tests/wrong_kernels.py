"""Implementations that are wrong in one way each; the gate must let none of them through."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from bad_candidates import template
from torch import Tensor

from tilewright.kernel_templates.base import Scratch, Template, Values
from tilewright.kernel_templates.gqa_attention.reference import (
    attention,
    join_heads,
    output_projection,
    qk_norm,
    qkv_projection,
    rope,
    split_heads,
)
from tilewright.problem import WorkloadCase

Tensors = dict[str, Any]
Compute = Callable[[Tensors, WorkloadCase], Mapping[str, Tensor]]


def attend(
    t: Tensors, case: WorkloadCase, mask: Callable[[int], Tensor], shift_group: bool = False
) -> Mapping[str, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in split_heads(t["qkv"], case))
    group = q.shape[1] // k.shape[1]
    if shift_group:
        k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(mask(q.shape[2]), float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return {"context": (weights @ v).transpose(1, 2).flatten(2)}


def no_causal_mask(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return attend(t, case, lambda size: torch.zeros(size, size, dtype=torch.bool))


def mask_off_by_one(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return attend(t, case, lambda size: torch.ones(size, size, dtype=torch.bool).triu(2))


def wrong_kv_head(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """Query head h reads kv head h mod kv heads instead of h // group."""
    return attend(t, case, lambda size: torch.ones(size, size, dtype=torch.bool).triu(1), shift_group=True)


def right_at_whole_tiles_only(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """The last token of a length that is no multiple of 16 attends to its predecessor alone."""
    made = dict(attention(t, case))
    if case["seq_len"] % 16:
        made["context"][:, -1] = made["context"][:, -2]
    return made


def dropped_depth_tail(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    depth = t["hidden_states"].shape[-1] - 16
    parts = [
        F.linear(t["hidden_states"][..., :depth], t[f"{n}_proj_weight"][:, :depth], t[f"{n}_proj_bias"]) for n in "qkv"
    ]
    return {"qkv": torch.cat(parts, dim=-1)}


def bias_left_out(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return qkv_projection({name: value for name, value in t.items() if not name.endswith("bias")}, case)


def only_even_rows(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """Odd rows stay as they were."""
    made = output_projection(t, case)["output"]
    made[:, 1::2] = t["output"][:, 1::2]
    return {"output": made}


def norm(t: Tensors, case: WorkloadCase, change: Callable[[Tensor, Tensor, float], Tensor]) -> Tensors:
    q, k, v = split_heads(t["qkv"], case)
    eps = t["rms_norm_eps"]
    return {**t, "qkv": join_heads(change(q, t["q_norm_weight"], eps), change(k, t["k_norm_weight"], eps), v)}


def eps_outside_the_root(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """With eps near the mean square it shows, as it does for heads close to zero."""

    def change(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weight * (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)

    return rope(norm(t, case, change), case)


def norm_weight_ignored(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    def change(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    return rope(norm(t, case, change), case)


def rotated(t: Tensors, case: WorkloadCase, turn: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
    q, k, v = split_heads(qk_norm(t, case)["qkv"], case)
    cos, sin = t["cos"][:, :, None], t["sin"][:, :, None]
    return {"qkv": join_heads(*(x * cos + turn(x) * sin for x in (q, k)), v)}


def halves_swapped(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return rotated(t, case, lambda x: torch.cat((x.chunk(2, -1)[1], -x.chunk(2, -1)[0]), -1))


def adjacent_pairs(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return rotated(t, case, lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2))


_FIRST: dict[tuple[int, ...], Tensor] = {}


def cached_output(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """What was right for the first inputs, for ever after."""
    made = output_projection(t, case)["output"]
    return {"output": _FIRST.setdefault(tuple(made.shape), made.clone()).clone()}


def stale_scratch(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """Adds into scratch that it takes for empty."""
    t["wrong_partial"].add_(output_projection(t, case)["output"].float())
    return {"output": t["wrong_partial"].to(t["output"].dtype)}


def in_place_input(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    made = output_projection(t, case)
    t["context"].mul_(0.5)
    t["o_proj_weight"][0].add_(1)
    return made


ALL: dict[Compute, tuple[str, ...]] = {
    no_causal_mask: ("attention",),
    mask_off_by_one: ("attention",),
    wrong_kv_head: ("attention",),
    right_at_whole_tiles_only: ("attention",),
    dropped_depth_tail: ("qkv_projection",),
    bias_left_out: ("qkv_projection",),
    eps_outside_the_root: ("qk_norm", "rope"),
    norm_weight_ignored: ("qk_norm", "rope"),
    halves_swapped: ("qk_norm", "rope"),
    adjacent_pairs: ("qk_norm", "rope"),
    only_even_rows: ("output_projection",),
    cached_output: ("output_projection",),
    stale_scratch: ("output_projection",),
    in_place_input: ("output_projection",),
}


def partial(values: Values, case: WorkloadCase) -> dict[str, Scratch]:
    shape = case.shape("output")
    assert shape is not None
    return {"wrong_partial": Scratch(shape, torch.float32)}


def wrong(compute: Compute) -> Template:
    """A template that writes what `compute` makes."""

    def effect(tensors: Tensors, case: WorkloadCase) -> None:
        for name, value in compute(tensors, case).items():
            tensors[name].copy_(value)

    scratch = partial if compute is stale_scratch else None
    return template(compute.__name__, effect, *ALL[compute], scratch=scratch, takes_case=True)
