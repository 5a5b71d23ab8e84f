"""Warp-specialised causal attention for Hopper in Gluon: qkv [B, S, (Hq + 2 Hkv) * D] -> context [B, S, Hq * D].

Not registered: no GPU has run it yet. `try_gluon_attention.py` is its trial; it moves to the templates once it passed.

Query tiles hold HEADS_PER_TILE heads of a group at 128 / HEADS_PER_TILE tokens; gluon_flash.py has the kernel.
"""

import math
from functools import cache

import torch
import triton

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Values
import gluon_flash
from gluon_flash import (
    CONSUMERS,
    ENTRY_REGISTERS,
    HAS_GLUON,
    ROWS,
    gluon_attention_kernel,
    heads_descriptor,
)  # fmt: skip
from tilewright.problem import WorkloadCase

# Compiled and read at both ends; Gluon is experimental, so that other versions are absent until somebody looks.
KNOWN_TRITON = ((3, 6), (3, 9))
SMS_WITHOUT_GPU = 132


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    packs = tuple(heads for heads in (1, 2, 4) if group_size(case) % heads == 0)
    return (
        Choice("BLOCK_N", (64, 128)),
        Choice("STAGES", (2, 3, 4)),
        Choice("HEADS_PER_TILE", packs),
        Choice("PING_PONG", (False, True)),
        Choice("PERSISTENT", (False, True)),
    )


def default(case: WorkloadCase, limits: Limits) -> Values:
    """Wide key tiles on long rows; packed heads, which waste less of the diagonal, on short ones."""
    if case["seq_len"] > 512:
        return {"BLOCK_N": 128, "STAGES": 2, "HEADS_PER_TILE": 1, "PING_PONG": True, "PERSISTENT": True}
    packed = max(heads for heads in (1, 2) if group_size(case) % heads == 0)
    return {"BLOCK_N": 64, "STAGES": 4, "HEADS_PER_TILE": packed, "PING_PONG": False, "PERSISTENT": True}


def gluon_is_available(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    return HAS_GLUON and limits.triton in KNOWN_TRITON


def device_is_hopper(c: Values, case: WorkloadCase, limits: Limits) -> bool:
    """wgmma exists there alone; the interpreter has no Gluon."""
    return limits.kind == "cuda" and limits.capability == 90


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
        gluon_attention_kernel, (min(items, _sm_count(qkv.device)) if values["PERSISTENT"] else items,),
        heads_descriptor(qkv, head_dim, rows), heads_descriptor(qkv, head_dim, keys),
        heads_descriptor(context, head_dim, rows), num_rows, seq_len,
        SCALE_LOG2=head_dim**-0.5 * math.log2(math.e), NUM_HEADS=heads, NUM_KV_HEADS=case["num_key_value_heads"],
        STAGES=values["STAGES"], PING_PONG=values["PING_PONG"],
        num_warps=4, maxnreg=ENTRY_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip


@cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return SMS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


TEMPLATE = Template(
    name="gluon_attention",
    kind="triton",
    covers=("attention",),
    choices=choices,
    constraints=CONSTRAINTS,
    default=default,
    launch=launch,
    module=__name__,
    helpers=(gluon_flash.__name__,),
)
