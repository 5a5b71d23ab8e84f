"""What the Gluon kernels for Hopper share: names in two Triton versions, layouts, ring arithmetic, dependent launch."""

from functools import cache
from typing import Any

import torch

from tilewright.kernel_templates.base import Limits, Values
from tilewright.problem import WorkloadCase

try:
    from triton.experimental.gluon import constexpr_function
    from triton.experimental.gluon import jit as jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
    from triton.experimental.gluon.language.nvidia.hopper import tma as tma
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    # Triton 3.9 has other names for these, and keeps some of the old ones only to raise.
    tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    shared_view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
    HAS_GLUON = True
except ImportError:  # the kernels are then never compiled
    import triton.language as gl
    from triton import jit

    def constexpr_function(function: Any) -> Any:
        return function

    tma = tma_load = tma_store = thread_barrier = fence_async_shared = mbarrier = shared_view = TensorDescriptor = None
    warpgroup_mma = warpgroup_mma_wait = gdc_wait = gdc_launch_dependents = None
    HAS_GLUON = False

# Compiled and read at both ends; Gluon is experimental, so that later versions are absent until somebody looks.
KNOWN_TRITON = ((3, 6), (3, 9))
SMS_WITHOUT_GPU = 132
# Of 65536 registers: two consumer warpgroups at 240 and the producer's at 24 are what 3 x 168 come to.
ENTRY_REGISTERS = 168
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@constexpr_function
def product_layout(columns):
    """A warpgroup's float32 [rows, columns]: warps stacked along the rows, the widest instruction along the columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@jit
def next_slot(slot, parity, STAGES: gl.constexpr):
    """The ring position that follows; parity flips on wrapping."""
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, parity ^ 1, parity)


@jit
def follow_previous(PDL: gl.constexpr):
    """Waits until the kernel before has ended and its writes are visible, then lets the kernel after set itself up.

    A kernel launched with `launch_pdl` starts while the one before still runs: only after this call may it read what
    that one writes, and write what that one reads.
    """
    if PDL:
        gdc_wait()
    gdc_launch_dependents()


def gluon_is_available(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return HAS_GLUON and limits.triton in KNOWN_TRITON


def device_is_hopper(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    """wgmma exists there alone; the interpreter has no Gluon."""
    return limits.kind == "cuda" and limits.capability == 90


def program_count(tiles: int, device: torch.device) -> int:
    """One program for each SM, never more than there are tiles."""
    return min(tiles, _sm_count(device))


@cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return SMS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count
