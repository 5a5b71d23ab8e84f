"""output = context @ o_proj_weight^T, tiled; a split depth keeps the card busy when tokens are few."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.kernel_templates.base import Choice, Limits, Run, Scratch, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention.common import descriptor, grouped_tile, program_count, rows
from tilewright.kernel_templates.gqa_attention.gemm import (
    LAUNCH_CHOICES,
    TILE_CHOICES,
    Gemm,
    accumulate,
    hidden_size,
    run_sum_splits,
    store_tile,
)
from tilewright.problem import WorkloadCase

PARTIAL = "output_projection_partial"
GEMM = Gemm(widths=lambda case: (hidden_size(case),), depth=lambda case: case["q_out_features"])


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (
        Choice("USE_TMA", (False, True) if limits.has_tma else (False,)),
        Choice("PERSISTENT", (False, True) if limits.has_tma else (False,)),
        *TILE_CHOICES,
        Choice("BLOCK_N", (64, 128, 256)),
        Choice("SPLIT_K", (1, 2, 4, 8)),
        Choice("STORE", ("pointer", "tma", "tma_halves") if limits.has_tma else ("pointer",)),
        *LAUNCH_CHOICES,
    )


@triton.jit
def _tile(
    i_tile, i_split, a, w, out, tokens,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, USE_TMA: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    i_m, i_n = grouped_tile(i_tile, tl.cdiv(tokens, BLOCK_M), (WIDTH + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    b_out = accumulate(
        a, w, i_m * BLOCK_M, i_n * BLOCK_N, i_split, tokens, DEPTH, SPLIT_K, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA
    )
    if SPLIT_K > 1:
        out += tl.cast(i_split, tl.int64) * tokens * WIDTH
    store_tile(out, b_out, i_m * BLOCK_M, i_n * BLOCK_N, tokens, WIDTH, BLOCK_M, BLOCK_N, STORE)


@triton.jit(do_not_specialize=["tokens"])
def output_projection_kernel(
    a, w, out, tokens,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, USE_TMA: tl.constexpr, PERSISTENT: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        n_tiles = tl.cdiv(tokens, BLOCK_M) * ((WIDTH + BLOCK_N - 1) // BLOCK_N)
        # Flattened, the next tile's loads are in flight during this tile's store (measured: 25 % faster on H200).
        for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=True):
            _tile(
                i_tile, 0, a, w, out, tokens, DEPTH, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K, USE_TMA, STORE
            )
    else:
        i_split = tl.program_id(0) % SPLIT_K
        i_tile = tl.program_id(0) // SPLIT_K
        _tile(
            i_tile, i_split, a, w, out, tokens, DEPTH, WIDTH,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K, USE_TMA, STORE,
        )  # fmt: skip


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    a, w = rows(tensors["context"]), rows(tensors["o_proj_weight"])
    output = tensors["output"].view(a.shape[0], w.shape[0])
    block_m, block_n, block_k = (int(values[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    split = int(values["SPLIT_K"])
    partial: torch.Tensor | None = tensors[PARTIAL] if split > 1 else None
    out: Any = output if partial is None else partial
    if values["STORE"] != "pointer":
        out = descriptor(output, block_m, block_n // (2 if values["STORE"] == "tma_halves" else 1))
    tiles = GEMM.tiles(values, case) * split
    grid = (program_count(tiles, a.device) if values["PERSISTENT"] else tiles,)
    run(
        output_projection_kernel, grid,
        descriptor(a, block_m, block_k) if values["USE_TMA"] else a,
        descriptor(w, block_n, block_k) if values["USE_TMA"] else w,
        out, a.shape[0], DEPTH=a.shape[1], WIDTH=w.shape[0], **values, enable_fp_fusion=True,
    )  # fmt: skip
    if partial is not None:
        run_sum_splits(partial, output, run)


def scratch(values: Values, case: WorkloadCase) -> Mapping[str, Scratch]:
    return GEMM.scratch(PARTIAL, values, case)


TEMPLATE = Template(
    name="output_projection",
    kind="triton",
    covers=("output_projection",),
    choices=choices,
    constraints=GEMM.constraints,
    default=GEMM.default,
    launch=launch,
    scratch=scratch,
    module=__name__,
    helpers=(
        "tilewright.kernel_templates.gqa_attention.common",
        "tilewright.kernel_templates.gqa_attention.gemm",
    ),
)
