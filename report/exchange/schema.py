"""Solution, definition and trace files of SOL-ExecBench and FlashInfer-Bench: what they may hold."""

import ast
import sys
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, TypeAdapter, ValidationError, model_validator

from tilewright.errors import UsageError

Text = Annotated[str, StringConstraints(min_length=1)]
PYTHON_LANGUAGES = frozenset({"python", "pytorch", "triton"})
CALLS_NOT_ALLOWED = frozenset(
    {"autotune", "CUDAGraph", "graph", "make_graphed_callables", "Stream", "Thread", "load_inline", "load", "compile"}
)


class Model(BaseModel):
    """As the published readers: unknown keys are dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SourceFile(Model):
    """One file, by its path inside the solution's folder."""

    path: Text
    content: Text

    @model_validator(mode="after")
    def stays_inside(self) -> Self:
        parts = PurePosixPath(self.path.replace("\\", "/")).parts
        outside = ".." in parts or PurePosixPath(self.path).is_absolute() or bool(PureWindowsPath(self.path).drive)
        if outside or self.path.startswith(("\\", "~")) or not self.path.isprintable():
            raise ValueError(f"source path {self.path!r} leaves the solution's folder")
        return self


class Spec(Model):
    """How a solution is built and called; SOL-ExecBench has `languages`, FlashInfer-Bench one `language`."""

    languages: list[Text] = []
    language: Text | None = None
    target_hardware: list[Text]
    entry_point: Text
    dependencies: list[Text] = []
    destination_passing_style: bool = True
    binding: str | None = None

    @model_validator(mode="after")
    def is_callable(self) -> Self:
        if bool(self.languages) == bool(self.language):
            raise ValueError("either languages (SOL-ExecBench) or language (FlashInfer-Bench) must be given")
        path, separator, function = self.entry_point.partition("::")
        if not separator or "::" in function or not path.endswith(".py") or not function.isidentifier():
            raise ValueError(f"entry_point must be <file>.py::<function>, got {self.entry_point!r}")
        return self

    @property
    def all_languages(self) -> list[str]:
        return list(self.languages) or [str(self.language)]


class Solution(Model):
    """Code that solves one definition."""

    name: Text
    definition: Text
    author: Text
    description: str | None = None
    spec: Spec
    sources: list[SourceFile]

    @model_validator(mode="after")
    def has_its_entry(self) -> Self:
        paths = [source.path for source in self.sources]
        if len(set(paths)) != len(paths):
            raise ValueError("two sources have the same path")
        if self.entry_file not in paths:
            raise ValueError(f"entry file {self.entry_file!r} is not among the sources")
        return self

    @property
    def entry_file(self) -> str:
        return self.spec.entry_point.partition("::")[0]

    @property
    def entry_function(self) -> str:
        return self.spec.entry_point.partition("::")[2]


_SOLUTION = TypeAdapter(Solution)


def read_solution(text: str, shown: str) -> Solution:
    """A solution file of either dialect; UsageError names the file and the first thing that is wrong."""
    try:
        return _SOLUTION.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise UsageError(f"{shown} is no solution: {place}: {first['msg']}") from error


def check_solution(content: Any) -> None:
    """What we write must be what others read; raises UsageError."""
    try:
        _SOLUTION.validate_python(content)
    except ValidationError as error:
        raise UsageError(f"the solution would not be accepted: {error.errors()[0]['msg']}") from error


def complaints(source: str) -> list[str]:
    """What the benchmark's rules forbid in a text: other packages, autotuning, graphs, streams, threads, builds."""
    found = []
    allowed = {"torch", "triton", "__future__", *sys.stdlib_module_names} - {"threading", "subprocess", "ctypes"}
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "."]
        found += [f"imports {name}" for name in modules if name.partition(".")[0] not in allowed]
        called = node.func if isinstance(node, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in CALLS_NOT_ALLOWED and _of_torch_or_triton(called):
            found.append(f"calls {name}")
    return found


def _of_torch_or_triton(called: ast.expr | None) -> bool:
    """`torch.compile(...)` and bare names; a tensor descriptor's own `load` is another matter."""
    while isinstance(called, ast.Attribute):
        called = called.value
    return isinstance(called, ast.Name) and called.id in ("torch", "triton", "threading", *CALLS_NOT_ALLOWED)


Dialect = Literal["sol", "flashinfer"]
