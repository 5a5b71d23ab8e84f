"""Serving under test: eager templates, no database but the test's own, nothing remembered from other tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import eager_family
import pytest

from tilewright.db.rows import StoredRecord
from tilewright.kernel_templates import families
from tilewright.runtime import forget, layers
from tilewright.runtime.layers import Layer, RecordSet


@pytest.fixture(autouse=True)
def _serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setitem(families.FAMILIES, "gqa_attention", "eager_family")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("TILEWRIGHT_DB", "TILEWRIGHT_ALLOW_STALE", "TILEWRIGHT_TRACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEWRIGHT_QUARANTINE", str(tmp_path / "state" / "quarantine.json"))
    monkeypatch.setattr(layers, "SHIPPED_DIR", tmp_path / "shipped")
    families.load_family.cache_clear()
    forget()
    eager_family.LAUNCHES.clear()
    yield
    families.load_family.cache_clear()
    forget()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts records into layers without a file: `serve(*records)` is the user's database."""
    content: dict[Layer, list[StoredRecord]] = {}
    monkeypatch.setattr(layers, "_load", lambda layer, target: RecordSet(layer, target, content.get(layer, ())))

    def put(*records: StoredRecord, layer: Layer = Layer.USER) -> None:
        content[layer] = list(records)
        forget()

    return put
