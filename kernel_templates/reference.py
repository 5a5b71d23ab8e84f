"""Runs a family's reference ops over a segment of the chain, in a chosen precision."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tilewright.kernel_templates.base import Tensors
from tilewright.problem import WorkloadCase

ReferenceOps = Mapping[str, Callable[[Tensors, WorkloadCase], Mapping[str, torch.Tensor]]]


def cast(tensors: Tensors, dtype: torch.dtype) -> dict[str, Any]:
    """Floating tensors in `dtype`; everything else as it is."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in tensors.items()
    }


@torch.no_grad()
def run_ops(ops: ReferenceOps, names: Iterable[str], tensors: Tensors, case: WorkloadCase) -> dict[str, Any]:
    """`tensors` with what these ops write added; nothing is modified in place."""
    state: dict[str, Any] = dict(tensors)
    for name in names:
        state.update(ops[name](state, case))
    return state
