"""A folder that is written into and never out of."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import UsageError


class OutputFolder:
    """Files by relative path; names from outside cannot lead elsewhere, not by `..`, a drive, or a link."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"output folder {path} cannot be made: {error.strerror}") from error
        self.path = path.resolve()
        self.written: list[Path] = []

    def write(self, name: str, text: str) -> Path:
        """Raises UsageError for a name that leaves the folder, or that cannot be written."""
        target = (self.path / name).resolve()
        if not target.is_relative_to(self.path) or target == self.path or not name.isprintable():
            raise UsageError(f"{name!r} is no path inside {self.path}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from error
        self.written.append(target)
        return target

    def write_json(self, name: str, content: Any) -> Path:
        return self.write(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_lines(self, name: str, lines: Iterable[Mapping[str, Any]]) -> Path:
        return self.write(name, "".join(json.dumps(dict(line), allow_nan=False) + "\n" for line in lines))


def safe(name: str) -> str:
    """One path component that means nothing to a file system."""
    kept = "".join(c if c.isalnum() or c in "_-." else "_" for c in name).strip(".")
    return kept[:120] or "_"
