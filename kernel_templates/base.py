"""What a template is: the ops it covers, its choices, constraints, default, and one launch function.

A template knows nothing of search or storage. `launch` is written once over named tensors and serves three
callers: real tensors with `run_kernel` (run), meta tensors with a `Compiler` from compile.py (compile without
a GPU), and the interpreter.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any, Protocol

import torch

from tilewright.errors import UsageError
from tilewright.problem import WorkloadCase

Value = int | bool | str
Values = Mapping[str, Value]
Tensors = Mapping[str, Any]  # name -> torch.Tensor, or float for a scalar input


@dataclass(frozen=True)
class Limits:
    """What a device allows; `kind` is cuda or interpret."""

    kind: str
    capability: int  # 80, 90, 100, 120; 0 for the interpreter
    shared_memory_bytes: int  # per block, opt-in maximum
    sm_count: int
    registers_per_sm: int = 65536
    triton: tuple[int, int] = (3, 6)

    @property
    def has_tma(self) -> bool:
        """Tensor descriptors: in hardware from Hopper on; the interpreter models them."""
        return self.capability >= 90 or self.kind == "interpret"


@dataclass(frozen=True)
class Choice:
    """One parameter and the values that the search may give it."""

    name: str
    values: tuple[Value, ...]


class Constraint(Protocol):
    """True when the config may run; the function's name is the rejection reason shown to users."""

    __name__: str

    def __call__(self, values: Values, case: WorkloadCase, limits: Limits, /) -> bool: ...


class Run(Protocol):
    """Launches one Triton kernel: `run(kernel, grid, *args, **constexprs_and_options)`."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> Any: ...


def run_kernel(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> Any:
    """The ordinary launcher."""
    return kernel[grid](*args, **options)


class Launch(Protocol):
    def __call__(self, tensors: Tensors, values: Values, case: WorkloadCase, run: Run, /) -> None: ...


@dataclass(frozen=True)
class Scratch:
    """Device memory that a template needs beside its tensors; contents are undefined on entry."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def no_scratch(values: Values, case: WorkloadCase) -> Mapping[str, Scratch]:
    return {}


@dataclass(frozen=True)
class Template:
    """A parameterised implementation of the consecutive ops `covers`; `optional` ones may be absent from the chain."""

    name: str
    kind: str  # triton | library
    covers: tuple[str, ...]
    choices: Callable[[WorkloadCase, Limits], tuple[Choice, ...]]
    constraints: tuple[Constraint, ...]
    default: Callable[[WorkloadCase, Limits], Values]
    launch: Launch
    optional: tuple[str, ...] = ()
    scratch: Callable[[Values, WorkloadCase], Mapping[str, Scratch]] = no_scratch
    module: str = ""
    helpers: tuple[str, ...] = ()  # modules whose source is part of the identity

    def segment(self, ops: tuple[str, ...]) -> tuple[str, ...]:
        """The ops of this chain that the template covers."""
        return tuple(op for op in self.covers if op in ops or op not in self.optional)

    def rejection(self, values: Values, case: WorkloadCase, limits: Limits) -> str | None:
        """Name of the first constraint that the config breaks; None when it may run."""
        for constraint in self.constraints:
            if not constraint(values, case, limits):
                return constraint.__name__
        return None

    def check_values(self, values: Values, case: WorkloadCase, limits: Limits) -> None:
        """Raises UsageError naming the parameter that is missing, unknown, or not among its choices."""
        choices = {choice.name: choice.values for choice in self.choices(case, limits)}
        for name in values:
            if name not in choices:
                raise UsageError(f"{self.name} has no parameter {name!r}; it has {', '.join(choices) or 'none'}")
        for name, accepted in choices.items():
            if name not in values:
                raise UsageError(f"{self.name}: parameter {name} is missing; accepted: {list(accepted)}")
            if not any(values[name] == value and type(values[name]) is type(value) for value in accepted):
                raise UsageError(f"{self.name}: {name}={values[name]!r} is not among {list(accepted)}")

    def every_config(self, case: WorkloadCase, limits: Limits) -> Iterator[Values]:
        """The raw space, valid or not, in lexical order of the choices."""
        choices = self.choices(case, limits)
        for combination in product(*(choice.values for choice in choices)):
            yield {choice.name: value for choice, value in zip(choices, combination, strict=True)}

    def valid_configs(self, case: WorkloadCase, limits: Limits) -> list[Values]:
        return [values for values in self.every_config(case, limits) if self.rejection(values, case, limits) is None]

    @property
    def source_hash(self) -> str:
        """Digest of the template's module and of the helpers it uses; changes with any byte of them."""
        return _source_hash((self.module, *self.helpers))


_HASHES: dict[tuple[str, ...], str] = {}


def _source_hash(modules: tuple[str, ...]) -> str:
    if modules not in _HASHES:
        digest = hashlib.sha256()
        for name in modules:
            digest.update(inspect.getsource(_module(name)).encode())
        _HASHES[modules] = digest.hexdigest()[:12]
    return _HASHES[modules]


def _module(name: str) -> ModuleType:
    return sys.modules[name]


def allocate(case: WorkloadCase, names: Iterable[str], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of the case's shapes and dtypes."""
    specs = case.problem.tensors
    return {
        name: torch.empty(case.shape(name) or (), dtype=getattr(torch, specs[name].dtype), device=device)
        for name in names
    }
