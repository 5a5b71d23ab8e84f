"""The design's arrows, asserted on the sources, and what importing costs."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("search", "runtime", "report", "kernel_templates", "db")
# What each room may import of ours; modules at the top level are named alone.
ALLOWED = {
    "errors": set(),
    "expressions": {"errors"},
    "definition": {"errors", "expressions"},
    "problem": {"definition", "errors"},
    "wanted": {"problem", "errors"},
    "db": {"db", "problem", "errors"},
    "kernel_templates": {"kernel_templates", "problem", "errors"},
    "search": {"search", "kernel_templates", "db", "wanted", "problem", "errors"},
    "runtime": {"runtime", "kernel_templates", "db", "wanted", "problem", "expressions", "errors"},
    "report": {"report", "kernel_templates", "db", "problem", "errors"},
    "live": {"search", "db", "problem", "errors"},
    "cli_options": {"report", "problem", "errors"},
    "cli_queries": {"cli_options", "runtime", "report", "db", "problem", "errors"},
    "cli_verify": {"cli_options", "search", "runtime", "report", "problem", "errors"},
    "cli_fleet": {"cli_options", "live", "search", "db", "errors"},
    "cli_filters": {"cli_options", "report", "db", "problem", "errors"},
    "cli_record": {"cli_options", "live", "search", "report", "problem", "errors"},
    "cli_results": {"cli_filters", "cli_options", "search", "report", "errors", "db"},
    "cli_exchange": {"cli_options", "cli_queries", "kernel_templates", "search", "report", "db", "problem", "errors"},
    "cli_db": {"cli_options", "report", "db", "errors"},
    "cli_import": {"cli_db", "cli_options", "search", "report", "db", "errors"},
    "cli": {
        "cli_db",
        "cli_import",
        "cli_options",
        "cli_queries",
        "cli_verify",
        "cli_fleet",
        "cli_record",
        "cli_results",
        "cli_exchange",
        "live",
        "search",
        "runtime",
        "report",
        "db",
        "problem",
        "errors",
    },
}
FORBIDDEN = {
    "db": {"torch", "triton", "optuna"},
    "kernel_templates": {"optuna", "sqlalchemy", "alembic"},
    "runtime": {"optuna"},
    "report": {"optuna"},
    "problem": {"torch", "triton", "optuna", "sqlalchemy"},
}


def sources() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.glob("*.py")):
        yield path.stem, path
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield room, path


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "tilewright":
                names.update(f"tilewright.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize(("room", "path"), list(sources()), ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_arrows_point_one_way(room: str, path: Path) -> None:
    names = imported(path)
    ours = {name.split(".")[1] for name in names if name.startswith("tilewright.")}
    assert ours <= ALLOWED[room], f"{room} may not import {ours - ALLOWED[room]}"
    theirs = {name.split(".")[0] for name in names}
    assert not theirs & FORBIDDEN.get(room, set())


def test_framework_does_not_know_attention() -> None:
    """Outside the family's own folder, its runtime face and the data, no source names what is computed."""
    words = re.compile(r"\b(rope|[qkv]_proj|rms_norm|num_key_value_heads|softmax|rotary)")
    knows = {
        str(path.relative_to(ROOT))
        for room, path in sources()
        if "gqa_attention" not in str(path)
        if words.search(path.read_text(encoding="utf-8"))
    }
    assert knows <= {"runtime/rotary.py"}


@pytest.mark.parametrize("command", ["import tilewright.problem", "import tilewright.cli"])
def test_import_loads_neither_torch_nor_optuna(command: str) -> None:
    code = f"{command}; import sys; print([m for m in ('torch', 'optuna', 'triton', 'sqlalchemy') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / ".src", check=True)
    assert answer.stdout.strip() == "[]"


def test_files_stay_readable() -> None:
    """At most 400 lines where there is a kernel, 300 elsewhere."""
    long = {}
    for _, path in sources():
        text = path.read_text(encoding="utf-8")
        limit = 400 if re.search(r"^@(triton\.)?jit", text, re.MULTILINE) else 300
        if text.count("\n") > limit:
            long[path.name] = text.count("\n")
    assert long == {}
