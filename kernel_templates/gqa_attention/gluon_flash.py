"""The kernel of gluon_attention: one producer warp, two consumer warpgroups.

One producer warp fills rings of key and value tiles by TMA, from the diagonal down to the first key; two consumer
warpgroups each own 64 query rows (HEADS_PER_TILE heads of a group at 64 / HEADS_PER_TILE tokens). A consumer issues
the scores of its next tile before the product of its current weights with the values, and computes the next softmax
while that product runs. The producer runs ahead into the next work item while the consumers finish theirs.

Ring protocol: `full` completes when the producer's bytes have landed, `empty` when each consumer has arrived once.
The n-th use of a slot has parity n & 1: consumers wait for full at that parity, the producer for empty at the opposite
one, which a fresh barrier reports as completed. Keys and values pass through equally many slots, so tile c has the
same slot and parity in both rings. Every partition walks the same items and tiles, so positions agree unsaid.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from typing import Any

import torch

from tilewright.kernel_templates.gqa_attention.gluon_common import (  # type: ignore[attr-defined]  # aliases of two modules
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    TensorDescriptor,
    fence_async_shared,
    follow_previous,
    gl,
    jit,
    mbarrier,
    next_slot,
    product_layout,
    thread_barrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# A warpgroup's instruction has 64 rows; two consumers make the tile.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)


@jit
def as_matrix(b_tile):
    """A [1, tokens, heads, D] shared tile as [tokens * heads, D]."""
    return b_tile.reshape([b_tile.shape[1] * b_tile.shape[2], b_tile.shape[3]])


@jit
def item_count(num_items):
    """Items of this program; every other round runs backwards, so that no program always gets the longer ones."""
    i_p = gl.program_id(0)
    n_p = gl.num_programs(0)
    full_rounds = num_items // n_p
    i_last = gl.where(full_rounds % 2 == 0, i_p, n_p - 1 - i_p)
    return full_rounds + gl.where(i_last < num_items % n_p, 1, 0)


@jit
def work_item(i_round, num_rows, seq_len, HEAD_TILES: gl.constexpr, TOKENS: gl.constexpr):
    """Batch, head tile and first token of this program's item of a round: rows with most keys come first."""
    i_p = gl.program_id(0)
    n_p = gl.num_programs(0)
    i_item = i_round * n_p + gl.where(i_round % 2 == 0, i_p, n_p - 1 - i_p)
    i_m = (seq_len + TOKENS - 1) // TOKENS - 1 - i_item // num_rows
    i_row = i_item % num_rows
    return i_row // HEAD_TILES, i_row % HEAD_TILES, i_m * TOKENS


