"""output = context @ o_proj_weight^T on Hopper: the warp-specialised GEMM with a plain store."""

from tilewright.kernel_templates.base import Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention.gluon_common import (  # type: ignore[attr-defined]  # aliases of two modules
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    gl,
    jit,
    product_layout,
    program_count,
    tma,
)
from tilewright.kernel_templates.gqa_attention.gluon_gemm import (
    SHARED_CONSTRAINTS,
    choices,
    column_slices,
    default,
    descriptor,
    finish,
    fits_shared_memory,
    grouped_tile,
    launch_options,
    load_operands,
    make_ring,
    make_staging,
    multiply,
    rows,
    store_slice,
)
from tilewright.problem import WorkloadCase

# Columns of one store: 128 bytes of a row, two staging buffers in turn.
SLICE_N = 64


@jit
def _produce(a_desc, w_desc, ring, sizes, GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr):
    n_rows, n_columns, n_steps = sizes
    BLOCK_M: gl.constexpr = ring[0].shape[1] * (ring[0].shape[0] // ring[2].shape[0])
    stage = 0
    phase = 0
    for i_tile in range(gl.program_id(0), n_rows * n_columns, gl.num_programs(0)):
        i_m, i_n = grouped_tile(i_tile, n_rows, n_columns, GROUP_M)
        stage, phase = load_operands(a_desc, w_desc, i_m * BLOCK_M, i_n * BLOCK_N, n_steps, ring, stage, phase, BLOCK_N)


@jit
def _consume(out_desc, b_staging, ring, sizes, CONSUMER: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr):
    n_rows, n_columns, n_steps = sizes
    STAGES: gl.constexpr = ring[2].shape[0]
    CONSUMERS: gl.constexpr = ring[0].shape[0] // STAGES
    ROWS: gl.constexpr = ring[0].shape[1]
    WIDTH: gl.constexpr = b_staging.shape[2]
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    stage = 0
    phase = 0
    for i_tile in range(gl.program_id(0), n_rows * n_columns, gl.num_programs(0)):
        i_m, i_n = grouped_tile(i_tile, n_rows, n_columns, GROUP_M)
        i_row = (i_m * CONSUMERS + CONSUMER) * ROWS
        b_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        b_acc, stage, phase = multiply(b_acc, 0, n_steps, ring, stage, phase, CONSUMER, BLOCK_N)
        b_out = column_slices(finish(b_acc, ring, stage).to(gl.bfloat16), BLOCK_N // WIDTH)
        for i in gl.static_range(BLOCK_N // WIDTH):
            store_slice(out_desc, b_staging, b_out[i], i_row, i_n * BLOCK_N + i * WIDTH, i)
    tma.store_wait(0)


# fmt: off
@jit(do_not_specialize=["n_rows", "n_columns", "n_steps"])
def gluon_output_kernel(
    a_desc, w_desc, out_desc, n_rows, n_columns, n_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr,
):
    ring = make_ring(a_desc, w_desc, BLOCK_N, CONSUMERS, STAGES)
    sizes = (n_rows, n_columns, n_steps)
    b_first = make_staging(out_desc)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (out_desc, b_first, ring, sizes, 0, GROUP_M, BLOCK_N)),
            (_produce, (a_desc, w_desc, ring, sizes, GROUP_M, BLOCK_N)),
        ], [1], [PRODUCER_REGISTERS])
    else:
        b_second = make_staging(out_desc)
        gl.warp_specialize([
            (_consume, (out_desc, b_first, ring, sizes, 0, GROUP_M, BLOCK_N)),
            (_consume, (out_desc, b_second, ring, sizes, 1, GROUP_M, BLOCK_N)),
            (_produce, (a_desc, w_desc, ring, sizes, GROUP_M, BLOCK_N)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
# fmt: on


def operands_and_staging_fit_shared_memory(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return fits_shared_memory(min(SLICE_N, int(v["BLOCK_N"]) // 2), v, limits)


def rows_are_aligned_for_tma(v: Values, case: WorkloadCase, limits: Limits) -> bool:
    return case["q_out_features"] % 8 == 0 and case["hidden_size"] % 8 == 0


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    a, w = rows(tensors["context"]), rows(tensors["o_proj_weight"])
    out = tensors["output"].view(a.shape[0], w.shape[0])
    block_m, block_n, block_k = (int(values[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tile_rows = block_m // int(values["CONSUMERS"])
    n_rows, n_columns = -(-a.shape[0] // block_m), -(-w.shape[0] // block_n)
    run(
        gluon_output_kernel, (program_count(n_rows * n_columns, a.device),),
        descriptor(a, tile_rows, block_k), descriptor(w, block_n, block_k),
        descriptor(out, tile_rows, min(SLICE_N, block_n // 2)),
        n_rows, n_columns, -(-a.shape[1] // block_k),
        **values, **launch_options(int(values["CONSUMERS"])),
    )  # fmt: skip


TEMPLATE = Template(
    name="gluon_output",
    kind="triton",
    covers=("output_projection",),
    choices=choices,
    constraints=(
        *SHARED_CONSTRAINTS,
        rows_are_aligned_for_tma,
        operands_and_staging_fit_shared_memory,
    ),
    default=default,
    launch=launch,
    module=__name__,
    helpers=(
        "tilewright.kernel_templates.gqa_attention.gluon_common",
        "tilewright.kernel_templates.gqa_attention.gluon_gemm",
    ),
)
