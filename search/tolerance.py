"""How much error is accepted, stated once."""

MOST_ERROR_RATIO = 2.0  # candidate's error over the eager block's, both against the same wide reference
SMALLEST_EAGER_ERROR = 1e-6  # stands in for an eager block that is exact
MOST_RELATIVE_ERROR = 0.05  # whatever the eager block does
MOST_ROW_RATIO = 4.0  # worst row's error over the eager block's worst row: one wrong row hides in a norm over all
MOST_ROW_ERROR = 0.25


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
