"""The forms in which rotary tables may come, and the one form that templates see: [B, S, width], shared or full.

Shared tables have stride 0 over the batch and contiguous rows; full ones are contiguous. cos and sin always get the
same form, so that a kernel may use the strides of one for both.
"""

from torch import Tensor

from tilewright.errors import UsageError
from tilewright.runtime.tensors import Adapter, is_plain, plain


def table_shape(name: str, table: Tensor, batch: int, seq: int, width: int) -> None:
    """UsageError unless the table is (S, d), (1, S, d) or (B, S, d)."""
    shape = tuple(table.shape)
    if shape not in ((seq, width), (1, seq, width), (batch, seq, width)):
        accepted = dict.fromkeys([(1, seq, width), (batch, seq, width), (seq, width)])
        raise UsageError(f"{name} has shape {shape}; accepted: {' or '.join(map(str, accepted))}")


def rotary_adapters(cos: Tensor, sin: Tensor, batch: int) -> dict[str, Adapter]:
    """What turns these tables into the form that templates see; nothing where they have it."""
    shared = _is_shared(cos) and _is_shared(sin)
    done = all(_has_form(table, batch, shared) for table in (cos, sin))
    if done:
        return {}

    def share(table: Tensor) -> Tensor:
        rows = plain(table if table.dim() == 2 else table[0])
        return rows.expand(batch, *rows.shape)

    def fill(table: Tensor) -> Tensor:
        return plain(table.expand(batch, *table.shape[-2:]))

    return dict.fromkeys(("cos", "sin"), share if shared else fill)


def _is_shared(table: Tensor) -> bool:
    return table.dim() == 2 or table.shape[0] == 1 or table.stride(0) == 0


def _has_form(table: Tensor, batch: int, shared: bool) -> bool:
    if table.dim() != 3 or table.shape[0] != batch:
        return False
    return is_plain(table[0]) if shared else is_plain(table)
