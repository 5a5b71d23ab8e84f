"""RMSNorm and rotary embedding of the query and key heads, in place on qkv [B, S, (Hq + 2 Hkv) * D].

Query and key heads lie side by side, so a program takes BLOCK_T tokens x BLOCK_H neighbouring heads, reads each value
once and writes it once. Either op may be missing from the chain. Dims past the rotary width pass through.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import torch
import triton
import triton.language as tl

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention import online
from tilewright.kernel_templates.gqa_attention.online import rounded, widened
from tilewright.problem import WorkloadCase


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (
        Choice("BLOCK_T", (1, 2, 4, 8, 16)),
        Choice("BLOCK_H", (1, 2, 4, 8, 16, 32)),
        Choice("num_warps", (1, 2, 4, 8)),
    )


def default(case: WorkloadCase, limits: Limits) -> Values:
    """About 16 values a thread in two warps, eight heads wide where there are as many."""
    block_h = min(8, triton.next_power_of_2(normed_heads(case)))
    block_t = min(1024 // (block_h * case["head_dim"]) or 1, triton.next_power_of_2(tokens(case)))
    return {"BLOCK_T": block_t, "BLOCK_H": block_h, "num_warps": 2 if block_t * block_h * case["head_dim"] > 256 else 1}


def heads_not_padded_needlessly(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """No tile is wider than all heads together."""
    return int(c["BLOCK_H"]) < 2 * normed_heads(case)


def tokens_not_padded_needlessly(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    return int(c["BLOCK_T"]) < 2 * tokens(case)


def threads_load_whole_vectors(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """At least 16 bytes of each half of a head."""
    return values_per_thread(c, case) >= 16 or (c["num_warps"] == 1 and c["BLOCK_H"] == 1 and c["BLOCK_T"] == 1)


def tile_fits_registers(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Beyond 64 float32 values a thread, tables and weights included, occupancy drops for nothing."""
    return values_per_thread(c, case) <= 64


def values_per_thread(c: Values, case: WorkloadCase) -> int:
    return int(c["BLOCK_T"]) * int(c["BLOCK_H"]) * case["head_dim"] // (32 * int(c["num_warps"]))


def normed_heads(case: WorkloadCase) -> int:
    return case["num_attention_heads"] + case["num_key_value_heads"]


def tokens(case: WorkloadCase) -> int:
    return case["batch_size"] * case["seq_len"]


@triton.jit
def load_weight(q_weight, k_weight, o_d, m_d, m_q):
    """The norm weight of each head's kind at dims o_d, float32."""
    b_q = widened(tl.load(q_weight + o_d, mask=m_d, other=0.0))
    b_k = widened(tl.load(k_weight + o_d, mask=m_d, other=0.0))
    return tl.where(m_q[None, :, None], b_q[None, None, :], b_k[None, None, :])  # [1, BLOCK_H, dims]


@triton.jit
def load_table(table, o_b, o_s, stride_b, stride_s, o_d, m_t, m_d):
    """Rows of cos or sin for the tile's tokens at dims o_d, float32."""
    p_row = table + o_b.to(tl.int64) * stride_b + o_s.to(tl.int64) * stride_s
    m_row = m_t[:, None, None] & m_d[None, None, :]
    return widened(tl.load(p_row[:, None, None] + o_d[None, None, :], mask=m_row, other=0.0))  # [BLOCK_T, 1, dims]


