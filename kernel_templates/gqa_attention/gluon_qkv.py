"""qkv = rope(norm(hidden @ [Wq; Wk; Wv]^T + bias)) on Hopper: the warp-specialised GEMM over three weight tensors.

Each weight has its own host descriptor, and the producer picks one for each tile by a plain branch. A tile holds whole
heads of one weight, so the epilogue is local: in the accumulator's layout the four threads of a quad share a row, and
the two halves that rotary pairing combines lie in one thread.
"""

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention import gluon_gemm
from tilewright.kernel_templates.gqa_attention.gluon_common import (  # type: ignore[attr-defined]  # aliases of two modules
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    follow_previous,
    gl,
    jit,
    product_layout,
    program_count,
    tma,
    warpgroup_mma_wait,
)
from tilewright.kernel_templates.gqa_attention.gluon_gemm import (
    SHARED_CONSTRAINTS,
    column_slices,
    descriptor,
    finish,
    fits_shared_memory,
    grouped_tile,
    halves,
    joined,
    launch_options,
    load_operands,
    make_ring,
    make_staging,
    multiply,
    rows,
    store_slice,
    token_count,
)
from tilewright.problem import WorkloadCase

# Depth steps that run after the epilogue's loads are issued.
TAIL_STEPS = gl.constexpr(4)


@jit
def _mul(x, y):
    """x * y in bfloat16, rounded once, two values an instruction."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@jit
def _add(x, y):
    return gl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@jit
def _sub(x, y):
    return gl.inline_asm_elementwise(
        "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@jit
def _as_product(x):
    """The same values in the layout of a product of x's width; fails to compile where data would move."""
    LAYOUT: gl.constexpr = product_layout(x.shape[1])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@jit
def _product_halves(x):
    left, right = halves(x)
    return _as_product(left), _as_product(right)


@jit
def _per_column(p, COLUMNS: gl.constexpr):
    """p[column] as [1, COLUMNS] in the layout of a product."""
    LAYOUT: gl.constexpr = product_layout(COLUMNS)
    return gl.load(p + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))).expand_dims(0)


@jit
def _normed(x, weight, eps):
    """RMSNorm over the columns, rounded to bfloat16 before the weight is applied, as the reference does."""
    wide = x.to(gl.float32)
    mean = gl.sum(wide * wide, 1) / x.shape[1]
    return _mul((wide * gl.rsqrt(mean + eps).expand_dims(1)).to(gl.bfloat16), weight)


