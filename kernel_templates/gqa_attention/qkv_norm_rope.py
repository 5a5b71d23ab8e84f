"""The QKV projection with bias, per-head RMSNorm and rotary embedding applied to each tile before it is stored.

A tile is whole heads of q, of k or of v. Where the chain has no qk_norm or no rope, that part is left out.
"""

from typing import Any

import triton
import triton.language as tl

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention.common import (
    descriptor,
    grouped_tile,
    narrow,
    program_count,
    rounded,
    rows,
)
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
    store_tile,
)
from tilewright.problem import WorkloadCase

GEMM = Gemm(widths=qkv_widths, depth=hidden_size, whole_heads=True)


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (
        Choice("USE_TMA", (False, True) if limits.has_tma else (False,)),
        Choice("PERSISTENT", (False, True) if limits.has_tma else (False,)),
        *TILE_CHOICES,
        Choice("HEADS_PER_TILE", (1, 2, 4)),
        Choice("STORE", ("pointer", "tma", "tma_halves") if limits.has_tma else ("pointer",)),
        *LAUNCH_CHOICES,
    )


def head_dim_is_64_or_128(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return case["head_dim"] in (64, 128)


def rotary_width_is_whole_or_half_head(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return "rope" not in case.problem.op_names or rotary_width(case) in (case["head_dim"], case["head_dim"] // 2)


def rotary_width(case: WorkloadCase) -> int:
    """Dims of each head that turn; the rest pass through."""
    shape = case.shape("cos")
    return shape[-1] if shape else 0


@triton.jit
def halves(x, ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, HEADS, WIDTH] as its first and its second [ROWS, HEADS, WIDTH // 2]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, HEADS, 2, WIDTH // 2)), (0, 1, 3, 2)))


@triton.jit
def joined(first, second, ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of halves."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), (ROWS, HEADS, WIDTH))


@triton.jit
def normed(x, p_weight, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm of each head of [rows, heads, HEAD_DIM], rounded where the eager block rounds."""
    wide = x.to(tl.float32)
    b_weight = tl.load(p_weight + tl.arange(0, HEAD_DIM)).to(tl.float32)  # [HEAD_DIM]
    b_scale = tl.rsqrt(tl.sum(wide * wide, axis=2) * (1.0 / HEAD_DIM) + eps)  # [rows, heads]
    return narrow(rounded(wide * b_scale[:, :, None], x.dtype) * b_weight[None, None, :], x.dtype)


@triton.jit
def turned(
    x, p_cos, p_sin, i_row, tokens, seq_len,
    ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SHARED_TABLE: tl.constexpr,
):  # fmt: skip
    """Rotary embedding of [ROWS, HEADS, WIDTH], half-split; the tables' halves may differ."""
    o_m = tl.minimum(i_row + tl.arange(0, ROWS), tokens - 1)
    if SHARED_TABLE:
        o_m = o_m % seq_len
    o_first = o_m.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH // 2)[None, :]  # [ROWS, WIDTH // 2]
    b_first, b_second = halves(x, ROWS, HEADS, WIDTH)  # [ROWS, HEADS, WIDTH // 2]
    wide_first, wide_second = b_first.to(tl.float32), b_second.to(tl.float32)
    b_cos = tl.load(p_cos + o_first).to(tl.float32)[:, None, :]
    b_sin = tl.load(p_sin + o_first).to(tl.float32)[:, None, :]
    b_turned_first = narrow(wide_first * b_cos - wide_second * b_sin, x.dtype)
    b_cos = tl.load(p_cos + o_first + WIDTH // 2).to(tl.float32)[:, None, :]
    b_sin = tl.load(p_sin + o_first + WIDTH // 2).to(tl.float32)[:, None, :]
    b_turned_second = narrow(wide_second * b_cos + wide_first * b_sin, x.dtype)
    return joined(b_turned_first, b_turned_second, ROWS, HEADS, WIDTH)


@triton.jit
def norm_and_rope(
    x, p_weight, eps, p_cos, p_sin, i_row, tokens, seq_len,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_WIDTH: tl.constexpr, NORM: tl.constexpr,
    SHARED_TABLE: tl.constexpr,
):  # fmt: skip
    """What happens to a tile of q or k heads [ROWS, HEADS * HEAD_DIM] after its projection."""
    x = tl.reshape(x, (ROWS, HEADS, HEAD_DIM))
    if NORM:
        x = normed(x, p_weight, eps, HEAD_DIM)
    if ROTARY_WIDTH == HEAD_DIM:
        x = turned(x, p_cos, p_sin, i_row, tokens, seq_len, ROWS, HEADS, HEAD_DIM, SHARED_TABLE)
    elif ROTARY_WIDTH > 0:
        b_turning, b_passing = halves(x, ROWS, HEADS, HEAD_DIM)
        b_turning = turned(b_turning, p_cos, p_sin, i_row, tokens, seq_len, ROWS, HEADS, ROTARY_WIDTH, SHARED_TABLE)
        x = joined(b_turning, b_passing, ROWS, HEADS, HEAD_DIM)
    return tl.reshape(x, (ROWS, HEADS * HEAD_DIM))


@triton.jit
def _tile(
    i_tile, a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v, p_norm_q, p_norm_k, eps, p_cos, p_sin, out,
    tokens, seq_len,
    DEPTH: tl.constexpr, WIDTH_Q: tl.constexpr, WIDTH_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr, SHARED_TABLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS_PER_TILE: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = HEADS_PER_TILE * HEAD_DIM
    WIDTH: tl.constexpr = WIDTH_Q + 2 * WIDTH_KV
    i_m, i_n = grouped_tile(i_tile, tl.cdiv(tokens, BLOCK_M), WIDTH // BLOCK_N, GROUP_M)
    i_row = i_m * BLOCK_M
    i_column = i_n * BLOCK_N
    i_feature = feature_in_section(i_column, WIDTH_Q, WIDTH_KV)
    if PACKED:
        x = accumulate(a, w_q, i_row, i_column, 0, tokens, DEPTH, 1, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA)
    else:
        w = of_section(i_column, w_q, w_k, w_v, WIDTH_Q, WIDTH_KV)
        x = accumulate(a, w, i_row, i_feature, 0, tokens, DEPTH, 1, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA)
    if HAS_BIAS:
        p_bias = of_section(i_column, p_bias_q, p_bias_k, p_bias_v, WIDTH_Q, WIDTH_KV)
        x += tl.load(p_bias + i_feature + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
    x = narrow(x, DTYPE)
    if i_column < WIDTH_Q + WIDTH_KV:
        p_norm = p_norm_q
        if NORM:
            p_norm = of_section(i_column, p_norm_q, p_norm_k, p_norm_k, WIDTH_Q, WIDTH_KV)
        x = norm_and_rope(
            x, p_norm, eps, p_cos, p_sin, i_row, tokens, seq_len,
            BLOCK_M, HEADS_PER_TILE, HEAD_DIM, ROTARY_WIDTH, NORM, SHARED_TABLE,
        )  # fmt: skip
    store_tile(out, x, i_row, i_column, tokens, WIDTH, BLOCK_M, BLOCK_N, STORE)


@triton.jit(do_not_specialize=["tokens", "seq_len"])
def qkv_norm_rope_kernel(
    a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v, p_norm_q, p_norm_k, eps, p_cos, p_sin, out,
    tokens, seq_len,
    DEPTH: tl.constexpr, WIDTH_Q: tl.constexpr, WIDTH_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr, SHARED_TABLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS_PER_TILE: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr, PERSISTENT: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype if STORE != "pointer" else out.dtype.element_ty
    if PERSISTENT:
        n_tiles = tl.cdiv(tokens, BLOCK_M) * ((WIDTH_Q + 2 * WIDTH_KV) // (HEADS_PER_TILE * HEAD_DIM))
        # Flattened, the next tile's loads are in flight during this tile's epilogue.
        for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=True):
            _tile(
                i_tile, a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v, p_norm_q, p_norm_k, eps, p_cos, p_sin, out,
                tokens, seq_len, DEPTH, WIDTH_Q, WIDTH_KV, HEAD_DIM, ROTARY_WIDTH, SHARED_TABLE, HAS_BIAS, NORM, PACKED,
                DTYPE, BLOCK_M, HEADS_PER_TILE, BLOCK_K, GROUP_M, USE_TMA, STORE,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), a, w_q, w_k, w_v, p_bias_q, p_bias_k, p_bias_v, p_norm_q, p_norm_k, eps, p_cos, p_sin,
            out, tokens, seq_len, DEPTH, WIDTH_Q, WIDTH_KV, HEAD_DIM, ROTARY_WIDTH, SHARED_TABLE, HAS_BIAS, NORM,
            PACKED, DTYPE, BLOCK_M, HEADS_PER_TILE, BLOCK_K, GROUP_M, USE_TMA, STORE,
        )  # fmt: skip


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    a = rows(tensors["hidden_states"])
    width_q, width_kv, _ = qkv_widths(case)
    out: Any = tensors["qkv"].view(a.shape[0], width_q + 2 * width_kv)
    block_m, block_n, block_k = int(values["BLOCK_M"]), GEMM.block_n(values, case), int(values["BLOCK_K"])
    weights: list[Any] = projection_weights(tensors, case)
    if values["USE_TMA"]:
        weights = [None if w is None else descriptor(w, block_n, block_k) for w in weights]
    if values["STORE"] != "pointer":
        out = descriptor(out, block_m, block_n // (2 if values["STORE"] == "tma_halves" else 1))
    tiles = GEMM.tiles(values, case)
    biases = [tensors.get(f"{name}_proj_bias") for name in "qkv"]
    norm, rope = (op in case.problem.op_names for op in ("qk_norm", "rope"))
    run(
        qkv_norm_rope_kernel, (program_count(tiles, a.device) if values["PERSISTENT"] else tiles,),
        descriptor(a, block_m, block_k) if values["USE_TMA"] else a, *weights, *biases,
        *(tensors[name] if norm else None for name in ("q_norm_weight", "k_norm_weight")),
        tensors["rms_norm_eps"] if norm else None,
        *(tensors[name].contiguous() if rope else None for name in ("cos", "sin")),
        out, a.shape[0], case["seq_len"], SHARED_TABLE=rope and tensors["cos"].shape[0] == 1,
        DEPTH=a.shape[1], WIDTH_Q=width_q, WIDTH_KV=width_kv, HEAD_DIM=case["head_dim"],
        ROTARY_WIDTH=rotary_width(case) if rope else 0, HAS_BIAS=biases[0] is not None, NORM=norm,
        PACKED=case.weight_mode == "packed", **values, enable_fp_fusion=True,
    )  # fmt: skip


TEMPLATE = Template(
    name="qkv_norm_rope",
    kind="triton",
    covers=("qkv_projection", "qk_norm", "rope"),
    optional=("qk_norm", "rope"),
    choices=choices,
    constraints=(head_dim_is_64_or_128, rotary_width_is_whole_or_half_head, *GEMM.constraints),
    default=GEMM.default,
    launch=launch,
    module=__name__,
    helpers=(
        "tilewright.kernel_templates.gqa_attention.common",
        "tilewright.kernel_templates.gqa_attention.gemm",
    ),
)
