"""A warp-specialised, persistent GEMM for Hopper in Gluon: what its two templates share.

One producer warp fills a ring of operand buffers by TMA; CONSUMERS warpgroups multiply out of it, each its own rows of
the tile. The producer runs ahead into the next tile while the consumers are in their epilogue. Every program walks the
same sequence of tiles and depth steps in all its partitions, so ring positions agree without being communicated.

Ring protocol, slot s: `full[s]` completes when the producer's expected bytes have landed; `empty[s]` completes when
every consumer has arrived once. A wait on parity p returns once the phase of parity p has completed. The n-th use of
a slot has parity n & 1: consumers wait for full at that parity, the producer for empty at the opposite one, which a
fresh barrier reports as completed, so that the first STAGES loads start at once.
"""

from typing import Any

import torch

from tilewright.kernel_templates.base import Choice, Constraint, Limits, Values
from tilewright.kernel_templates.gqa_attention.gluon_common import (  # type: ignore[attr-defined]  # aliases of two modules
    ENTRY_REGISTERS,
    TensorDescriptor,
    device_is_hopper,
    fence_async_shared,
    gl,
    gluon_is_available,
    jit,
    mbarrier,
    next_slot,
    shared_view,
    thread_barrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewright.problem import WorkloadCase


@jit
def grouped_tile(i_tile, n_rows, n_columns, GROUP_M: gl.constexpr):
    """Row and column of a tile when GROUP_M tile rows are walked together, so that both operands stay in L2."""
    i_group = i_tile // (GROUP_M * n_columns)
    i_first = i_group * GROUP_M
    n_group = gl.minimum(n_rows - i_first, GROUP_M)
    i_in_group = i_tile % (GROUP_M * n_columns)
    return i_first + i_in_group % n_group, i_in_group // n_group


@jit
def load_operands(a_desc, w_desc, i_row, i_feature, n_steps, ring, stage, phase, BLOCK_N: gl.constexpr):
    """Producer: the depth steps of one tile into the ring; returns the ring position after them."""
    b_a, b_w, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    CONSUMERS: gl.constexpr = b_a.shape[0] // STAGES
    BOXES: gl.constexpr = b_w.shape[0] // STAGES
    ROWS: gl.constexpr = b_a.shape[1]
    FEATURES: gl.constexpr = b_w.shape[1]
    BLOCK_K: gl.constexpr = b_w.shape[2]
    for i_k in range(n_steps):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        landed = full.index(stage)
        # TMA counts whole boxes, rows past the end included (zero-filled), so the bytes are the same on ragged tiles.
        mbarrier.expect(landed, (CONSUMERS * ROWS + BLOCK_N) * BLOCK_K * 2)
        for i in gl.static_range(CONSUMERS):
            tma_load(a_desc, [i_row + i * ROWS, i_k * BLOCK_K], landed, b_a.index(stage * CONSUMERS + i))
        for i in gl.static_range(BLOCK_N // FEATURES):
            tma_load(w_desc, [i_feature + i * FEATURES, i_k * BLOCK_K], landed, b_w.index(stage * BOXES + i))
        stage, phase = next_slot(stage, phase, STAGES)
    return stage, phase


@jit
def weight_tile(ring, stage, BLOCK_N: gl.constexpr):
    """The boxes of a step as one operand [BLOCK_K, BLOCK_N]; whole rows of eight swizzle alike in one box or two."""
    b_w = ring[1]
    STAGES: gl.constexpr = ring[2].shape[0]
    if BLOCK_N == b_w.shape[1]:
        return b_w.index(stage * (b_w.shape[0] // STAGES)).permute((1, 0))
    else:
        b_joined = shared_view(b_w, b_w.dtype, [STAGES, BLOCK_N, b_w.shape[2]], b_w.layout)
        return b_joined.index(stage).permute((1, 0))


@jit
def multiply(b_acc, k_begin, k_end, ring, stage, phase, CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr):
    """Consumer: adds the depth steps [k_begin, k_end) of its rows to b_acc; leaves the last product in flight."""
    b_a, _b_w, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    CONSUMERS: gl.constexpr = b_a.shape[0] // STAGES
    for i_k in range(k_begin, k_end):
        mbarrier.wait(full.index(stage), phase)
        b_acc = warpgroup_mma(
            b_a.index(stage * CONSUMERS + CONSUMER), weight_tile(ring, stage, BLOCK_N), b_acc, is_async=True
        )
        # One product stays in flight; the one before it is done, so its slot goes back to the producer.
        b_acc = warpgroup_mma_wait(1, deps=(b_acc,))
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1, pred=i_k > 0)
        stage, phase = next_slot(stage, phase, STAGES)
    return b_acc, stage, phase


@jit
def finish(b_acc, ring, stage):
    """Consumer: the product of a whole tile, its last slot released; `stage` is the slot after it."""
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
    STAGES: gl.constexpr = ring[2].shape[0]
    mbarrier.arrive(ring[3].index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
    return b_acc


@jit
def halves(x):
    """Left and right half of the columns; thread-local where the layout keeps both halves in one thread."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@jit
def column_slices(x, N: gl.constexpr):
    """The columns as N equal slices, left to right."""
    slices = (x,)
    for i_level in gl.static_range(6):
        if N >> i_level > 1:
            split = ()
            for i in gl.static_range(len(slices)):
                split = split + halves(slices[i])
            slices = split  # type: ignore[assignment]
    return slices


@jit
def joined(left, right):
    """The inverse of `halves`."""
    return gl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], 2 * left.shape[1]])


@jit
def store_slice(out_desc, b_staging, b_out, i_row, i_column, SLICE: gl.constexpr):
    """Consumer: [ROWS, width] through staging buffer SLICE % buffers to global memory; rows past the end are clipped.

    The same thread issues all copies of a partition, and bulk groups complete in order: with n buffers, at most n - 1
    outstanding reads means that the buffer written next has been read.
    """
    BUFFERS: gl.constexpr = b_staging.shape[0]
    b_slice = b_staging.index(SLICE % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    thread_barrier()  # the other threads learn of the issuing thread's wait
    b_slice.store(b_out)
    fence_async_shared()  # generic writes before the asynchronous read
    thread_barrier()
    tma_store(out_desc, [i_row, i_column], b_slice)


@jit
def make_ring(a_desc, w_desc, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Operand buffers and barriers, initialised and visible to every partition and to the copy engine."""
    BOXES: gl.constexpr = BLOCK_N // w_desc.block_shape[0]
    b_a = gl.allocate_shared_memory(a_desc.dtype, [STAGES * CONSUMERS] + a_desc.block_shape, a_desc.layout)  # noqa: RUF005
    b_w = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BOXES] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    thread_barrier()
    return b_a, b_w, full, empty


@jit
def make_staging(out_desc):
    """Two buffers of the output's block, in turn, for one consumer's stores."""
    return gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005


def shared_layout(columns: int) -> Any:
    """Rows of bfloat16 as TMA and wgmma both want them: swizzled over 128 bytes, or the row where it is shorter."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., features] as a contiguous, 16-byte aligned [rows, features]; copied only where it is neither."""
    flat = tensor.reshape(-1, tensor.shape[-1]).contiguous()
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()


def descriptor(matrix: torch.Tensor, *block: int) -> Any:
    """A host TMA descriptor over a matrix from `rows`."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block), shared_layout(block[-1]))


def launch_options(consumers: int) -> dict[str, int]:
    """The register cap at entry is what setmaxnreg deals out; the producer warp is padded to a warpgroup."""
    return {"num_warps": 4, "maxnreg": ENTRY_REGISTERS if consumers == 2 else 240, "enable_fp_fusion": True}


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (
        Choice("BLOCK_M", (64, 128)),
        Choice("BLOCK_N", (64, 128, 256)),
        Choice("BLOCK_K", (64, 128)),
        Choice("STAGES", (3, 4, 5, 6)),
        Choice("CONSUMERS", (1, 2)),
        Choice("GROUP_M", (8, 16)),
    )


# BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CONSUMERS: 128 accumulator registers a thread, or less where tokens are few.
SHAPES = (
    (128, 256, 64, 4, 2), (128, 128, 64, 6, 2), (128, 128, 128, 3, 2), (128, 128, 64, 6, 1), (64, 256, 64, 5, 1),
    (64, 128, 64, 6, 1), (64, 128, 128, 4, 1), (64, 64, 128, 6, 1),
)  # fmt: skip


def token_count(case: WorkloadCase) -> int:
    return case["batch_size"] * case["seq_len"]


def elements_are_bfloat16(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return case.problem.dtype == "bfloat16"


def shape_is_among_the_known(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return tuple(v[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "CONSUMERS")) in SHAPES


def tile_not_taller_than_needed(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return int(v["BLOCK_M"]) <= max(64, 1 << (token_count(case) - 1).bit_length())


def fits_shared_memory(staging_columns: int, v: Values, limits: Limits) -> bool:
    """Operand tiles of every stage, two staging buffers for each consumer, barriers."""
    block_m, block_n, block_k = int(v["BLOCK_M"]), int(v["BLOCK_N"]), int(v["BLOCK_K"])
    operands = int(v["STAGES"]) * (block_m + block_n) * block_k * 2
    return operands + 2 * block_m * staging_columns * 2 + 1024 <= limits.shared_memory_bytes


SHARED_CONSTRAINTS: tuple[Constraint, ...] = (
    gluon_is_available,
    device_is_hopper,
    elements_are_bfloat16,
    shape_is_among_the_known,
    tile_not_taller_than_needed,
)


def default(case: WorkloadCase, limits: Limits) -> Values:
    """Large tiles where they make several waves; a deep ring of smaller ones where tokens are few."""
    tokens = token_count(case)
    shape = (128, 256, 64, 4, 2) if tokens >= 1024 else (128, 128, 64, 6, 2) if tokens > 64 else (64, 128, 128, 4, 1)
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "CONSUMERS")
    return {**dict(zip(names, shape, strict=True)), "GROUP_M": 8}
