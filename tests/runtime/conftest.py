"""Serving under test: eager templates, no database but the test's own, nothing remembered from other tests."""

from collections.abc import Iterator
from pathlib import Path

import eager_family
import pytest

from tilewright.kernel_templates import families
from tilewright.runtime import forget, layers


@pytest.fixture(autouse=True)
def _serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setitem(families.FAMILIES, "gqa_attention", "eager_family")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("TILEWRIGHT_DB", raising=False)
    monkeypatch.setattr(layers, "SHIPPED_DIR", tmp_path / "shipped")
    families.load_family.cache_clear()
    forget()
    eager_family.LAUNCHES.clear()
    yield
    families.load_family.cache_clear()
    forget()
