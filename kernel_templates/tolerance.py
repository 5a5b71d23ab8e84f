"""How much error is accepted, stated once: the tuner's checks and the runtime's compare alike."""

from dataclasses import dataclass
from typing import Self

import torch

MOST_ERROR_RATIO = 2.0  # candidate's error over the eager block's, both against the same wide reference
SMALLEST_EAGER_ERROR = 1e-6  # stands in for an eager block that is exact
MOST_RELATIVE_ERROR = 0.05  # whatever the eager block does
MOST_ROW_RATIO = 4.0  # worst row's error over the eager block's worst row: one wrong row hides in a norm over all
MOST_ROW_ERROR = 0.25


@dataclass(frozen=True)
class Expected:
    """The wide reference of one tensor, and how far the eager block is from it: over all, and in its worst row."""

    value: torch.Tensor
    eager_error: float
    eager_row_error: float

    @classmethod
    def of(cls, eager: torch.Tensor, wide: torch.Tensor) -> Self:
        return cls(wide, *errors(eager, wide))


def compare(name: str, found: torch.Tensor, wanted: Expected) -> tuple[str, float]:
    """A reason when the tensor is wrong, and the error ratio."""
    error, row_error = errors(found, wanted.value)
    ratio = error / max(wanted.eager_error, 1e-12)
    if error == float("inf") or row_error == float("inf"):
        missing = int((~torch.isfinite(found)).sum())
        return f"{name}: {missing} of {found.numel()} values are not finite", float("inf")
    if error > bound(wanted.eager_error):
        return f"{name}: relative error {error:.2e}, eager block {wanted.eager_error:.2e}", ratio
    if row_error > row_bound(wanted.eager_row_error):
        return f"{name}: worst row's error {row_error:.2e}, eager block {wanted.eager_row_error:.2e}", ratio
    return "", ratio


def errors(found: torch.Tensor, wide: torch.Tensor) -> tuple[float, float]:
    """Relative Frobenius error over all, and that of the worst row; infinite where anything is not finite."""
    difference = found.to(wide.dtype) - wide
    rows, norms = difference.flatten(0, -2).norm(dim=-1), wide.flatten(0, -2).norm(dim=-1)
    total = rows.norm() / norms.norm().clamp_min(1e-30)
    worst = (rows / norms.clamp_min(1e-30)).max()
    values = torch.stack((total, worst)).tolist()
    return tuple(x if x == x else float("inf") for x in values)  # type: ignore[return-value]


def wide_dtype(device: torch.device) -> torch.dtype:
    """Of the reference: float32 on a GPU, float64 elsewhere."""
    return torch.float32 if device.type == "cuda" else torch.float64


def bound(eager_error: float) -> float:
    """Largest accepted relative Frobenius error."""
    return _capped(eager_error, MOST_ERROR_RATIO, MOST_RELATIVE_ERROR)


def row_bound(eager_error: float) -> float:
    """Largest accepted relative error of any single row."""
    return _capped(eager_error, MOST_ROW_RATIO, MOST_ROW_ERROR)


def _capped(eager_error: float, ratio: float, cap: float) -> float:
    """The cap binds only where the eager block keeps it: outliers without a norm make the block itself that inexact."""
    allowed = ratio * max(eager_error, SMALLEST_EAGER_ERROR)
    return allowed if eager_error >= cap else min(allowed, cap)
