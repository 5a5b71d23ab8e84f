"""Templates that end, block or exhaust the process that launches them; `tilewright selftest` shows what that costs."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilewright.kernel_templates.base import Limits, Run, Template, Tensors, Values
from tilewright.problem import WorkloadCase


@triton.jit
def far_store_kernel(p_x, offset):
    tl.store(p_x + offset, 1.0)


@triton.jit
def endless_kernel(p_flag):
    """Waits for a flag that nobody sets."""
    b_flag = tl.atomic_add(p_flag, 0)
    while b_flag == 0:
        b_flag = tl.atomic_add(p_flag, 0)


@dataclass(frozen=True)
class Fault:
    """What is done, and the words that its outcome must have: a status, and a part of the reason."""

    name: str
    act: Callable[[torch.Tensor], object]
    status: str
    reason: str
    needs_gpu: bool = False


def _sleep(x: torch.Tensor) -> None:
    while True:
        time.sleep(0.05)


def _exit(x: torch.Tensor) -> None:
    raise SystemExit(0)


def _endless_kernel(x: torch.Tensor) -> None:
    endless_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=x.device))


FAULTS = (
    Fault("endless_launch", _sleep, "timeout", "compile limit"),
    Fault("abort", lambda x: os.abort(), "crashed", f"signal {int(signal.SIGABRT)}"),
    Fault("segfault", lambda x: ctypes.string_at(0), "crashed", f"signal {int(signal.SIGSEGV)}"),
    Fault("killed", lambda x: os.kill(os.getpid(), signal.SIGKILL), "crashed", f"signal {int(signal.SIGKILL)}"),
    Fault("exit", _exit, "crashed", "exit code 0"),
    Fault("out_of_memory", lambda x: torch.empty(1 << 50, device=x.device), "out_of_resources", "memory"),
    Fault("illegal_access", lambda x: far_store_kernel[(1,)](x, 1 << 40), "crashed", "", needs_gpu=True),
    Fault("endless_kernel", _endless_kernel, "timeout", "run limit", needs_gpu=True),
)


def template(fault: Fault, covers: tuple[str, ...], output: str) -> Template:
    """Covers these ops and writes nothing."""

    def launch(t: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
        fault.act(t[output])

    return Template(
        name=fault.name,
        kind="triton",
        covers=covers,
        choices=lambda case, limits: (),
        constraints=(),
        default=_no_values,
        launch=launch,
        module=__name__,
    )


def _no_values(case: WorkloadCase, limits: Limits) -> Values:
    return {}
