"""Templates' functions copied into one text: complete, without tilewright, renamed where names collide."""

import ast
import builtins
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilewright.errors import UsageError
from tilewright.kernel_templates.device import INTERPRETER_LIMITS
from tilewright.kernel_templates.families import load_family
from tilewright.problem import DEFAULT_PROBLEM, load_problem
from tilewright.report.exchange.inline import Inliner
from tilewright.report.exchange.kernel_file import TunedPlan, kernel_file
from tilewright.report.exchange.schema import complaints
from tilewright.report.exchange.solution import default_plan

PROBLEM = load_problem(DEFAULT_PROBLEM)
REGISTRY = load_family(PROBLEM.family).registry


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two modules under our name that both define `size` and `scale`, one using the other's."""
    package = ModuleType("tilewright.toy")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "tilewright.toy", package)
    (tmp_path / "low.py").write_text(
        "import math\n\nUNUSED = 1\nsize = 3  # of low\n\n\ndef scale(x: 'Nothing') -> 'Nothing':\n"
        '    """Kept."""\n    # reason\n    return x * size * math.floor(1.5)\n'
    )
    (tmp_path / "high.py").write_text(
        "from tilewright.toy import low\nfrom tilewright.toy.low import scale as other\n\nsize = 5\n\n\n"
        "def scale(x, size=size):\n    values = [size for size in (size,)]\n"
        "    return other(x) + low.scale(x) + values[0] + low.size\n"
    )
    yield tmp_path
    for name in ("low", "high"):
        sys.modules.pop(f"tilewright.toy.{name}", None)


def test_names_that_collide_are_told_apart(modules: Path) -> None:
    inliner = Inliner(())
    key = inliner.add("tilewright.toy.high", "scale")
    text = inliner.text()
    found: dict[str, object] = {}
    exec(text, found)
    assert found[inliner.new_names[key]](2) == 2 * 3 + 2 * 3 + 5 + 3  # type: ignore[operator]
    assert "UNUSED" not in text
    assert "# reason" in text
    assert "Nothing" not in text


def test_a_reserved_name_is_not_taken(modules: Path) -> None:
    inliner = Inliner(("scale",))
    key = inliner.add("tilewright.toy.low", "scale")
    assert inliner.new_names[key] == "low_scale"
    assert "def low_scale(x):" in inliner.text()


def test_an_import_of_ours_inside_a_function_is_refused(modules: Path) -> None:
    (modules / "low.py").write_text("def scale(x):\n    from tilewright.toy import high\n    return high\n")
    with pytest.raises(UsageError, match="imports high inside a function"):
        Inliner(()).add("tilewright.toy.low", "scale")


def free_globals(text: str) -> set[str]:
    """Names that functions of the text read as globals and that nothing in it defines."""
    table = symtable.symtable(text, "kernel.py", "exec")
    defined = set(table.get_identifiers()) | set(dir(builtins))

    def walk(scope: symtable.SymbolTable) -> Iterator[str]:
        yield from (s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced())
        for child in scope.get_children():
            yield from walk(child)

    return {name for child in table.get_children() for name in walk(child)} - defined


@pytest.mark.parametrize("name", list(REGISTRY))
def test_every_template_can_be_exported_and_needs_torch_and_triton_alone(name: str) -> None:
    inliner = Inliner(("run",))
    functions: tuple[Any, ...] = (REGISTRY[name].launch, REGISTRY[name].scratch)
    for function in functions:
        inliner.add(function.__module__, function.__name__)
    text = inliner.text()
    ast.parse(text)
    assert free_globals(text) == set()
    assert complaints(text) == []


def test_kernels_are_copied_to_the_letter() -> None:
    inliner = Inliner(("run",))
    inliner.add("tilewright.kernel_templates.gqa_attention.norm_rope", "launch")
    original = Path(sys.modules["tilewright.kernel_templates.gqa_attention.norm_rope"].__file__ or "").read_text()
    kernel = original[original.index("@triton.jit(do_not") : original.index("def launch(")].strip()
    assert kernel in inliner.text()


def test_the_file_loads_where_tilewright_cannot_be_had(tmp_path: Path) -> None:
    """All triton and library templates together, in a process that sees neither this project nor optuna."""
    default = default_plan(PROBLEM, INTERPRETER_LIMITS)
    stages = list(REGISTRY.values())
    plan = type(default)(tuple(type(default.stages[0])(t.name, {}) for t in stages))
    text = kernel_file(PROBLEM, [TunedPlan({"batch_size": 1, "seq_len": 2}, plan)], default, ["made by a test"])
    (tmp_path / "kernel.py").write_text(text)
    script = (
        "import sys; sys.path.insert(0, '.'); import kernel;"
        "print(sorted({'tilewright', 'optuna', 'sqlalchemy'} & set(sys.modules)), len(kernel.STAGES))"
    )
    command = [sys.executable, "-I", "-c", script]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"[] {len(stages)}"
