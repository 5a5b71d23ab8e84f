"""What is asked of the tensors of a call, stated once: type, device, dtype, layout."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import MachineUnfit, UsageError
from tilewright.runtime.log import warn_once

ACCEPTED_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
ALIGNMENT_BYTES = 16  # what descriptor (TMA) loads and 128-bit loads need

Adapter = Callable[[Tensor], Tensor]


def signature(tensors: Sequence[Tensor | None], *, grad: bool) -> tuple[Any, ...]:
    """Everything about the tensors that decides how a call is prepared; equal signatures share the preparation.

    Tensors that are alike and plain, as they nearly always are, need little more than their shapes: this is most of
    what a call costs on the host.
    """
    first = tensors[0]
    if first is None:
        return _long_signature(tensors, grad)
    dtype, device = first.dtype, first.device
    shapes: list[Any] = []
    pointers = 0
    for t in tensors:
        if t is None:
            shapes.append(None)
            continue
        if t.dtype is not dtype or t.device != device or not t.is_contiguous() or (grad and t.requires_grad):
            return _long_signature(tensors, grad)
        shapes.append(t.shape)
        pointers |= t.data_ptr()
    if pointers & (ALIGNMENT_BYTES - 1):
        return _long_signature(tensors, grad)
    return (dtype, device, *shapes)


def _long_signature(tensors: Sequence[Tensor | None], grad: bool) -> tuple[Any, ...]:
    return tuple(
        None
        if t is None
        else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & (ALIGNMENT_BYTES - 1), grad and t.requires_grad)
        for t in tensors
    )


def check_alike(given: Mapping[str, Any]) -> str:
    """One device, one accepted dtype; returns the dtype's name. Errors name the first offender."""
    first, reference = next(iter(given.items()))
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name} has layout {tensor.layout}; accepted: torch.strided")
        if tensor.dtype not in ACCEPTED_DTYPES:
            raise UsageError(f"{name} has dtype {tensor.dtype}; accepted: {', '.join(map(str, ACCEPTED_DTYPES))}")
        if tensor.dtype != reference.dtype:
            raise UsageError(f"{name} has dtype {tensor.dtype}, {first} has {reference.dtype}; all must be the same")
        if tensor.device != reference.device:
            raise UsageError(f"{name} is on {tensor.device}, {first} on {reference.device}; all must be on one device")
    return ACCEPTED_DTYPES[reference.dtype]


def check_device(device: torch.device) -> None:
    """CUDA, or the CPU where Triton interprets its kernels."""
    from triton import knobs

    if device.type == "cpu" and not knobs.runtime.interpret:
        raise MachineUnfit(
            "the tensors are on the CPU, where Triton kernels run only with TRITON_INTERPRET=1; move them to a GPU"
        )
    if device.type not in ("cuda", "cpu"):
        raise MachineUnfit(f"the tensors are on {device}; accepted: cuda, or cpu with TRITON_INTERPRET=1")


def check_output(output: Tensor, shape: tuple[int, ...]) -> None:
    """It is written in place, so no copy can stand in for it."""
    if tuple(output.shape) != shape:
        raise UsageError(f"output has shape {tuple(output.shape)}, expected {shape}")
    if not output.is_contiguous() or output.data_ptr() % ALIGNMENT_BYTES:
        raise UsageError(f"output must be contiguous and {ALIGNMENT_BYTES}-byte aligned, got strides {output.stride()}")


def is_plain(tensor: Tensor) -> bool:
    """Contiguous and aligned: what every template may assume of an input."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous and aligned, else a copy that is."""
    return tensor if is_plain(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def copies(given: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """`plain` for each tensor that needs it; copying a weight on every call is worth a warning."""
    needed = {name: tensor for name, tensor in given.items() if not is_plain(tensor)}
    for name, tensor in needed.items():
        if name.endswith("weight"):
            warn_once(
                ("copied", name, tensor.shape, tensor.stride()),
                "%s %s has strides %s or is not %d-byte aligned and is copied on every call; make it contiguous once",
                name, tuple(tensor.shape), tensor.stride(), ALIGNMENT_BYTES,
            )  # fmt: skip
    return dict.fromkeys(needed, plain)
