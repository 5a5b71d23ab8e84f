"""The problem families that have templates: an explicit list, loaded on first use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Tensors
from tilewright.kernel_templates.plan import Registry
from tilewright.kernel_templates.reference import ReferenceOps
from tilewright.problem import WorkloadCase

FAMILIES = {"gqa_attention": "tilewright.kernel_templates.gqa_attention"}

# Builds what a user would run instead: a function of the problem's inputs that writes its outputs in place.
Baseline = Callable[[WorkloadCase], Callable[[Tensors], None]]


@dataclass(frozen=True)
class Family:
    """Templates, oracle ops and baselines of one kind of problem; a final runs against `final_baselines`."""

    registry: Registry
    ops: ReferenceOps
    baselines: Mapping[str, Baseline]
    final_baselines: tuple[str, ...] = ()


def register_family(name: str, module: str) -> None:
    """Adds a family from a module that holds FAMILY, in this process alone: for templates that live elsewhere."""
    FAMILIES[name] = module
    load_family.cache_clear()


@cache
def load_family(name: str) -> Family:
    """Raises UsageError for a family that has no templates."""
    if name not in FAMILIES:
        raise UsageError(f"problem family {name!r} has no templates; known: {', '.join(FAMILIES)}")
    module = import_module(FAMILIES[name])
    family = module.FAMILY
    assert isinstance(family, Family)
    return family


def seeded_module(name: str) -> str:
    """The module of a family's seeded faults: SEEDED, CONTROLS, plan_with, and the hook `register`."""
    load_family(name)
    return f"{FAMILIES[name]}.seeded_wrong"
