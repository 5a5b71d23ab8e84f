"""What every kernel of the family shares: exact arithmetic under the interpreter, tile order, host-side views."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.errors import UsageError
from tilewright.kernel_templates.inputs import adjacent

# The interpreter keeps bf16 as uint16 and multiplies those integers in tl.dot.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Programs of a persistent launch where no GPU says how many; few, so that each one loops.
PROGRAMS_WITHOUT_GPU = 3


@triton.jit
def mma(a, b, acc):
    """acc + a @ b in float32; 16-bit operands are exact under the interpreter too."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Values in `dtype`, float32 rounded to nearest even; the interpreter alone would cut bf16 off."""
    if INTERPRETED and x.dtype == tl.float32 and dtype == tl.bfloat16:
        b_bits = x.to(tl.uint32, bitcast=True)
        x = ((b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 values rounded to what `dtype` can hold."""
    return narrow(x, dtype).to(tl.float32)


@triton.jit
def grouped_tile(i_tile, n_rows, n_columns, GROUP_M: tl.constexpr):
    """Row and column of a tile when GROUP_M tile rows are walked together, so that both operands stay in L2."""
    i_group = i_tile // (GROUP_M * n_columns)
    i_first = i_group * GROUP_M
    n_group = tl.minimum(n_rows - i_first, GROUP_M)
    i_in_group = i_tile % (GROUP_M * n_columns)
    return i_first + i_in_group % n_group, i_in_group // n_group


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., features] as a contiguous, 16-byte aligned [rows, features]; copied only where it is neither."""
    flat = tensor.reshape(-1, tensor.shape[-1]).contiguous()
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()


def packed_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """The matrix that these row blocks form in memory; raises UsageError unless they lie end to end."""
    height, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if parts[0].device.type == "meta":
        return parts[0].new_empty(height, width)
    if not adjacent(parts):
        raise UsageError("weight_mode is packed, but the projection weights do not lie end to end in one allocation")
    return parts[0].as_strided((height, width), (width, 1))


def descriptor(tensor: torch.Tensor, *block: int) -> Any:
    """A host tensor descriptor over a matrix from `rows`."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def program_count(tiles: int, device: torch.device) -> int:
    """Programs of a persistent launch: one for each SM, never more than there are tiles."""
    return min(tiles, _sm_count(device))


@cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count
