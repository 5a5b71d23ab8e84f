"""The real kernels on a real GPU: `TRITON_INTERPRET=0 python -m pytest -m gpu tests/gpu`. Shipped records serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton import knobs

from tilewright.runtime import forget


@pytest.fixture(autouse=True)
def _serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=0: kernels are decorated for the interpreter otherwise")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("TILEWRIGHT_DB", raising=False)
    torch.compiler.reset()
    forget()
    yield
    forget()
    torch.compiler.reset()
