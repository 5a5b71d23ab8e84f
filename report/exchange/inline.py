"""Functions of the template modules as one text without tilewright: copied by position, renamed where names collide.

What is reached from the wanted functions is taken, whole definitions at a time, with the comments above them. Kernels
keep every character but the names that had to change; host code loses its annotations, which name types left behind.
"""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module

from tilewright.errors import UsageError
from tilewright.report.exchange.edits import Edit, apply_edits, without_annotations
from tilewright.report.exchange.scopes import Use, bound_names, defined_names, global_uses

OURS = "tilewright."
Key = tuple[str, str]  # module, name


@dataclass(frozen=True)
class Unit:
    """One statement at the top of a module."""

    module: str
    node: ast.stmt
    names: frozenset[str]

    @property
    def is_kernel(self) -> bool:
        """Compiled by Triton: its annotations are part of the language."""
        return isinstance(self.node, ast.FunctionDef) and any(_is_jit(d) for d in self.node.decorator_list)


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == "jit"


@dataclass
class Module:
    """A template module's text, taken apart."""

    name: str
    text: str
    units: list[Unit] = field(default_factory=list)
    externals: dict[str, str] = field(default_factory=dict)  # name -> the import that binds it
    internals: dict[str, Key] = field(default_factory=dict)  # name -> where it comes from; ("m", "") is a module

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    def unit_of(self, name: str) -> Unit | None:
        return next((unit for unit in self.units if name in unit.names), None)


def read_module(name: str) -> Module:
    """Parsed from the source that Python runs."""
    import_module(name)
    module = Module(name, inspect.getsource(sys.modules[name]))
    for statement in ast.parse(module.text).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            _take_import(module, statement)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            module.units.append(Unit(name, statement, frozenset(defined_names(statement))))
    return module


def _take_import(module: Module, statement: ast.Import | ast.ImportFrom) -> None:
    for alias in statement.names:
        bound = alias.asname or alias.name.partition(".")[0]
        if isinstance(statement, ast.Import):
            single: ast.stmt = ast.Import([alias])
            source = alias.name
        else:
            single = ast.ImportFrom(statement.module, [alias], 0)
            source = statement.module or ""
        if not f"{source}.".startswith(OURS):
            module.externals[bound] = ast.unparse(single)
        elif isinstance(statement, ast.ImportFrom) and f"{source}.{alias.name}" in sys.modules:
            module.internals[bound] = (f"{source}.{alias.name}", "")
        else:
            module.internals[bound] = (source, alias.name)


