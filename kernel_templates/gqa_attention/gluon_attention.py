"""Warp-specialised causal attention for Hopper in Gluon: qkv [B, S, (Hq + 2 Hkv) * D] -> context [B, S, Hq * D].

Query tiles hold HEADS_PER_TILE heads of a group at 128 / HEADS_PER_TILE tokens; gluon_flash.py has the kernel.
"""

import math

import triton

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.gqa_attention.gluon_common import (
    ENTRY_REGISTERS,
    device_is_hopper,
    gluon_is_available,
    program_count,
)
from tilewright.kernel_templates.gqa_attention.gluon_flash import (
    CONSUMERS,
    ROWS,
    gluon_attention_kernel,
    heads_descriptor,
)
from tilewright.problem import WorkloadCase


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    packs = tuple(heads for heads in (1, 2, 4) if group_size(case) % heads == 0)
    return (
        Choice("BLOCK_N", (64, 128)),
        Choice("STAGES", (2, 3, 4)),
        Choice("HEADS_PER_TILE", packs),
        Choice("PING_PONG", (False, True)),
        Choice("PDL", (False, True)),
    )


def default(case: WorkloadCase, limits: Limits) -> Values:
    """Wide key tiles on long rows; packed heads, which waste less of the diagonal, on short ones."""
    most = max(heads for heads in (1, 2, 4) if group_size(case) % heads == 0)
    if case["seq_len"] > 512:
        return {"BLOCK_N": 128, "STAGES": 2, "HEADS_PER_TILE": min(2, most), "PING_PONG": False, "PDL": True}
    return {"BLOCK_N": 64, "STAGES": 3, "HEADS_PER_TILE": most, "PING_PONG": False, "PDL": True}


def elements_have_two_bytes(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    return case.problem.dtype in ("bfloat16", "float16")


def head_dim_is_known(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    return case["head_dim"] in (64, 128)


def fits_shared_memory(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Key and value tiles of every stage, query and output tile, barriers."""
    rows = 2 * int(c["STAGES"]) * int(c["BLOCK_N"]) + 2 * int(CONSUMERS.value * ROWS.value)
    return rows * case["head_dim"] * 2 + 1024 <= limits.shared_memory_bytes


def consumers_have_equal_turns(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Where a key tile ends between the consumers' tokens, the first has one tile less and would wait forever."""
    return not c["PING_PONG"] or int(c["BLOCK_N"]) >= tokens_per_tile(c)


CONSTRAINTS = (
    gluon_is_available,
    device_is_hopper,
    elements_have_two_bytes,
    head_dim_is_known,
    fits_shared_memory,
    consumers_have_equal_turns,
)


def group_size(case: WorkloadCase) -> int:
    """Query heads that share a key/value head."""
    return case["num_attention_heads"] // case["num_key_value_heads"]


def tokens_per_tile(c: Values) -> int:
    return int(CONSUMERS.value * ROWS.value) // int(c["HEADS_PER_TILE"])


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    qkv, context = tensors["qkv"], tensors["context"]
    batch, seq_len, _ = qkv.shape
    if not batch * seq_len:
        return
    heads, head_dim, packed = case["num_attention_heads"], case["head_dim"], int(values["HEADS_PER_TILE"])
    rows, keys = [1, int(ROWS.value) // packed, packed, head_dim], [1, int(values["BLOCK_N"]), 1, head_dim]
    # One flat axis: batch * heads may exceed the 65535 of the others.
    num_rows = batch * heads // packed
    items = num_rows * triton.cdiv(seq_len, tokens_per_tile(values))
    run(
        gluon_attention_kernel, (program_count(items, qkv.device),),
        heads_descriptor(qkv, head_dim, rows), heads_descriptor(qkv, head_dim, keys),
        heads_descriptor(context, head_dim, rows), num_rows, seq_len,
        SCALE_LOG2=head_dim**-0.5 * math.log2(math.e), NUM_HEADS=heads, NUM_KV_HEADS=case["num_key_value_heads"],
        STAGES=values["STAGES"], PING_PONG=values["PING_PONG"], PDL=values["PDL"], launch_pdl=bool(values["PDL"]),
        num_warps=4, maxnreg=ENTRY_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip


TEMPLATE = Template(
    name="gluon_attention",
    kind="triton",
    covers=("attention",),
    choices=choices,
    constraints=CONSTRAINTS,
    default=default,
    launch=launch,
    module=__name__,
    helpers=(
        "tilewright.kernel_templates.gqa_attention.gluon_common",
        "tilewright.kernel_templates.gqa_attention.gluon_flash",
    ),
)
