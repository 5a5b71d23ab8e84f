"""Kernels that spoil a CUDA context or never end, added by the hook `bad_kernels:install` on a GPU only."""

from typing import Any

import torch
import triton
import triton.language as tl
from bad_candidates import template

from tilewright.kernel_templates.families import load_family


@triton.jit
def far_out_of_bounds(p_out, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.arange(0, 128).to(tl.int64) * STEP + STEP
    tl.store(p_out + o, tl.load(p_out + o) + 1.0)


@triton.jit
def never_ends(p_out):  # type: ignore[no-untyped-def]
    i = 0
    while i < 1:
        i = tl.atomic_add(p_out, 0)


def reads_far_out_of_bounds(tensors: dict[str, Any]) -> None:
    far_out_of_bounds[(64,)](tensors["output"], STEP=1 << 38)


def endless_kernel(tensors: dict[str, Any]) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=tensors["output"].device)
    never_ends[(1,)](flag)


def takes_all_memory(tensors: dict[str, Any]) -> None:
    kept = [torch.empty(1 << 36, dtype=torch.uint8, device=tensors["output"].device) for _ in range(8)]
    tensors["output"].fill_(float(len(kept)))


def install() -> None:
    registry = load_family("gqa_attention").registry
    for effect in (reads_far_out_of_bounds, endless_kernel, takes_all_memory):
        if effect.__name__ not in registry:
            registry.add(template(effect.__name__, effect))
