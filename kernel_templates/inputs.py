"""Seeded inputs of a case, by the public protocol or harsher.

The protocol (SOL-ExecBench): activations and biases are unit normal, weights are scaled by 1/sqrt(fan_in), norm
weights are ones, and tables (`draws` in tuning.json) are normals clamped to [-1, 1]. Checks draw the norm weights too,
because a kernel that ignores a norm weight passes the protocol; scale one channel by 1000; and make activations and
biases so faint that a norm's epsilon counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tilewright.problem import WorkloadCase

OUTLIER_SCALE = 1000.0
FAINT_SCALE = 2e-3  # its square is near the epsilon of published norms: 1e-5, 1e-6


@dataclass(frozen=True)
class InputOptions:
    """What to draw; `packed` weights follow the case's weight mode."""

    seed: int = 0
    random_norm_weights: bool = False
    outlier_channel: bool = False
    faint: bool = False


def make_inputs(
    case: WorkloadCase, device: torch.device | str, options: InputOptions = InputOptions()
) -> dict[str, object]:
    """Every input by name: tensors on `device`, scalars as floats; same seed, same values per device type."""
    generator = torch.Generator(device=device).manual_seed(options.seed)
    inputs: dict[str, object] = {}
    for spec in case.problem.inputs:
        shape = case.shape(spec.name)
        if shape is None:
            inputs[spec.name] = float(case.problem.scalars[spec.name])
            continue
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        inputs[spec.name] = _shaped(spec.name, case.problem.draws.get(spec.name), values, options).to(
            getattr(torch, spec.dtype)
        )
    if case.weight_mode == "packed":
        for parts in case.problem.packings.values():
            pack(inputs, [name for name in parts if name in inputs])
    return inputs


def pack(inputs: dict[str, object], names: Iterable[str]) -> None:
    """Replaces these tensors by views of one allocation, in order, so that they can be read as one matrix."""
    parts = [inputs[name] for name in names]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if not tensors:
        return
    packed = torch.cat(tensors)
    for name, view in zip(names, torch.split(packed, [t.shape[0] for t in tensors]), strict=True):
        inputs[name] = view


def adjacent(tensors: Iterable[torch.Tensor]) -> bool:
    """True when these contiguous tensors lie end to end in memory."""
    end: int | None = None
    for tensor in tensors:
        if not tensor.is_contiguous() or (end is not None and tensor.data_ptr() != end):
            return False
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return True


def _shaped(name: str, draw: str | None, values: torch.Tensor, options: InputOptions) -> torch.Tensor:
    if name.endswith("norm_weight"):
        return 1 + 0.5 * values if options.random_norm_weights else torch.ones_like(values)
    if name.endswith("weight"):
        return values * float(values.shape[-1] ** -0.5)
    if draw == "clamped_normal":
        return values.clamp(-1, 1)
    if options.faint and (draw == "activation" or name.endswith("bias")):
        values *= FAINT_SCALE
    if draw == "activation" and options.outlier_channel:
        values[..., values.shape[-1] // 3] *= OUTLIER_SCALE
    return values
