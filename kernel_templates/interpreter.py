"""Keeps Triton's interpreter usable with the NumPy that is installed beside it."""

from typing import Any


def mend_scalar_reads() -> None:
    """Loop bounds computed on the device work again: Triton 3.6 reads them by int(array), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def mended(tensor: Any, *arguments: Any) -> None:
        patch(tensor, *arguments)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # undone with the rest when the launch ends

    mended.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = mended
