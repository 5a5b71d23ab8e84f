"""A problem of one op whose template does what its config says: right, wrong, or something that ends a process.

Children import it by the hook `faulty:register`; `faulty:lying_timer` replaces the timer by one that says what the
config says, `faulty:compile_faults` makes compiling do what a launch would.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.kernel_templates import compile
from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Value, Values
from tilewright.kernel_templates.families import Family, register_family
from tilewright.kernel_templates.plan import FusionPlan, Registry, Stage
from tilewright.problem import Op, Problem, TensorSpec, WorkloadCase
from tilewright.search import measure

HOOK = "faulty:register"
COMPILE_FAULTS = "faulty:compile_faults"
LYING_TIMER = "faulty:lying_timer"
TIMES: Mapping[str, Any] = {
    "nan_time": float("nan"),
    "none_time": None,
    "zero_time": 0.0,
    "negative_time": -3.0,
    "infinite_time": float("inf"),
}
WRONG = ("writes_input", "wrong_and_writes_input", "wrong", "nan", "overrun", "half")
FAULTS = (
    "late", "endless", "abort", "segfault", "exit", "killed", "out_of_memory", "raises", "abort_when_timed",
    *WRONG, *TIMES,
)  # fmt: skip
SHAPE = ("n", "8")
PROBLEM = Problem(
    name="doubling",
    family="faulty",
    description="y = 2 x",
    variable_axes=("n",),
    constants={},
    derived={},
    inputs=(TensorSpec("x", SHAPE, "float32"),),
    outputs=(TensorSpec("y", SHAPE, "float32"),),
    intermediates=(),
    ops=(Op("double", ("x",), ("y",), "8 * n"),),
    packings={},
    abbreviations={"n": "n"},
    scalars={},
    draws={},
    reference="",
)
CALLS: list[str] = []  # faults launched by this process, oldest first


def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    x, y, fault = tensors["x"], tensors["y"], str(values["FAULT"])
    CALLS.append(fault)
    act = ACTS.get(fault)
    torch.mul(x, 2, out=y)
    if act is not None:
        act(x, y)


def _endless(x: torch.Tensor, y: torch.Tensor) -> None:
    while True:
        time.sleep(0.05)


def _exit(x: torch.Tensor, y: torch.Tensor) -> None:
    raise SystemExit(0)


def _out_of_memory(x: torch.Tensor, y: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _raises(x: torch.Tensor, y: torch.Tensor) -> None:
    raise ValueError("injected")


def _abort_when_timed(x: torch.Tensor, y: torch.Tensor) -> None:
    """Right as long as it is checked, gone in the rounds of a final."""
    if CALLS.count("abort_when_timed") > 6:
        os.abort()


def _wrong_and_writes_input(x: torch.Tensor, y: torch.Tensor) -> None:
    y.add_(1)
    x.mul_(-1)


def _overrun(x: torch.Tensor, y: torch.Tensor) -> None:
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(1.0)


ACTS: Mapping[str, Any] = {
    "endless": _endless,
    "abort": lambda x, y: os.abort(),
    "segfault": lambda x, y: ctypes.string_at(0),
    "exit": _exit,
    "killed": lambda x, y: os.kill(os.getpid(), signal.SIGKILL),
    "out_of_memory": _out_of_memory,
    "raises": _raises,
    "abort_when_timed": _abort_when_timed,
    "writes_input": lambda x, y: x.mul_(-1),
    "wrong_and_writes_input": _wrong_and_writes_input,
    "wrong": lambda x, y: y.add_(1),
    "nan": lambda x, y: y.fill_(float("nan")),
    "overrun": _overrun,
    "half": lambda x, y: y[1::2].fill_(float("nan")),
}


def choices(case: WorkloadCase, limits: Limits) -> tuple[Choice, ...]:
    """At one row nothing is right, at two some times are none."""
    few = {1: ("raises", "wrong", "nan_time"), 2: ("none", "late", "nan_time", "none_time", "zero_time")}
    return (Choice("FAULT", few.get(case["n"], ("none", *FAULTS))),)


def default(case: WorkloadCase, limits: Limits) -> Mapping[str, Value]:
    return {"FAULT": choices(case, limits)[0].values[0]}


FAMILY = Family(
    Registry(
        [
            Template(
                name="doubler",
                kind="triton",
                covers=("double",),
                choices=choices,
                constraints=(),
                default=default,
                launch=launch,
                module=__name__,
            )
        ]
    ),
    ops={"double": lambda t, case: {"y": t["x"] * 2}},
    baselines={},
)


def register() -> None:
    register_family("faulty", "faulty")


def lying_timer() -> None:
    """Says what the candidate's name asks for, and 10 us for all others."""
    register()
    measure.make_timer = lambda device, options: LyingTimer()


class LyingTimer(measure.HostTimer):
    def sample(self, batch: Any) -> list[float]:
        return [self._lie(each) for each in batch]

    def _lie(self, each: Any) -> Any:
        super().sample([each])
        return TIMES.get(CALLS[-1], 10.0)


def compile_faults() -> None:
    register()
    compile.compile_stage = _compile_stage


def _compile_stage(template: Template, values: Values, case: WorkloadCase, limits: Limits) -> list[Any]:
    fault = str(values["FAULT"])
    if fault == "endless":
        subprocess.Popen(
            ["sleep", "30"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # as the assembler that Triton calls
    if fault in ACTS:
        ACTS[fault](torch.zeros(2), torch.zeros(2))
    return []


def a_case(n: int = 16) -> WorkloadCase:
    return PROBLEM.case(n=n)


def stage(fault: str = "none") -> Stage:
    return Stage("doubler", {"FAULT": fault})


def plan(fault: str = "none") -> FusionPlan:
    return FusionPlan((stage(fault),))