@triton.jit(do_not_specialize=["num_tokens", "seq_len"])
def norm_rope_kernel(
    qkv, q_weight, k_weight, cos, sin, eps, num_tokens, seq_len,
    stride_cos_b, stride_cos_s, stride_sin_b, stride_sin_s,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """HALF_BLOCK and REST_BLOCK pad half the rotary width and the dims past it to powers of two."""
    HALF: tl.constexpr = ROT_DIM // 2
    FEATURES: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    HEAD_TILES: tl.constexpr = (NUM_HEADS + NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    i_t = tl.program_id(0) // HEAD_TILES
    i_h = tl.program_id(0) % HEAD_TILES
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, HALF_BLOCK)
    m_t = o_t < num_tokens
    m_d = o_d < HALF
    m_head = m_t[:, None, None] & (o_h < NUM_HEADS + NUM_KV_HEADS)[None, :, None]
    m_half = m_head & m_d[None, None, :]
    p_head = qkv + i_t.to(tl.int64) * BLOCK_T * FEATURES + i_h * BLOCK_H * HEAD_DIM
    p_head += (tl.arange(0, BLOCK_T) * FEATURES)[:, None, None] + (tl.arange(0, BLOCK_H) * HEAD_DIM)[None, :, None]
    p_first = p_head + o_d[None, None, :]
    b_first = widened(tl.load(p_first, mask=m_half, other=0.0))  # [BLOCK_T, BLOCK_H, HALF_BLOCK]
    b_second = widened(tl.load(p_first + HALF, mask=m_half, other=0.0))

    dtype: tl.constexpr = qkv.dtype.element_ty
    if HAS_NORM:
        m_q = o_h < NUM_HEADS
        b_square = tl.sum(b_first * b_first + b_second * b_second, 2)  # [BLOCK_T, BLOCK_H]
        if REST_BLOCK > 0:
            o_r = ROT_DIM + tl.arange(0, REST_BLOCK)
            m_r = o_r < HEAD_DIM
            p_rest = p_head + o_r[None, None, :]
            b_rest = widened(tl.load(p_rest, mask=m_head & m_r[None, None, :], other=0.0))
            b_square += tl.sum(b_rest * b_rest, 2)
        b_scale = tl.rsqrt(b_square / HEAD_DIM + eps)[:, :, None]
        b_first = widened(rounded(b_first * b_scale, dtype)) * load_weight(q_weight, k_weight, o_d, m_d, m_q)
        b_second = widened(rounded(b_second * b_scale, dtype)) * load_weight(q_weight, k_weight, HALF + o_d, m_d, m_q)
        if REST_BLOCK > 0:
            b_rest = widened(rounded(b_rest * b_scale, dtype)) * load_weight(q_weight, k_weight, o_r, m_r, m_q)
            tl.store(p_rest, rounded(b_rest, dtype), mask=m_head & m_r[None, None, :])
        b_first = widened(rounded(b_first, dtype))
        b_second = widened(rounded(b_second, dtype))

    if HAS_ROPE:
        o_b = o_t // seq_len
        o_s = o_t % seq_len
        b_cos = load_table(cos, o_b, o_s, stride_cos_b, stride_cos_s, o_d, m_t, m_d)
        b_sin = load_table(sin, o_b, o_s, stride_sin_b, stride_sin_s, o_d, m_t, m_d)
        b_cos_second = load_table(cos, o_b, o_s, stride_cos_b, stride_cos_s, HALF + o_d, m_t, m_d)
        b_sin_second = load_table(sin, o_b, o_s, stride_sin_b, stride_sin_s, HALF + o_d, m_t, m_d)
        b_turned = b_first * b_cos - b_second * b_sin
        b_second = b_second * b_cos_second + b_first * b_sin_second
        b_first = b_turned
    tl.store(p_first, rounded(b_first, dtype), mask=m_half)
    tl.store(p_first + HALF, rounded(b_second, dtype), mask=m_half)


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    qkv = tensors["qkv"]
    batch, seq_len, _ = qkv.shape
    ops = case.problem.op_names
    head_dim, has_norm, has_rope = case["head_dim"], "qk_norm" in ops, "rope" in ops
    q_weight, k_weight, eps = qkv, qkv, 0.0
    if has_norm:
        q_weight, k_weight, eps = tensors["q_norm_weight"], tensors["k_norm_weight"], float(tensors["rms_norm_eps"])
    cos, sin = (tensors["cos"], tensors["sin"]) if has_rope else (qkv, qkv)
    rot_dim = cos.shape[-1] if has_rope else head_dim
    rest = head_dim - rot_dim if has_norm else 0  # without the norm nothing happens to them
    tiles = triton.cdiv(normed_heads(case), int(values["BLOCK_H"]))
    run(
        norm_rope_kernel, (triton.cdiv(batch * seq_len, int(values["BLOCK_T"])) * tiles,),
        qkv, q_weight, k_weight, cos, sin, eps, batch * seq_len, seq_len, *_strides(cos), *_strides(sin),
        NUM_HEADS=case["num_attention_heads"], NUM_KV_HEADS=case["num_key_value_heads"], HEAD_DIM=head_dim,
        ROT_DIM=rot_dim, HAS_NORM=has_norm, HAS_ROPE=has_rope,
        HALF_BLOCK=triton.next_power_of_2(rot_dim // 2), REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        num_stages=1, enable_fp_fusion=True, **values,
    )  # fmt: skip


def _strides(table: torch.Tensor) -> tuple[int, int]:
    """Of batch and sequence; a table of batch 1 serves every batch row."""
    return (table.stride(0) if table.shape[0] > 1 else 0), table.stride(1)


TEMPLATE = Template(
    name="norm_rope",
    kind="triton",
    covers=("qk_norm", "rope"),
    optional=("qk_norm", "rope"),
    choices=choices,
    constraints=(
        heads_not_padded_needlessly,
        tokens_not_padded_needlessly,
        threads_load_whole_vectors,
        tile_fits_registers,
    ),
    default=default,
    launch=launch,
    module=__name__,
    helpers=(online.__name__,),
)