@jit
def _tables(rotary, i_row, ROWS: gl.constexpr, ROT_DIM: gl.constexpr):
    """Cosines of both halves, then sines of both: four [ROWS, ROT_DIM / 2]."""
    p_cos, p_sin, tokens, seq_len, batch_stride = rotary
    HALF: gl.constexpr = ROT_DIM // 2
    LAYOUT: gl.constexpr = product_layout(HALF)
    # Rows past the end repeat the last token; the store clips what comes of them.
    o_m = gl.minimum(i_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), tokens - 1)
    o_row = (o_m // seq_len).to(gl.int64) * batch_stride + (o_m % seq_len) * ROT_DIM
    o = o_row.expand_dims(1) + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    return gl.load(p_cos + o), gl.load(p_cos + HALF + o), gl.load(p_sin + o), gl.load(p_sin + HALF + o)


@jit
def _rotated(left, right, tables):
    """Half-split rotary pairing; products and sums rounded as in the reference."""
    cos_left, cos_right, sin_left, sin_right = tables
    new_left = _sub(_mul(left, cos_left), _mul(right, sin_left))
    return new_left, _add(_mul(right, cos_right), _mul(left, sin_right))


@jit
def _select(i_column, q, k, v, Q_WIDTH: gl.constexpr, KV_WIDTH: gl.constexpr):
    """Of three vectors over the features of their own weight, where the tile at i_column of all three begins."""
    p = q + i_column
    if i_column >= Q_WIDTH + KV_WIDTH:
        p = v + (i_column - Q_WIDTH - KV_WIDTH)
    elif i_column >= Q_WIDTH:
        p = k + (i_column - Q_WIDTH)
    return p


@jit
def _tile(
    i_row, i_column, n_steps, out_desc, b_staging, ring, biases, norms, rotary, eps, stage, phase,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, Q_WIDTH: gl.constexpr, KV_WIDTH: gl.constexpr,
    ROT_DIM: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """One consumer's rows of one tile, from the ring to global memory; returns where the ring stands."""
    ROWS: gl.constexpr = ring[0].shape[1]
    HEAD_DIM: gl.constexpr = 2 * b_staging.shape[2]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    # 64 rows of tables fit the registers beside the accumulator; 128 spill (98 stores in the SASS), so they come late.
    EARLY: gl.constexpr = ROWS <= 64
    b_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    n_head = gl.maximum(n_steps - TAIL_STEPS, 0)
    b_acc, stage, phase = multiply(b_acc, 0, n_head, ring, stage, phase, CONSUMER, BLOCK_N)
    # What the epilogue reads is fetched before the last steps, which hide its latency.
    if HAS_NORM:
        p_norm = norms[0]
        if i_column >= Q_WIDTH:
            p_norm = norms[1]
        b_norm = _per_column(p_norm, HEAD_DIM)
    if EARLY and ROT_DIM > 0:
        tables = _tables(rotary, i_row, ROWS, ROT_DIM)
    if HAS_BIAS:
        # Added here the sum needs no further registers; after the last step it took no less time (1 % more, in fact).
        p_bias = _select(i_column, biases[0], biases[1], biases[2], Q_WIDTH, KV_WIDTH)
        b_acc = warpgroup_mma_wait(0, deps=(b_acc,)) + _per_column(p_bias, BLOCK_N).to(gl.float32)
    b_acc, stage, phase = multiply(b_acc, n_head, n_steps, ring, stage, phase, CONSUMER, BLOCK_N)
    heads = column_slices(finish(b_acc, ring, stage), BLOCK_N // HEAD_DIM)
    for i_h in gl.static_range(BLOCK_N // HEAD_DIM):
        x = _as_product(heads[i_h].to(gl.bfloat16))  # [ROWS, HEAD_DIM]
        left, right = _product_halves(x)
        if i_column < Q_WIDTH + KV_WIDTH:
            if HAS_NORM:
                left, right = _product_halves(_normed(x, b_norm, eps))
            if not EARLY and ROT_DIM > 0:
                tables = _tables(rotary, i_row, ROWS, ROT_DIM)
            if ROT_DIM == HEAD_DIM:
                left, right = _rotated(left, right, tables)
            elif ROT_DIM > 0:
                first, second = _product_halves(left)
                first, second = _rotated(first, second, tables)
                left = _as_product(joined(first, second))
        store_slice(out_desc, b_staging, left, i_row, i_column + i_h * HEAD_DIM, 0)
        store_slice(out_desc, b_staging, right, i_row, i_column + i_h * HEAD_DIM + HEAD_DIM // 2, 1)
    return stage, phase


@jit
def _half_tile(i_half, n_whole, n_rows, n_columns, GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tile row and first column of one half of the tiles from n_whole on."""
    i_m, i_n = grouped_tile(n_whole + i_half // 2, n_rows, n_columns, GROUP_M)
    return i_m, i_n * BLOCK_N + i_half % 2 * (BLOCK_N // 2)


@jit
def _consume(
    out_desc, b_staging, ring, sizes, biases, norms, rotary, eps,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, Q_WIDTH: gl.constexpr,
    KV_WIDTH: gl.constexpr, ROT_DIM: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr,
    SPLIT_TAIL: gl.constexpr,
):  # fmt: skip
    n_rows, n_columns, n_steps, n_whole = sizes
    CONSUMERS: gl.constexpr = ring[0].shape[0] // ring[2].shape[0]
    ROWS: gl.constexpr = ring[0].shape[1]
    stage = 0
    phase = 0
    for i_tile in range(gl.program_id(0), n_whole, gl.num_programs(0)):
        i_m, i_n = grouped_tile(i_tile, n_rows, n_columns, GROUP_M)
        stage, phase = _tile(
            (i_m * CONSUMERS + CONSUMER) * ROWS, i_n * BLOCK_N, n_steps, out_desc, b_staging, ring,
            biases, norms, rotary, eps, stage, phase,
            CONSUMER, BLOCK_N, Q_WIDTH, KV_WIDTH, ROT_DIM, HAS_BIAS, HAS_NORM,
        )  # fmt: skip
    if SPLIT_TAIL:
        for i_half in range(gl.program_id(0), 2 * (n_rows * n_columns - n_whole), gl.num_programs(0)):
            i_m, i_column = _half_tile(i_half, n_whole, n_rows, n_columns, GROUP_M, BLOCK_N)
            stage, phase = _tile(
                (i_m * CONSUMERS + CONSUMER) * ROWS, i_column, n_steps, out_desc, b_staging, ring,
                biases, norms, rotary, eps, stage, phase,
                CONSUMER, BLOCK_N // 2, Q_WIDTH, KV_WIDTH, ROT_DIM, HAS_BIAS, HAS_NORM,
            )  # fmt: skip
    tma.store_wait(0)


@jit
def _load_tile(
    a_desc, w_descs, i_row, i_column, n_steps, ring, stage, phase,
    BLOCK_N: gl.constexpr, Q_WIDTH: gl.constexpr, KV_WIDTH: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = w_descs
    i_k = i_column - Q_WIDTH
    i_v = i_k - KV_WIDTH
    if i_column < Q_WIDTH:
        stage, phase = load_operands(a_desc, q_desc, i_row, i_column, n_steps, ring, stage, phase, BLOCK_N)
    elif i_v < 0:
        stage, phase = load_operands(a_desc, k_desc, i_row, i_k, n_steps, ring, stage, phase, BLOCK_N)
    else:
        stage, phase = load_operands(a_desc, v_desc, i_row, i_v, n_steps, ring, stage, phase, BLOCK_N)
    return stage, phase


@jit
def _produce(
    a_desc, w_descs, ring, sizes,
    BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, Q_WIDTH: gl.constexpr, KV_WIDTH: gl.constexpr,
    SPLIT_TAIL: gl.constexpr,
):  # fmt: skip
    n_rows, n_columns, n_steps, n_whole = sizes
    BLOCK_M: gl.constexpr = ring[0].shape[1] * (ring[0].shape[0] // ring[2].shape[0])
    stage = 0
    phase = 0
    follow_previous(False)
    for i_tile in range(gl.program_id(0), n_whole, gl.num_programs(0)):
        i_m, i_n = grouped_tile(i_tile, n_rows, n_columns, GROUP_M)
        stage, phase = _load_tile(
            a_desc, w_descs, i_m * BLOCK_M, i_n * BLOCK_N, n_steps, ring, stage, phase, BLOCK_N, Q_WIDTH, KV_WIDTH
        )
    if SPLIT_TAIL:
        for i_half in range(gl.program_id(0), 2 * (n_rows * n_columns - n_whole), gl.num_programs(0)):
            i_m, i_column = _half_tile(i_half, n_whole, n_rows, n_columns, GROUP_M, BLOCK_N)
            stage, phase = _load_tile(
                a_desc, w_descs, i_m * BLOCK_M, i_column, n_steps, ring, stage, phase, BLOCK_N // 2, Q_WIDTH, KV_WIDTH
            )


# fmt: off
@jit(do_not_specialize=["n_rows", "n_columns", "n_steps", "n_whole", "tokens", "seq_len"])
def gluon_qkv_kernel(
    a_desc, q_desc, k_desc, v_desc, out_desc, q_bias, k_bias, v_bias, q_norm, k_norm, p_cos, p_sin,
    n_rows, n_columns, n_steps, n_whole, tokens, seq_len, table_batch_stride, eps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_TAIL: gl.constexpr,
    Q_WIDTH: gl.constexpr, KV_WIDTH: gl.constexpr, ROT_DIM: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NORM: gl.constexpr,
):
    """Tiles from n_whole on are walked in halves, so that the last wave is half as long."""
    ring = make_ring(a_desc, q_desc, BLOCK_N, CONSUMERS, STAGES)
    w_descs = (q_desc, k_desc, v_desc)
    sizes = (n_rows, n_columns, n_steps, n_whole)
    biases = (q_bias, k_bias, v_bias)
    norms = (q_norm, k_norm)
    rotary = (p_cos, p_sin, tokens, seq_len, table_batch_stride)
    b_first = make_staging(out_desc)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (out_desc, b_first, ring, sizes, biases, norms, rotary, eps,
                        0, BLOCK_N, GROUP_M, Q_WIDTH, KV_WIDTH, ROT_DIM, HAS_BIAS, HAS_NORM, SPLIT_TAIL)),
            (_produce, (a_desc, w_descs, ring, sizes, BLOCK_N, GROUP_M, Q_WIDTH, KV_WIDTH, SPLIT_TAIL)),
        ], [1], [PRODUCER_REGISTERS])
    else:
        b_second = make_staging(out_desc)
        gl.warp_specialize([
            (_consume, (out_desc, b_first, ring, sizes, biases, norms, rotary, eps,
                        0, BLOCK_N, GROUP_M, Q_WIDTH, KV_WIDTH, ROT_DIM, HAS_BIAS, HAS_NORM, SPLIT_TAIL)),
            (_consume, (out_desc, b_second, ring, sizes, biases, norms, rotary, eps,
                        1, BLOCK_N, GROUP_M, Q_WIDTH, KV_WIDTH, ROT_DIM, HAS_BIAS, HAS_NORM, SPLIT_TAIL)),
            (_produce, (a_desc, w_descs, ring, sizes, BLOCK_N, GROUP_M, Q_WIDTH, KV_WIDTH, SPLIT_TAIL)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
# fmt: on


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    return (
        *gluon_gemm.choices(case, limits),
        Choice("SPLIT_TAIL", (False, True)),
    )


def default(case: WorkloadCase, limits: Limits) -> Values:
    """The tail is split wherever that may be done."""
    values = {**gluon_gemm.default(case, limits), "SPLIT_TAIL": True}
    return values if tail_is_half_a_wave(values, case, limits) else {**values, "SPLIT_TAIL": False}


def tile_counts(v: Values, case: WorkloadCase) -> tuple[int, int]:
    """Tile rows and tile columns of the whole matrix."""
    width = case["q_out_features"] + 2 * case["kv_out_features"]
    return -(-token_count(case) // int(v["BLOCK_M"])), width // int(v["BLOCK_N"])


def tail_is_half_a_wave(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Halves of whole heads, of a last wave that leaves every second SM idle."""
    if not v["SPLIT_TAIL"]:
        return True
    n_rows, n_columns = tile_counts(v, case)
    whole, last = divmod(n_rows * n_columns, limits.sm_count)
    return int(v["BLOCK_N"]) == 2 * max(128, case["head_dim"]) and whole > 0 and 0 < 2 * last <= limits.sm_count


def rotary_width(case: WorkloadCase) -> int:
    """Columns of a head that are rotated; 0 without the op."""
    return (case.shape("cos") or (0,))[-1] if "rope" in case.problem.op_names else 0


def tile_holds_whole_heads(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Of one weight, so that a tile has one descriptor and its epilogue is local."""
    block_n = int(v["BLOCK_N"])
    widths = (case["q_out_features"], case["kv_out_features"])
    if case["head_dim"] not in (64, 128) or block_n % case["head_dim"] != 0:
        return False
    return all(width % block_n == 0 for width in widths)


def rotary_width_is_a_head_or_half(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return rotary_width(case) in (0, case["head_dim"], case["head_dim"] // 2)


def rows_are_aligned_for_tma(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return case["hidden_size"] % 8 == 0


def operands_and_staging_fit_shared_memory(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return fits_shared_memory(case["head_dim"] // 2, v, limits)


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    a = rows(tensors["hidden_states"])
    weights = [rows(tensors[f"{n}_proj_weight"]) for n in "qkv"]
    out = tensors["qkv"].view(a.shape[0], -1)
    block_m, block_n, block_k = (int(values[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tile_rows = block_m // int(values["CONSUMERS"])
    n_rows, n_columns = tile_counts(values, case)
    tiles = n_rows * n_columns
    programs = program_count(tiles, a.device)
    w_rows = block_n // 2 if values["SPLIT_TAIL"] else block_n
    has_bias = tensors.get("q_proj_bias") is not None
    has_norm = "qk_norm" in case.problem.op_names
    rot_dim = rotary_width(case)
    # Vectors that the chain lacks are never read; `out` stands in for their type.
    biases = [tensors[f"{n}_proj_bias"].contiguous() if has_bias else out for n in "qkv"]
    norms = [tensors[f"{n}_norm_weight"].contiguous() if has_norm else out for n in "qk"]
    tables = [tensors[name].contiguous() if rot_dim else out for name in ("cos", "sin")]
    shared_table = rot_dim == 0 or tables[0].shape[0] == 1
    run(
        gluon_qkv_kernel, (programs,),
        descriptor(a, tile_rows, block_k), *(descriptor(w, w_rows, block_k) for w in weights),
        descriptor(out, tile_rows, case["head_dim"] // 2), *biases, *norms, *tables,
        n_rows, n_columns, -(-a.shape[1] // block_k), tiles - tiles % programs if values["SPLIT_TAIL"] else tiles,
        a.shape[0], case["seq_len"],
        0 if shared_table else tables[0].stride(0), float(tensors["rms_norm_eps"]) if has_norm else 0.0,
        Q_WIDTH=case["q_out_features"], KV_WIDTH=case["kv_out_features"], ROT_DIM=rot_dim,
        HAS_BIAS=has_bias, HAS_NORM=has_norm, **values, **launch_options(int(values["CONSUMERS"])),
    )  # fmt: skip


TEMPLATE = Template(
    name="gluon_qkv",
    kind="triton",
    covers=("qkv_projection", "qk_norm", "rope"),
    optional=("qk_norm", "rope"),
    choices=choices,
    constraints=(
        *SHARED_CONSTRAINTS,
        tile_holds_whole_heads,
        rotary_width_is_a_head_or_half,
        rows_are_aligned_for_tma,
        operands_and_staging_fit_shared_memory,
        tail_is_half_a_wave,
    ),
    default=default,
    launch=launch,
    module=__name__,
    helpers=(
        "tilewright.kernel_templates.gqa_attention.gluon_common",
        "tilewright.kernel_templates.gqa_attention.gluon_gemm",
    ),
)