class Inliner:
    """Collects what is reached; `text` writes it."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self._reserved = frozenset(reserved)
        self._modules: dict[str, Module] = {}
        self._order: list[str] = []  # modules, those imported first first
        self._taken: dict[int, Unit] = {}
        self._imports = {"torch": "import torch"}  # what is written around the definitions needs it
        self._fixed: set[str] = set()  # names that statements like try bind: they cannot be renamed

    def add(self, module: str, name: str) -> Key:
        """Takes a definition and all that it needs; where it really stands. Raises UsageError for what cannot be."""
        key = self._resolve(module, name)
        if key is None:
            raise UsageError(f"{module} does not define {name}, so it cannot be exported")
        unit = self._module(key[0]).unit_of(key[1])
        assert unit is not None
        self._take(unit)
        return key

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            module = self._modules[name] = read_module(name)
            for source, _ in module.internals.values():
                self._module(source)
            self._order.append(name)
        return self._modules[name]

    def _resolve(self, module: str, name: str, attribute: str = "") -> Key | None:
        """The definition that a name in a module means; None for what is not ours."""
        here = self._module(module)
        if here.unit_of(name) is not None:
            return module, name
        if name in here.internals:
            source, wanted = here.internals[name]
            return self._resolve(source, wanted or attribute)
        return None

    def _take(self, unit: Unit) -> None:
        if id(unit) in self._taken:
            return
        self._taken[id(unit)] = unit
        if not isinstance(unit.node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)):
            self._fixed |= unit.names
        for effect in self._module(unit.module).units:
            if not effect.names:  # what a module does when it is loaded
                self._take(effect)
        for use in global_uses(unit.node):
            self._take_use(unit, use)
        for node in ast.walk(unit.node):
            for name in bound_names(node):
                if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(OURS):
                    raise UsageError(f"{unit.module} imports {name} inside a function, so it cannot be exported")

    def _take_use(self, unit: Unit, use: Use) -> None:
        key = self._resolve(unit.module, use.name, use.attribute)
        module = self._module(unit.module)
        if key is not None and not (use.annotation and not unit.is_kernel):
            wanted = self._module(key[0]).unit_of(key[1])
            assert wanted is not None
            self._take(wanted)
        elif use.name in module.externals and not (use.annotation and not unit.is_kernel):
            line = module.externals[use.name]
            if self._imports.setdefault(use.name, line) != line:
                raise UsageError(f"{use.name} means {line} in {unit.module} and {self._imports[use.name]} elsewhere")

    @cached_property
    def new_names(self) -> Mapping[Key, str]:
        """What each definition is called in the one text: its own name where nothing else has it."""
        wanted = [(unit.module, name) for unit in self._in_order() for name in sorted(unit.names)]
        count: dict[str, int] = {}
        for _, name in wanted:
            count[name] = count.get(name, 0) + 1
        local = {a.arg for u in self._taken.values() for a in ast.walk(u.node) if isinstance(a, ast.arg)}
        local |= {
            n.id for u in self._taken.values() for n in ast.walk(u.node)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and not isinstance(u.node, ast.Assign)
        }  # fmt: skip
        names: dict[Key, str] = {}
        for module, name in wanted:
            new = name
            if name not in self._fixed and (count[name] > 1 or name in self._reserved or name in self._imports):
                new = f"{module.rpartition('.')[2]}_{name.lstrip('_')}"
                while new in local or new in names.values() or new in count:
                    new += "_"
            names[module, name] = new
        return names

    def _in_order(self) -> Iterator[Unit]:
        for module in self._order:
            yield from (unit for unit in self._modules[module].units if id(unit) in self._taken)

    def text(self) -> str:
        """Imports, then the definitions by module in the order in which Python would load them."""
        parts = ["\n".join(sorted(set(self._imports.values()), key=lambda line: (not line.startswith("import"), line)))]
        before = ""
        for unit in self._in_order():
            if unit.module != before:
                parts.append(f"# ---- {unit.module.removeprefix(OURS)}")
                before = unit.module
            parts.append(self._written(unit))
        return "\n\n\n".join(parts) + "\n"

    def _written(self, unit: Unit) -> str:
        module = self._module(unit.module)
        first = min([unit.node.lineno, *(d.lineno for d in getattr(unit.node, "decorator_list", ()))])
        last = unit.node.end_lineno or first
        while first > 1 and module.lines[first - 2].startswith("#"):
            first -= 1
        edits = [edit for use in global_uses(unit.node) if (edit := self._renamed(unit, use))]
        edits += self._renamed_definition(unit)
        if not unit.is_kernel:
            edits += without_annotations(unit.node, module.lines)
        return apply_edits(module.lines, first, last, edits).rstrip("\n")

    def _renamed(self, unit: Unit, use: Use) -> Edit | None:
        if use.annotation and not unit.is_kernel:
            return None
        key = self._resolve(unit.module, use.name, use.attribute)
        if key is None:
            return None
        whole = use.attribute and self._module(unit.module).internals.get(use.name, ("", "-"))[1] == ""
        node = use.node if whole or isinstance(use.node, ast.Name) else use.node.value
        old = f"{use.name}.{use.attribute}" if whole else use.name
        new = self.new_names[key]
        if new == old:
            return None
        if use.quoted:
            raise UsageError(f"{unit.module} uses {old} in an f-string, where it cannot be renamed")
        return Edit.over(node, new)

    def _renamed_definition(self, unit: Unit) -> list[Edit]:
        edits = []
        for name in unit.names:
            new = self.new_names[unit.module, name]
            if new == name:
                continue
            if isinstance(unit.node, (ast.FunctionDef, ast.ClassDef)):
                line = self._module(unit.module).lines[unit.node.lineno - 1]
                start = line.index(name, len(line) - len(line.lstrip()) + len("def "))
                edits.append(Edit(unit.node.lineno, start, unit.node.lineno, start + len(name), new))
            else:
                targets = [n for n in ast.walk(unit.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
                edits += [Edit.over(target, new) for target in targets if target.id == name]
        return edits