@jit
def key_tiles(o_first, seq_len, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Key tiles up to the last token of an item."""
    return (gl.minimum(o_first + TOKENS, seq_len) - 1) // BLOCK_N + 1


@jit
def load_tile(desc, coordinates, b_ring, full, empty, slot, parity):
    """Producer: one tile into its slot once every consumer has left it."""
    BYTES: gl.constexpr = desc.block_type.nbytes
    mbarrier.wait(empty.index(slot), parity ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    # A box counts whole: what lies past the sequence is zero-filled and part of the bytes.
    tma_load(desc, coordinates, full.index(slot), b_ring.index(slot))


@jit
def produce(
    descs, buffers, barriers, sizes,
    HEAD_TILES: gl.constexpr, GROUP_TILES: gl.constexpr, KV_HEADS: gl.constexpr, CONSUMER: gl.constexpr,
    SCALE_LOG2: gl.constexpr, PING_PONG: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: K0, queries, then K1 V0, K2 V1, ..., in the order in which consumers ask for them."""
    q_desc, kv_desc, _out_desc = descs
    b_q, b_k, b_v, _b_out = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _turn = barriers
    num_rows, seq_len = sizes
    STAGES: gl.constexpr = b_k.shape[0]
    BLOCK_N: gl.constexpr = b_k.shape[2]
    CONSUMER_TOKENS: gl.constexpr = b_q.shape[2]
    PACKED: gl.constexpr = b_q.shape[3]
    TOKENS: gl.constexpr = CONSUMERS * CONSUMER_TOKENS
    slot = 0
    parity = 0
    follow_previous(PDL)
    for i_round in range(item_count(num_rows * ((seq_len + TOKENS - 1) // TOKENS))):
        i_b, i_tile, o_first = work_item(i_round, num_rows, seq_len, HEAD_TILES, TOKENS)
        i_k = HEAD_TILES * PACKED + i_tile // GROUP_TILES
        i_v = i_k + KV_HEADS
        o_n = (key_tiles(o_first, seq_len, TOKENS, BLOCK_N) - 1) * BLOCK_N
        load_tile(kv_desc, [i_b, o_n, i_k, 0], b_k, k_full, k_empty, slot, parity)
        for i_c in gl.static_range(CONSUMERS):
            o_q = o_first + i_c * CONSUMER_TOKENS
            load_tile(q_desc, [i_b, o_q, i_tile * PACKED, 0], b_q, q_full, q_empty, i_c, i_round & 1)
        while o_n > 0:
            k_slot, k_parity = next_slot(slot, parity, STAGES)
            load_tile(kv_desc, [i_b, o_n - BLOCK_N, i_k, 0], b_k, k_full, k_empty, k_slot, k_parity)
            load_tile(kv_desc, [i_b, o_n, i_v, 0], b_v, v_full, v_empty, slot, parity)
            slot = k_slot
            parity = k_parity
            o_n -= BLOCK_N
        load_tile(kv_desc, [i_b, 0, i_v, 0], b_v, v_full, v_empty, slot, parity)
        slot, parity = next_slot(slot, parity, STAGES)


@jit
def leave(barrier):
    """Consumer: hands a buffer back once all four warps are done with it; their waits are each warp's own."""
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@jit
def softmax(b_s, b_m, SCALE_LOG2: gl.constexpr):
    """Weights of one tile, their sums, the new maxima (of unscaled scores) and what earlier sums shrink by."""
    b_m_new = gl.maximum(b_m, gl.max(b_s, 1))
    b_scaled = b_m_new * SCALE_LOG2
    b_shrink = gl.exp2(b_m * SCALE_LOG2 - b_scaled)
    b_p = gl.exp2(b_s * SCALE_LOG2 - gl.expand_dims(b_scaled, 1))
    return b_p, gl.sum(b_p, 1), b_m_new, b_shrink


@jit
def consume(
    descs, buffers, barriers, sizes,
    HEAD_TILES: gl.constexpr, GROUP_TILES: gl.constexpr, KV_HEADS: gl.constexpr, CONSUMER: gl.constexpr,
    SCALE_LOG2: gl.constexpr, PING_PONG: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: its 64 rows of every item."""
    _q_desc, _kv_desc, out_desc = descs
    b_qs, b_ks, b_vs, b_outs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = barriers
    num_rows, seq_len = sizes
    STAGES: gl.constexpr = b_ks.shape[0]
    BLOCK_N: gl.constexpr = b_ks.shape[2]
    CONSUMER_TOKENS: gl.constexpr = b_qs.shape[2]
    PACKED: gl.constexpr = b_qs.shape[3]
    HEAD_DIM: gl.constexpr = b_qs.shape[4]
    TOKENS: gl.constexpr = CONSUMERS * CONSUMER_TOKENS
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    OUTPUT: gl.constexpr = product_layout(HEAD_DIM)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    b_q = as_matrix(b_qs.index(CONSUMER))
    b_out = b_outs.index(CONSUMER)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // PACKED  # [ROWS] token of each row
    o_col = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    b_none = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    slot = 0
    parity = 0
    # The first consumer finds its fresh barrier completed at parity 1: it has the first turn.
    turn_parity = 1 - CONSUMER
    for i_round in range(item_count(num_rows * ((seq_len + TOKENS - 1) // TOKENS))):
        i_b, i_tile, o_first = work_item(i_round, num_rows, seq_len, HEAD_TILES, TOKENS)
        num_n = key_tiles(o_first, seq_len, TOKENS, BLOCK_N)
        o_m = o_first + CONSUMER * CONSUMER_TOKENS  # first token of this consumer
        # All its tokens lie in one key tile: BLOCK_N is a multiple of their number, o_m too.
        i_diagonal = gl.minimum(o_m // BLOCK_N, num_n - 1)
        if BLOCK_N < TOKENS:
            # Tiles of the other consumer's diagonal: full is awaited, or the arrival might count for an earlier use.
            for _ in range(i_diagonal + 1, num_n):
                mbarrier.wait(k_full.index(slot), parity)
                mbarrier.arrive(k_empty.index(slot), count=1)
                mbarrier.wait(v_full.index(slot), parity)
                mbarrier.arrive(v_empty.index(slot), count=1)
                slot, parity = next_slot(slot, parity, STAGES)

        mbarrier.wait(q_full.index(CONSUMER), i_round & 1)
        mbarrier.wait(k_full.index(slot), parity)
        b_k = as_matrix(b_ks.index(slot))  # [BLOCK_N, HEAD_DIM]
        b_s = warpgroup_mma(b_q, b_k.permute((1, 0)), b_none, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        leave(k_empty.index(slot))
        m_s = gl.expand_dims(o_m + o_row, 1) >= gl.expand_dims(i_diagonal * BLOCK_N + o_col, 0)
        b_s = gl.where(m_s, b_s, float("-inf"))  # every row keeps a key, so that its maximum is finite
        b_m = gl.max(b_s, 1)
        b_p = gl.exp2(b_s * SCALE_LOG2 - gl.expand_dims(b_m * SCALE_LOG2, 1))
        b_l = gl.sum(b_p, 1)
        b_o = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUTPUT)
        b_shrink = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))

        for _ in range(i_diagonal):
            k_slot, k_parity = next_slot(slot, parity, STAGES)
            mbarrier.wait(k_full.index(k_slot), k_parity)
            if PING_PONG:
                mbarrier.wait(turn.index(CONSUMER), turn_parity)
                turn_parity ^= 1
            b_k = as_matrix(b_ks.index(k_slot))
            b_s_later = warpgroup_mma(b_q, b_k.permute((1, 0)), b_none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), parity)
            # Rescaled and rounded here, while the scores of the next tile are under way.
            b_o = b_o * gl.expand_dims(gl.convert_layout(b_shrink, gl.SliceLayout(1, OUTPUT)), 1)
            b_w = gl.convert_layout(b_p.to(b_qs.dtype), WEIGHTS)
            b_o_later = warpgroup_mma(b_w, as_matrix(b_vs.index(slot)), b_o, is_async=True)
            if PING_PONG:
                mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
            b_s = warpgroup_mma_wait(1, deps=(b_s_later,))
            leave(k_empty.index(k_slot))
            b_p, b_sum, b_m, b_shrink = softmax(b_s, b_m, SCALE_LOG2)
            b_l = b_l * b_shrink + b_sum
            # ptxas moves the wait for the product above the softmax unless a branch parts them: that of a barrier
            # already seen complete (read in the SASS of Triton 3.6).
            mbarrier.wait(v_full.index(slot), parity)
            b_o = warpgroup_mma_wait(0, deps=(b_o_later,))
            leave(v_empty.index(slot))
            slot = k_slot
            parity = k_parity

        leave(q_empty.index(CONSUMER))
        b_o = b_o * gl.expand_dims(gl.convert_layout(b_shrink, gl.SliceLayout(1, OUTPUT)), 1)
        b_w = gl.convert_layout(b_p.to(b_qs.dtype), WEIGHTS)
        mbarrier.wait(v_full.index(slot), parity)
        b_o = warpgroup_mma(b_w, as_matrix(b_vs.index(slot)), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
        leave(v_empty.index(slot))
        slot, parity = next_slot(slot, parity, STAGES)

        b_o = b_o * gl.expand_dims(gl.convert_layout(1.0 / b_l, gl.SliceLayout(1, OUTPUT)), 1)
        tma.store_wait(0)
        thread_barrier()  # the other threads learn of the issuing thread's wait
        as_matrix(b_out).store(b_o.to(b_qs.dtype))
        fence_async_shared()  # ordinary writes before the copy engine's read
        thread_barrier()
        tma_store(out_desc, [i_b, o_m, i_tile * PACKED, 0], b_out)
    tma.store_wait(0)


@jit
def tiles(desc, N: gl.constexpr):
    """Shared memory for N blocks of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [N] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@jit
def barriers_of(N: gl.constexpr, ARRIVALS: gl.constexpr):
    """N barriers whose phase completes after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


# fmt: off
@jit(do_not_specialize=["num_rows", "seq_len"])
def gluon_attention_kernel(
    q_desc, kv_desc, out_desc, num_rows, seq_len,
    SCALE_LOG2: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    STAGES: gl.constexpr, PING_PONG: gl.constexpr, PDL: gl.constexpr,
):
    """Descriptors of [B, S, heads, D]; num_rows is batch * NUM_HEADS / heads of a tile."""
    PACKED: gl.constexpr = q_desc.block_type.shape[2]
    HEAD_TILES: gl.constexpr = NUM_HEADS // PACKED
    GROUP_TILES: gl.constexpr = HEAD_TILES // NUM_KV_HEADS
    buffers = (tiles(q_desc, CONSUMERS), tiles(kv_desc, STAGES), tiles(kv_desc, STAGES), tiles(out_desc, CONSUMERS))
    q_full = barriers_of(CONSUMERS, 1)
    q_empty = barriers_of(CONSUMERS, 1)
    k_full = barriers_of(STAGES, 1)
    k_empty = barriers_of(STAGES, CONSUMERS)
    v_full = barriers_of(STAGES, 1)
    v_empty = barriers_of(STAGES, CONSUMERS)
    turn = barriers_of(CONSUMERS, 1)
    fence_async_shared()
    thread_barrier()
    descs = (q_desc, kv_desc, out_desc)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn)
    sizes = (num_rows, seq_len)
    gl.warp_specialize([
        (consume, (descs, buffers, barriers, sizes,
                   HEAD_TILES, GROUP_TILES, NUM_KV_HEADS, 0, SCALE_LOG2, PING_PONG, PDL)),
        (consume, (descs, buffers, barriers, sizes,
                   HEAD_TILES, GROUP_TILES, NUM_KV_HEADS, 1, SCALE_LOG2, PING_PONG, PDL)),
        (produce, (descs, buffers, barriers, sizes,
                   HEAD_TILES, GROUP_TILES, NUM_KV_HEADS, 0, SCALE_LOG2, PING_PONG, PDL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
# fmt: on


def heads_descriptor(rows: torch.Tensor, head_dim: int, block: list[int]) -> Any:
    """Descriptor of [B, S, heads, D] over [B, S, heads * D]: what lies past S reads as zeros and is not written."""
    view = rows.view(*rows.shape[:-1], -1, head_dim)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block, layout)
