"""Code from elsewhere as a candidate: one function that covers a whole chain, run only in the worker's process.

`install` is a hook of that process. From then on a plan of the one stage `outside_code` is verified, captured and timed
as every other plan is.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.kernel_templates.base import Limits, Run, Template, Tensors, Values
from tilewright.kernel_templates.families import FAMILIES, load_family
from tilewright.problem import WorkloadCase

NAME = "outside_code"


def install() -> None:
    """Adds the template to every family. What the code prints goes nowhere: it might steer a terminal."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    for family in FAMILIES:
        load_family(family).registry.add(TEMPLATE)


def is_asked_for(values: Values, case: WorkloadCase, limits: Limits) -> bool:
    """Code tuned for a list of shapes owes nothing at their neighbours."""
    return case.name in str(values["CASES"]).split()


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    """Inputs by position, then outputs; or the outputs are what it returns."""
    function = load(str(values["FOLDER"]), str(values["FILE"]), str(values["FUNCTION"]))
    inputs = [tensors[spec.name] for spec in case.problem.inputs]
    outputs = [tensors[spec.name] for spec in case.problem.outputs]
    if values["WRITES"]:
        function(*inputs, *outputs)
        return
    made = function(*inputs)
    made = made if isinstance(made, (tuple, list)) else (made,)
    if len(made) != len(outputs):
        raise ValueError(f"returns {len(made)} tensors, not {len(outputs)}")
    for target, source in zip(outputs, made, strict=True):
        if (source.shape, source.dtype) != (target.shape, target.dtype):
            raise ValueError(f"returns {source.dtype} {list(source.shape)}, not {target.dtype} {list(target.shape)}")
        target.copy_(source)


@cache
def load(folder: str, file: str, function: str) -> Callable[..., Any]:
    """Its neighbours are found behind every module that is installed, so that none of them can pose as one."""
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"tilewright_outside_{Path(file).stem}", Path(folder, file))
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, function)
    return found


TEMPLATE = Template(
    name=NAME,
    kind="library",
    covers=(),
    choices=lambda case, limits: (),
    constraints=(is_asked_for,),
    default=lambda case, limits: {},
    launch=launch,
    module=__name__,
)
