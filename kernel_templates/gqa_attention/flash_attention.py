"""Causal attention with grouped heads: qkv [B, S, (Hq + 2 Hkv) * D] -> context [B, S, Hq * D].

A tile holds BLOCK_M query rows: HEADS_PER_TILE heads of one group at BLOCK_M / HEADS_PER_TILE tokens. Key tiles below
the diagonal need no mask and run in a loop of their own; those on it follow.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import math
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention import online
from tilewright.kernel_templates.gqa_attention.online import attend, causal, load_heads, rounded, scores, store_heads
from tilewright.problem import WorkloadCase

# What the driver takes of an SM's shared memory for each resident block.
RESERVED_SHARED_BYTES = 1024
# Keys and values that stay in L2 beside queries and outputs streaming through it (a third of the 50 MB of an H100).
L2_SHARE_BYTES = 16 * 1024 * 1024
PACKS = (1, 2, 4, 8)

# Three blocks of 168 registers a thread hide each other's latency better than a pipeline in two (found on an H200).
MIDDLE_LENGTHS: Values = {
    "BLOCK_M": 64, "BLOCK_N": 64, "HEADS_PER_TILE": 1, "num_warps": 4, "num_stages": 1, "MAXNREG": 168,
    "PREFETCH_SCORES": False, "DIAGONAL_APART": True, "LONGEST_FIRST": True, "USE_TMA": True,
}  # fmt: skip


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (
        Choice("BLOCK_M", (64, 128)),
        Choice("BLOCK_N", (32, 64, 128)),
        Choice("HEADS_PER_TILE", tuple(heads for heads in PACKS if group_size(case) % heads == 0)),
        Choice("num_warps", (4, 8)),
        Choice("num_stages", (1, 2, 3, 4)),
        Choice("MAXNREG", (0, 128, 168)),
        Choice("PREFETCH_SCORES", (False, True)),
        Choice("DIAGONAL_APART", (False, True)),
        Choice("LONGEST_FIRST", (False, True)),
        Choice("USE_TMA", (False, True) if limits.has_tma else (False,)),
    )


def default(case: WorkloadCase, limits: Limits) -> Values:
    """First that the case and the device admit, the fastest known on Hopper first; short rows pack heads."""
    middle = limits.has_tma and 128 < case["seq_len"] <= 512
    if middle and all(accepts(MIDDLE_LENGTHS, case, limits) for accepts in CONSTRAINTS):
        return MIDDLE_LENGTHS
    packs = [4, 2, 1] if case["seq_len"] <= 512 else [1]
    for heads, (block_m, num_warps), block_n, num_stages in product(packs, ((64, 4), (128, 8)), (64, 32), (3, 2, 1)):
        values: Values = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "HEADS_PER_TILE": heads,
            "num_warps": num_warps, "num_stages": num_stages, "MAXNREG": 0, "PREFETCH_SCORES": True,
            "DIAGONAL_APART": True, "LONGEST_FIRST": True, "USE_TMA": limits.has_tma,
        }  # fmt: skip
        if group_size(case) % heads == 0 and all(accepts(values, case, limits) for accepts in CONSTRAINTS):
            return values
    return values


def heads_fill_whole_tokens(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """A tile holds the same number of tokens of each head."""
    return int(c["BLOCK_M"]) % int(c["HEADS_PER_TILE"]) == 0


def each_warp_has_sixteen_rows(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """More warps than that split a row, and its softmax, between them."""
    return 16 * int(c["num_warps"]) <= int(c["BLOCK_M"])


def accumulators_fit_registers(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Outputs, scores and weights of a tile; beyond 168 a thread the compiler spills."""
    return accumulator_registers(c, case) <= 168


