"""Device helpers of the attention templates: tile loads and stores, matrix product, online softmax."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tilewright.kernel_templates.interpreter import mend_scalar_reads

# The interpreter's tl.dot reads 16-bit floats as integers, so there the operands are widened first.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
if INTERPRETED.value:
    mend_scalar_reads()


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """float32 b_x in `dtype`, to nearest even; the interpreter's own cast to bfloat16 cuts the low bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.uint32, bitcast=True)
        b_bits += 0x7FFF + ((b_bits >> 16) & 1)
        return (b_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return b_x.to(dtype)


@triton.jit
def widened(b_x):
    """b_x in float32; the interpreter's own cast makes 1e-38 of a bfloat16 zero."""
    if INTERPRETED and b_x.dtype == tl.bfloat16:
        return (b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return b_x.to(tl.float32)


@triton.jit
def mma(b_a, b_b, b_acc):
    """b_a @ b_b + b_acc in float32."""
    if INTERPRETED:
        return tl.dot(widened(b_a), widened(b_b), b_acc)
    else:
        return tl.dot(b_a, b_b, b_acc)


@triton.jit
def scores(b_q, b_k):
    """b_q @ b_k.T in float32, unscaled."""
    b_zero = tl.zeros((b_q.shape[0], b_k.shape[0]), dtype=tl.float32)  # [BLOCK_M, BLOCK_N]
    return mma(b_q, b_k.T, b_zero)


@triton.jit
def causal(b_s, o_m, o_n, BLOCK_N: tl.constexpr):
    """Scores of keys after the query's own token are struck out."""
    return tl.where(o_m[:, None] >= (o_n + tl.arange(0, BLOCK_N))[None, :], b_s, float("-inf"))


@triton.jit
def online_softmax(b_s, b_m, b_l, SCALE_LOG2: tl.constexpr):
    """Weights of this key tile, the new running maximum and sum, and the factor that old results shrink by."""
    b_max = tl.maximum(b_m, tl.max(b_s, 1) * SCALE_LOG2)  # [BLOCK_M]
    b_p = tl.exp2(b_s * SCALE_LOG2 - b_max[:, None])  # [BLOCK_M, BLOCK_N]
    b_shrink = tl.exp2(b_m - b_max)  # [BLOCK_M]
    return b_p, b_max, b_l * b_shrink + tl.sum(b_p, 1), b_shrink


@triton.jit
def attend(b_s, b_v, b_m, b_l, b_o, SCALE_LOG2: tl.constexpr):
    """Running maximum, sum and output after one more tile of scores and values."""
    b_p, b_m, b_l, b_shrink = online_softmax(b_s, b_m, b_l, SCALE_LOG2)
    return b_m, b_l, mma(rounded(b_p, b_v.dtype), b_v, b_o * b_shrink[:, None])


@triton.jit
def tile_offsets(FEATURES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Elements from a tile's first one; row r holds head r // TOKENS, token r % TOKENS."""
    o_r = tl.arange(0, HEADS * TOKENS)
    o_row = (o_r % TOKENS) * FEATURES + (o_r // TOKENS) * HEAD_DIM
    return o_row[:, None] + tl.arange(0, HEAD_DIM)[None, :]  # [HEADS * TOKENS, HEAD_DIM]


@triton.jit
def load_heads(
    src, i_b, i_h, o_t, seq_len,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    USE_TMA: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Tokens o_t.. of heads i_h.. of batch row i_b, zeros past the sequence: never the next batch row."""
    if USE_TMA:
        return src.load([i_b, i_h, o_t, 0]).reshape(HEADS * TOKENS, HEAD_DIM)
    else:
        p_tile = src + (i_b.to(tl.int64) * seq_len + o_t) * FEATURES + i_h * HEAD_DIM
        p_tile += tile_offsets(FEATURES, TOKENS, HEADS, HEAD_DIM)
        if RAGGED:
            m_t = o_t + tl.arange(0, HEADS * TOKENS) % TOKENS < seq_len
            return tl.load(p_tile, mask=m_t[:, None], other=0.0)
        else:
            return tl.load(p_tile)


@triton.jit
def store_heads(
    dst, b_x, i_b, i_h, o_t, seq_len,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Writes what load_heads reads; rows past the sequence are dropped."""
    if USE_TMA:
        dst.store([i_b, i_h, o_t, 0], b_x.reshape(1, HEADS, TOKENS, HEAD_DIM))
    else:
        p_tile = dst + (i_b.to(tl.int64) * seq_len + o_t) * FEATURES + i_h * HEAD_DIM
        p_tile += tile_offsets(FEATURES, TOKENS, HEADS, HEAD_DIM)
        m_t = o_t + tl.arange(0, HEADS * TOKENS) % TOKENS < seq_len
        tl.store(p_tile, b_x, mask=m_t[:, None])
