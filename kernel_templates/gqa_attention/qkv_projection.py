"""qkv = hidden_states @ [Wq; Wk; Wv]^T + bias over three weight tensors, or over one where they lie end to end."""

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
    feature_in_section,
    hidden_size,
    of_section,
    projection_weights,
    qkv_widths,
    run_sum_splits,
    store_tile,
)
from tilewright.problem import WorkloadCase

PARTIAL = "qkv_projection_partial"
GEMM = Gemm(widths=qkv_widths, depth=hidden_size)


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (
        Choice("USE_TMA", (False, True) if limits.has_tma else (False,)),
        Choice("PERSISTENT", (False, True) if limits.has_tma else (False,)),
        *TILE_CHOICES,
        Choice("BLOCK_N", (64, 128, 256)),
        Choice("SPLIT_K", (1, 2, 4)),
        Choice("STORE", ("pointer", "tma", "tma_halves") if limits.has_tma else ("pointer",)),
        *LAUNCH_CHOICES,
    )


@triton.jit
def _tile(
    i_tile, i_split, a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v, out, tokens,
    DEPTH: tl.constexpr, WIDTH_Q: tl.constexpr, WIDTH_KV: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    USE_TMA: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = WIDTH_Q + 2 * WIDTH_KV
    i_m, i_n = grouped_tile(i_tile, tl.cdiv(tokens, BLOCK_M), WIDTH // BLOCK_N, GROUP_M)
    i_column = i_n * BLOCK_N
    i_feature = feature_in_section(i_column, WIDTH_Q, WIDTH_KV)
    if PACKED:
        b_out = accumulate(
            a, w_q, i_m * BLOCK_M, i_column, i_split, tokens, DEPTH, SPLIT_K, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA
        )  # fmt: skip
    else:
        w = of_section(i_column, w_q, w_k, w_v, WIDTH_Q, WIDTH_KV)
        b_out = accumulate(
            a, w, i_m * BLOCK_M, i_feature, i_split, tokens, DEPTH, SPLIT_K, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA
        )  # fmt: skip
    if HAS_BIAS:
        p_bias = of_section(i_column, p_bias_q, p_bias_k, p_bias_v, WIDTH_Q, WIDTH_KV)
        b_bias = tl.load(p_bias + i_feature + tl.arange(0, BLOCK_N)).to(tl.float32)  # [BLOCK_N]
        b_out += b_bias[None, :] if SPLIT_K == 1 else tl.where(i_split == 0, b_bias, 0.0)[None, :]
    if SPLIT_K > 1:
        out += tl.cast(i_split, tl.int64) * tokens * WIDTH
    store_tile(out, b_out, i_m * BLOCK_M, i_column, tokens, WIDTH, BLOCK_M, BLOCK_N, STORE)


@triton.jit(do_not_specialize=["tokens"])
def qkv_projection_kernel(
    a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v, out, tokens,
    DEPTH: tl.constexpr, WIDTH_Q: tl.constexpr, WIDTH_KV: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    USE_TMA: tl.constexpr, PERSISTENT: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        n_tiles = tl.cdiv(tokens, BLOCK_M) * ((WIDTH_Q + 2 * WIDTH_KV) // BLOCK_N)
        # Flattened, the next tile's loads are in flight during this tile's store.
        for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=True):
            _tile(
                i_tile, 0, a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v, out, tokens, DEPTH, WIDTH_Q, WIDTH_KV,
                HAS_BIAS, PACKED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K, USE_TMA, STORE,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0) // SPLIT_K, tl.program_id(0) % SPLIT_K, a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v,
            out, tokens, DEPTH, WIDTH_Q, WIDTH_KV, HAS_BIAS, PACKED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K,
            USE_TMA, STORE,
        )  # fmt: skip


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    a = rows(tensors["hidden_states"])
    weights = projection_weights(tensors, case)
    width_q, width_kv, _ = qkv_widths(case)
    qkv = tensors["qkv"].view(a.shape[0], width_q + 2 * width_kv)
    block_m, block_n, block_k = (int(values[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    split = int(values["SPLIT_K"])
    partial: torch.Tensor | None = tensors[PARTIAL] if split > 1 else None
    out: Any = qkv if partial is None else partial
    if values["STORE"] != "pointer":
        out = descriptor(qkv, block_m, block_n // (2 if values["STORE"] == "tma_halves" else 1))
    tiles = GEMM.tiles(values, case) * split
    biases = [tensors.get(f"{name}_proj_bias") for name in "qkv"]
    run(
        qkv_projection_kernel, (program_count(tiles, a.device) if values["PERSISTENT"] else tiles,),
        descriptor(a, block_m, block_k) if values["USE_TMA"] else a,
        *(descriptor(w, block_n, block_k) if w is not None and values["USE_TMA"] else w for w in weights),
        *biases, out, a.shape[0], DEPTH=a.shape[1], WIDTH_Q=width_q, WIDTH_KV=width_kv,
        HAS_BIAS=biases[0] is not None, PACKED=case.weight_mode == "packed", **values, enable_fp_fusion=True,
    )  # fmt: skip
    if partial is not None:
        run_sum_splits(partial, qkv, run)


def scratch(values: Values, case: WorkloadCase) -> Mapping[str, Scratch]:
    return GEMM.scratch(PARTIAL, values, case)


TEMPLATE = Template(
    name="qkv_projection",
    kind="triton",
    covers=("qkv_projection",),
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
