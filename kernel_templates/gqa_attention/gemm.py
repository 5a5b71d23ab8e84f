"""The main loop, the store, the split reduction and the search space that the projections share.

A projection is `rows of activations [tokens, depth] x rows of weights [features, depth]^T`. Operands arrive as plain
pointers (any GPU; asynchronous copies) or as host tensor descriptors (Hopper on; TMA).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from tilewright.kernel_templates.base import Choice, Constraint, Limits, Run, Scratch, Tensors, Values
from tilewright.kernel_templates.gqa_attention.common import mma, narrow, packed_rows, rows
from tilewright.problem import WorkloadCase

REDUCE_BLOCK = 1024
TILE_CHOICES = (
    Choice("BLOCK_M", (16, 32, 64, 128, 256)),
    Choice("BLOCK_K", (64, 128)),
    Choice("GROUP_M", (1, 4, 8, 16)),
)
LAUNCH_CHOICES = (Choice("num_warps", (4, 8)), Choice("num_stages", (2, 3, 4, 5, 6)))

# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, most num_stages, fewest tokens. Measured on H200: the first, persistent, wins at
# thousands of tokens, the second at hundreds.
Tile = tuple[int, int, int, int, int, int]
KNOWN_GOOD: tuple[Tile, ...] = (
    (128, 256, 64, 8, 3, 1024), (128, 128, 64, 4, 5, 1), (64, 128, 64, 4, 5, 1), (64, 64, 64, 4, 6, 1),
    (32, 64, 64, 4, 6, 1), (16, 64, 64, 4, 6, 1), (128, 64, 64, 4, 6, 1),
)  # fmt: skip


@triton.jit
def accumulate(
    a, w, i_row, i_feature, i_split, tokens,
    DEPTH: tl.constexpr, SPLIT_K: tl.constexpr, FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows of `a` from i_row by rows of `w` from i_feature over one split of the depth: [BLOCK_M, BLOCK_N] float32."""
    STEPS: tl.constexpr = (DEPTH + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Rows past the end repeat the last one, so that only the depth needs a mask; the store drops them.
    o_m = tl.minimum(tl.arange(0, BLOCK_M), tokens - 1 - i_row)
    o_n = tl.minimum(tl.arange(0, BLOCK_N), FEATURES - 1 - i_feature)
    for i_step in range(STEPS):
        k = (i_split * STEPS + i_step) * BLOCK_K
        if TMA:
            b_a = a.load([i_row, k])  # [BLOCK_M, BLOCK_K]
            b_w = w.load([i_feature, k])  # [BLOCK_N, BLOCK_K]
        else:
            o_k = tl.arange(0, BLOCK_K)
            p_a = a + tl.cast(i_row, tl.int64) * DEPTH + k + o_m[:, None] * DEPTH + o_k[None, :]
            p_w = w + tl.cast(i_feature, tl.int64) * DEPTH + k + o_n[:, None] * DEPTH + o_k[None, :]
            if DEPTH % (BLOCK_K * SPLIT_K) == 0:
                b_a = tl.load(p_a)  # [BLOCK_M, BLOCK_K]
                b_w = tl.load(p_w)  # [BLOCK_N, BLOCK_K]
            else:
                b_a = tl.load(p_a, mask=(o_k < DEPTH - k)[None, :], other=0.0)
                b_w = tl.load(p_w, mask=(o_k < DEPTH - k)[None, :], other=0.0)
        b_acc = mma(b_a, tl.trans(b_w), b_acc)
    return b_acc


@triton.jit
def of_section(i_column, q, k, v, WIDTH_Q: tl.constexpr, WIDTH_KV: tl.constexpr):
    """Whichever of the three pointers or descriptors belongs to the column; a select, so no descriptor is built."""
    chosen = q
    if i_column >= WIDTH_Q + WIDTH_KV:
        chosen = v
    elif i_column >= WIDTH_Q:
        chosen = k
    return chosen


@triton.jit
def feature_in_section(i_column, WIDTH_Q: tl.constexpr, WIDTH_KV: tl.constexpr):
    """Row of its own weight that a column of qkv comes from."""
    i_in_v = tl.where(i_column >= WIDTH_Q + WIDTH_KV, i_column - (WIDTH_Q + WIDTH_KV), i_column - WIDTH_Q)
    return tl.where(i_column >= WIDTH_Q, i_in_v, i_column)


@triton.jit
def store_tile(
    out, b_out, i_row, i_column, tokens, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Writes a tile of a [tokens, WIDTH] matrix in the dtype of `out`; what lies outside is dropped."""
    if STORE == "tma":
        out.store([i_row, i_column], narrow(b_out, out.dtype))
    elif STORE == "tma_halves":
        # Half the staging memory, which leaves room for another pipeline stage.
        b_halves = tl.permute(tl.reshape(b_out, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        b_left, b_right = tl.split(b_halves)  # [BLOCK_M, BLOCK_N // 2] each
        out.store([i_row, i_column], narrow(b_left, out.dtype))
        out.store([i_row, i_column + BLOCK_N // 2], narrow(b_right, out.dtype))
    else:
        o_m = tl.arange(0, BLOCK_M)
        o_n = tl.arange(0, BLOCK_N)
        p_out = out + tl.cast(i_row, tl.int64) * WIDTH + i_column + o_m[:, None] * WIDTH + o_n[None, :]
        m_out = (o_m < tokens - i_row)[:, None] & (o_n < WIDTH - i_column)[None, :]
        tl.store(p_out, narrow(b_out, out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["size"])
def sum_splits(p_partial, p_out, size, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = sum over the splits of partial[split, i], always in the same order."""
    i_first = tl.program_id(0).to(tl.int64) * BLOCK
    o = i_first + tl.arange(0, BLOCK)
    m = o < size
    b_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for i_split in tl.static_range(SPLIT_K):
        b_sum += tl.load(p_partial + i_split * tl.cast(size, tl.int64) + o, mask=m, other=0.0)
    tl.store(p_out + o, narrow(b_sum, p_out.dtype.element_ty), mask=m)


def run_sum_splits(partial: torch.Tensor, out: torch.Tensor, run: Run) -> None:
    """Adds the float32 partials [splits, tokens, width] into `out` [tokens, width]."""
    grid = (triton.cdiv(out.numel(), REDUCE_BLOCK),)
    run(
        sum_splits, grid, partial, out, out.numel(), SPLIT_K=partial.shape[0], BLOCK=REDUCE_BLOCK,
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


def token_count(case: WorkloadCase) -> int:
    return case["batch_size"] * case["seq_len"]


def power_of_two_above(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Gemm:
    """One projection of the family: widths of its weight tensors, its depth, and the constraints on its tiles."""

    widths: Callable[[WorkloadCase], tuple[int, ...]]
    depth: Callable[[WorkloadCase], int]

    whole_heads: bool = False  # tiles are given in heads, not in columns, and the depth is not split

    def block_n(self, v: Values, case: WorkloadCase) -> int:
        return int(v["HEADS_PER_TILE"]) * case["head_dim"] if self.whole_heads else int(v["BLOCK_N"])

    def tiles(self, v: Values, case: WorkloadCase) -> int:
        """Output tiles, each by one program and SPLIT_K times over."""
        columns = sum(triton.cdiv(width, self.block_n(v, case)) for width in self.widths(case))
        return triton.cdiv(token_count(case), int(v["BLOCK_M"])) * columns

    def scratch(self, name: str, v: Values, case: WorkloadCase) -> dict[str, Scratch]:
        """Room for the float32 partials of a split depth."""
        if v["SPLIT_K"] == 1:
            return {}
        return {name: Scratch((int(v["SPLIT_K"]), token_count(case), sum(self.widths(case))), torch.float32)}

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """In the order in which they are cheap to check."""
        return (
            self.descriptors_exist_on_device,
            self.descriptor_store_needs_descriptor_load,
            self.tile_not_larger_than_needed,
            self.tile_large_enough,
            self.group_fits_tile_rows,
            self.accumulator_fits_registers,
            self.enough_work_per_warp,
            self.pipeline_depth_useful,
            self.whole_tiles_in_each_weight,
            self.persistent_has_several_waves,
            self.split_fills_idle_sms_only,
            self.enough_parallelism,
            self.fits_shared_memory,
        )

    def descriptors_exist_on_device(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        """Tensor descriptors are slower than pointers where the hardware lacks them; persistence is only for them."""
        if v["USE_TMA"]:
            return limits.has_tma
        return not v["PERSISTENT"]

    def descriptor_store_needs_descriptor_load(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        if v["STORE"] == "tma_halves" and not v["PERSISTENT"]:
            return False  # staging memory is free once the only tile's operands are consumed
        return bool(v["STORE"] == "pointer" or (v["USE_TMA"] and v.get("SPLIT_K", 1) == 1))

    def tile_not_larger_than_needed(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        return int(v["BLOCK_M"]) <= max(16, power_of_two_above(token_count(case)))

    def tile_large_enough(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        """Tiles of fewer rows than the tokens fill re-read the weights; taller ones that leave SMs idle are worse."""
        block_m, tokens = int(v["BLOCK_M"]), token_count(case)
        wide = tokens >= 128 and all(width % 128 == 0 for width in self.widths(case))
        if wide and self.tiles(v, case) > 4 * limits.sm_count and block_m * self.block_n(v, case) < 128 * 128:
            return False
        if block_m >= 128 or triton.cdiv(tokens, block_m) <= (2 if block_m < 64 else 8):
            return True
        return block_m == 64 and self.tiles({**v, "BLOCK_M": 128}, case) < limits.sm_count

    def group_fits_tile_rows(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        """Groups taller than the matrix repeat the next smaller one; short groups re-read the weights."""
        tile_rows = power_of_two_above(triton.cdiv(token_count(case), int(v["BLOCK_M"])))
        if tile_rows == 1:
            return v["GROUP_M"] == 1
        return max(4, min(tile_rows, 8)) <= v["GROUP_M"] <= max(4, tile_rows)

    def accumulator_fits_registers(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        """At most 128 accumulator registers a thread."""
        return int(v["BLOCK_M"]) * self.block_n(v, case) <= 128 * 32 * int(v["num_warps"])

    def enough_work_per_warp(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        return v["num_warps"] == 4 or int(v["BLOCK_M"]) * self.block_n(v, case) >= 128 * 128

    def pipeline_depth_useful(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        """Between 128 and 384 depth elements in flight, and no more than a program walks."""
        in_flight = int(v["num_stages"]) * int(v["BLOCK_K"])
        steps = triton.cdiv(self.depth(case), int(v["BLOCK_K"]) * int(v.get("SPLIT_K", 1)))
        return 128 < in_flight <= 384 and (v["num_stages"] <= steps or in_flight == 192)

    def whole_tiles_in_each_weight(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        widths = self.widths(case)
        return len(widths) == 1 or all(width % self.block_n(v, case) == 0 for width in widths)

    def persistent_has_several_waves(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        return not v["PERSISTENT"] or (v.get("SPLIT_K", 1) == 1 and self.tiles(v, case) > limits.sm_count)

    def split_fills_idle_sms_only(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        split = int(v.get("SPLIT_K", 1))
        if split > 1 and triton.cdiv(self.depth(case), int(v["BLOCK_K"])) < 2 * split:
            return False
        return split == 1 or self.tiles(v, case) * split <= 2 * limits.sm_count

    def enough_parallelism(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        """Half the SMs at least, or as many as the smallest tiles give."""
        smallest = {**v, "BLOCK_M": 64, "BLOCK_N": 64, "HEADS_PER_TILE": 1}
        wanted = min(limits.sm_count // 2, self.tiles(smallest, case))
        return self.tiles(v, case) * int(v.get("SPLIT_K", 1)) >= wanted

    def fits_shared_memory(self, v: Values, case: WorkloadCase, limits: Limits) -> bool:
        """Operand tiles of every stage; a persistent program holds the tile being stored as well.

        Compiled kernels differ from this by less than 1 KiB, except that a persistent pointer store may need less.
        """
        block_m, block_n = int(v["BLOCK_M"]), self.block_n(v, case)
        operands = int(v["num_stages"]) * (block_m + block_n) * int(v["BLOCK_K"]) * 2
        staging = block_m * block_n * 2 // (2 if v["STORE"] == "tma_halves" else 1)
        if self.whole_heads and v["STORE"] != "pointer":
            staging += block_m * case["head_dim"]  # rotary tables on their way to the accumulator's layout
        needed = operands + staging if v["PERSISTENT"] else max(operands, staging)
        return needed + 1024 <= limits.shared_memory_bytes  # barriers and alignment

    def default(self, case: WorkloadCase, limits: Limits) -> Values:
        """The first known good tile that may run here; the last one tried where none may."""
        config: Values = {}
        for tile, use_tma, stages, split in product(KNOWN_GOOD, (True, False), (6, 5, 4, 3), (1, 2, 4, 8)):
            if stages > tile[4] or token_count(case) < tile[5]:
                continue
            config = self._config(tile, use_tma, stages, split, case)
            if all(allowed(config, case, limits) for allowed in self.constraints):
                break
        return config

    def _config(self, tile: Tile, use_tma: bool, stages: int, split: int, case: WorkloadCase) -> Values:
        block_m, block_n, block_k, num_warps, _, _ = tile
        if self.whole_heads and block_m * block_n >= 128 * 128:
            num_warps = 8  # with four the epilogue spills (120 bytes a thread on sm_90)
        tile_rows = power_of_two_above(triton.cdiv(token_count(case), block_m))
        persistent = use_tma and block_n == 256
        columns = {"HEADS_PER_TILE": max(1, block_n // case["head_dim"])} if self.whole_heads else {"BLOCK_N": block_n}
        return {
            "USE_TMA": use_tma,
            "PERSISTENT": persistent,
            "BLOCK_M": block_m,
            "BLOCK_K": block_k,
            "GROUP_M": 1 if tile_rows == 1 else max(4, min(tile_rows, 8)),
            **columns,
            **({} if self.whole_heads else {"SPLIT_K": split}),
            "STORE": "tma" if persistent else "pointer",
            "num_warps": num_warps,
            "num_stages": stages,
        }


def qkv_widths(case: WorkloadCase) -> tuple[int, ...]:
    return case["q_out_features"], case["kv_out_features"], case["kv_out_features"]


def hidden_size(case: WorkloadCase) -> int:
    return case["hidden_size"]


def projection_weights(tensors: Tensors, case: WorkloadCase) -> list[torch.Tensor | None]:
    """The three weights, or their packed view and nothing more."""
    parts = [tensors[f"{name}_proj_weight"] for name in "qkv"]
    if case.weight_mode == "packed":
        return [packed_rows(parts), None, None]
    return [rows(part) for part in parts]
