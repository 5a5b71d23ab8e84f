"""Files that several processes change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.runtime import shared_file

SOURCES = Path(__file__).resolve().parents[2] / ".src"
ADDS = """
import sys
from pathlib import Path
from tilewright.runtime.shared_file import change
for _ in range(30):
    change(Path(sys.argv[1]), "test/1", lambda content: {"count": (content or {"count": 0})["count"] + 1})
"""


def test_several_processes_lose_no_change(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "counts.json"
    command = [sys.executable, "-c", ADDS, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    processes = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert json.loads(path.read_text()) == {"schema": "test/1", "count": 90}


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """The old content stands until the new one is complete, also where writing it fails."""
    path = tmp_path / "counts.json"
    shared_file.change(path, "test/1", lambda content: {"count": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        shared_file.change(path, "test/1", lambda content: {"count": float("nan")})
    assert shared_file.read(path, "test/1") == {"schema": "test/1", "count": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["counts.json", "counts.json.lock"]


def test_a_file_of_another_schema_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text('{"schema": "test/2"}')
    with pytest.raises(ValueError, match="its schema is 'test/2'"):
        shared_file.change(path, "test/1", lambda content: {})
    assert path.read_text() == '{"schema": "test/2"}'
