"""The code of docs/pytorch.md runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

from tilewright.runtime import forget

DOCS = Path(__file__).resolve().parent.parent / "docs" / "pytorch.md"


def test_the_pages_code_runs_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("TILEWRIGHT_DB", raising=False)
    forget()
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), names)
    forget()


def test_the_page_names_every_reason_for_leaving_a_call() -> None:
    pytest.importorskip("transformers")
    source = (DOCS.parent.parent / "runtime" / "gqa_attention_transformers.py").read_text(encoding="utf-8")
    returned = re.findall(r'(?:return|else|reason =) f?"([a-z_ ]+)', source)
    page = DOCS.read_text(encoding="utf-8")
    assert len(returned) > 12
    assert [reason for reason in returned if f"`{reason.strip()}" not in page] == []
