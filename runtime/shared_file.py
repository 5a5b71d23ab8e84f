"""Small JSON files that several processes change: each change under a lock, each file replaced as a whole."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

LOCK_LIMIT_S = 5.0


def read(path: Path, schema: str) -> dict[str, Any] | None:
    """The content, or None where there is no file. ValueError for anything that is not a document of this schema."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    content = json.loads(text)
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise ValueError(f"its schema is {found!r}, expected {schema!r}")
    return dict(content)


def change(path: Path, schema: str, edit: Callable[[dict[str, Any] | None], dict[str, Any]]) -> None:
    """Replaces the file by what `edit` makes of its content. OSError where it cannot be locked or written, ValueError
    where it is something else, which is then left as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=LOCK_LIMIT_S):
        content = {"schema": schema, **edit(read(path, schema))}
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            draft.replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