def fits_shared_memory(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    return shared_bytes(c, case) <= limits.shared_memory_bytes


def eight_warps_are_resident(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """A lone block of four warps leaves the tensor cores idle during its softmax."""
    return int(c["num_warps"]) * blocks_by_shared_memory(c, case, limits) >= 8


def tile_not_longer_than_sequence(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Of the smallest tiles one always passes."""
    length: int = triton.next_power_of_2(case["seq_len"])
    tokens = int(c["BLOCK_M"]) // int(c["HEADS_PER_TILE"])
    return tokens <= max(length, 64) and int(c["BLOCK_N"]) <= max(length, 32)


def narrow_key_tile_only_on_short_rows(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """32 keys save masked work, but rescale the output twice as often as 64."""
    return int(c["BLOCK_N"]) > 32 or case["seq_len"] <= 256


def packed_heads_come_by_descriptor(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """With pointers ptxas serialises the matrix products of a packed tile (C7515, Triton 3.6 on sm_90)."""
    return bool(c["USE_TMA"]) or c["HEADS_PER_TILE"] == 1 or not limits.has_tma


def pipeline_not_deeper_than_keys(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    return (int(c["num_stages"]) - 1) * int(c["BLOCK_N"]) < case["seq_len"]


def long_loops_are_pipelined(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    return int(c["num_stages"]) > 1 or case["seq_len"] <= 1024


def prefetch_needs_diagonal_apart(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """In one loop the last prefetch would be a score tile that nobody reads."""
    return bool(c["DIAGONAL_APART"]) or not c["PREFETCH_SCORES"]


def diagonal_inside_only_in_short_loops(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """It saves starting a second loop, which long rows do not feel."""
    return bool(c["DIAGONAL_APART"]) or case["seq_len"] <= 512


def register_cap_leaves_room(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Measured need beside the accumulators: 32, and the query tile where it does not stay in shared memory."""
    query = 0 if query_stays_shared(c) else query_bytes(c, case) // (4 * 32 * int(c["num_warps"]))
    return not c["MAXNREG"] or accumulator_registers(c, case) + query + 32 <= int(c["MAXNREG"])


def register_cap_buys_a_block(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """A cap pays only if shared memory admits the further block that it makes room for."""
    if not c["MAXNREG"]:
        return True
    capped = limits.registers_per_sm // (int(c["MAXNREG"]) * 32 * int(c["num_warps"]))
    free = limits.registers_per_sm // (255 * 32 * int(c["num_warps"]))
    return free < capped <= blocks_by_shared_memory(c, case, limits)


def order_matters_beyond_l2(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Row by row keeps keys and values in L2; where all of them fit, longest first balances better."""
    kv_bytes = 4 * case["batch_size"] * case["seq_len"] * case["num_key_value_heads"] * case["head_dim"]
    return bool(c["LONGEST_FIRST"]) or kv_bytes >= L2_SHARE_BYTES


def accumulator_registers(c: Values, case: WorkloadCase) -> int:
    """32-bit registers a thread for output, scores (two tiles with prefetch) and rounded weights."""
    tiles = 2.5 if c["PREFETCH_SCORES"] else 1.5
    return int(int(c["BLOCK_M"]) * (case["head_dim"] + tiles * int(c["BLOCK_N"]))) // (32 * int(c["num_warps"]))


def group_size(case: WorkloadCase) -> int:
    """Query heads that share a key/value head."""
    return case["num_attention_heads"] // case["num_key_value_heads"]


def query_bytes(c: Values, case: WorkloadCase) -> int:
    return 2 * int(c["BLOCK_M"]) * case["head_dim"]


def query_stays_shared(c: Values) -> bool:
    """A packed tile from a descriptor is reshaped in registers and stays there."""
    return c["HEADS_PER_TILE"] == 1 or not c["USE_TMA"]


def shared_bytes(c: Values, case: WorkloadCase) -> int:
    """Query tile, and a key and a value tile for each stage; without a pipeline both take turns in one."""
    tiles = 2 * int(c["num_stages"]) if int(c["num_stages"]) > 1 else 1
    streamed = 2 * case["head_dim"] * tiles * int(c["BLOCK_N"])
    return streamed + query_bytes(c, case) if query_stays_shared(c) else max(streamed, query_bytes(c, case))


def blocks_by_shared_memory(c: Values, case: WorkloadCase, limits: Limits) -> int:
    return (limits.shared_memory_bytes + RESERVED_SHARED_BYTES) // (shared_bytes(c, case) + RESERVED_SHARED_BYTES)


CONSTRAINTS = (
    heads_fill_whole_tokens,
    each_warp_has_sixteen_rows,
    tile_not_longer_than_sequence,
    narrow_key_tile_only_on_short_rows,
    packed_heads_come_by_descriptor,
    pipeline_not_deeper_than_keys,
    long_loops_are_pipelined,
    prefetch_needs_diagonal_apart,
    diagonal_inside_only_in_short_loops,
    order_matters_beyond_l2,
    accumulators_fit_registers,
    fits_shared_memory,
    eight_warps_are_resident,
    register_cap_leaves_room,
    register_cap_buys_a_block,
)


@triton.jit(do_not_specialize=["seq_len"])
def attention_kernel(
    q, kv, context, seq_len,
    SCALE_LOG2: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS_PER_TILE: tl.constexpr, PREFETCH_SCORES: tl.constexpr,
    DIAGONAL_APART: tl.constexpr, LONGEST_FIRST: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """q, kv and context are pointers, or descriptors of [B, heads, S, D] views."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS_PER_TILE
    FEATURES: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    HEAD_TILES: tl.constexpr = NUM_HEADS // HEADS_PER_TILE
    pid = tl.program_id(0)
    num_m = tl.cdiv(seq_len, TOKENS)
    if LONGEST_FIRST:
        num_rows = tl.num_programs(0) // num_m
        i_m = num_m - 1 - pid // num_rows
        i_row = pid % num_rows
    else:
        i_m = num_m - 1 - pid % num_m
        i_row = pid // num_m
    i_b = i_row // HEAD_TILES
    i_h = i_row % HEAD_TILES * HEADS_PER_TILE
    i_k = NUM_HEADS + i_h // (NUM_HEADS // NUM_KV_HEADS)
    i_v = i_k + NUM_KV_HEADS

    o_first = i_m * TOKENS
    o_m = o_first + tl.arange(0, BLOCK_M) % TOKENS  # [BLOCK_M] token of each row
    o_diagonal = o_first // BLOCK_N * BLOCK_N
    o_end = tl.minimum(o_first + TOKENS, seq_len)
    b_q = load_heads(q, i_b, i_h, o_first, seq_len, FEATURES, TOKENS, HEADS_PER_TILE, HEAD_DIM, USE_TMA, True)
    b_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_o = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    if PREFETCH_SCORES:
        b_s = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if o_end > 0:  # always true: as a block of its own it hands its key tile's memory on to the pipeline
            b_k = load_heads(kv, i_b, i_k, 0, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, True)
            b_s = scores(b_q, b_k)  # [BLOCK_M, BLOCK_N]

    for o_n in tl.range(0, o_diagonal if DIAGONAL_APART else o_end, BLOCK_N):
        if PREFETCH_SCORES:
            b_k = load_heads(kv, i_b, i_k, o_n + BLOCK_N, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, True)
            b_next = scores(b_q, b_k)
        else:
            b_k = load_heads(kv, i_b, i_k, o_n, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, not DIAGONAL_APART)
            b_s = scores(b_q, b_k)
        b_v = load_heads(kv, i_b, i_v, o_n, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, not DIAGONAL_APART)
        if not DIAGONAL_APART:
            if o_n >= o_diagonal:
                b_s = causal(b_s, o_m, o_n, BLOCK_N)
        b_m, b_l, b_o = attend(b_s, b_v, b_m, b_l, b_o, SCALE_LOG2)
        if PREFETCH_SCORES:
            b_s = b_next

    if DIAGONAL_APART:
        o_last = (o_end - 1) // BLOCK_N * BLOCK_N if PREFETCH_SCORES else o_end
        if TOKENS > BLOCK_N or not PREFETCH_SCORES:  # otherwise one key tile, below, holds the whole diagonal
            for o_n in tl.range(o_diagonal, o_last, BLOCK_N):
                if PREFETCH_SCORES:
                    b_k = load_heads(
                        kv, i_b, i_k, o_n + BLOCK_N, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, True
                    )
                    b_next = scores(b_q, b_k)
                else:
                    b_k = load_heads(kv, i_b, i_k, o_n, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, True)
                    b_s = scores(b_q, b_k)
                b_v = load_heads(kv, i_b, i_v, o_n, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, True)
                b_m, b_l, b_o = attend(causal(b_s, o_m, o_n, BLOCK_N), b_v, b_m, b_l, b_o, SCALE_LOG2)
                if PREFETCH_SCORES:
                    b_s = b_next
        if PREFETCH_SCORES:
            b_v = load_heads(kv, i_b, i_v, o_last, seq_len, FEATURES, BLOCK_N, 1, HEAD_DIM, USE_TMA, True)
            b_m, b_l, b_o = attend(causal(b_s, o_m, o_last, BLOCK_N), b_v, b_m, b_l, b_o, SCALE_LOG2)

    b_o = rounded(b_o / b_l[:, None], b_q.dtype)
    CONTEXT: tl.constexpr = NUM_HEADS * HEAD_DIM
    store_heads(context, b_o, i_b, i_h, o_first, seq_len, CONTEXT, TOKENS, HEADS_PER_TILE, HEAD_DIM, USE_TMA)


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    qkv, context = tensors["qkv"], tensors["context"]
    batch, seq_len, _ = qkv.shape
    heads, kv_heads, head_dim = case["num_attention_heads"], case["num_key_value_heads"], case["head_dim"]
    packed = int(values["HEADS_PER_TILE"])
    tokens = int(values["BLOCK_M"]) // packed
    q, kv, out = qkv, qkv, context
    if values["USE_TMA"]:
        q = _heads(qkv, head_dim, [1, packed, tokens, head_dim])
        kv = _heads(qkv, head_dim, [1, 1, int(values["BLOCK_N"]), head_dim])
        out = _heads(context, head_dim, [1, packed, tokens, head_dim])
    options = {name: value for name, value in values.items() if name != "MAXNREG"}
    if values["MAXNREG"]:
        options["maxnreg"] = values["MAXNREG"]
    # One flat axis: batch * heads may exceed the 65535 of the others.
    grid = (triton.cdiv(seq_len, tokens) * batch * heads // packed,)
    run(
        attention_kernel, grid, q, kv, out, seq_len,
        SCALE_LOG2=head_dim**-0.5 * math.log2(math.e), NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        enable_fp_fusion=True, **options,
    )  # fmt: skip


def _heads(rows: torch.Tensor, head_dim: int, block: list[int]) -> Any:
    """Descriptor of [B, heads, S, D] over [B, S, heads * D]: what lies past S reads as zeros and is not written."""
    view = rows.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block)


TEMPLATE = Template(
    name="flash_attention",
    kind="triton",
    covers=("attention",),
    choices=choices,
    constraints=CONSTRAINTS,
    default=default,
    launch=launch,
    module=__name__,
    helpers=(online.__name__,),
)
