"""The device that a call runs on, as an environment to look records up by and as limits to check plans against."""

from dataclasses import dataclass
from functools import cache

import torch

from tilewright.db.environment import Environment, mig_slice
from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.device import (
    INTERPRETER_LIMITS,
    DeviceFacts,
    cuda_facts,
    cuda_limits,
    interpreter_facts,
)
from tilewright.runtime.memo import Memo


@dataclass(frozen=True, eq=False)
class Machine:
    """Compared by identity: one object a device, so that it is a cheap key."""

    environment: Environment
    limits: Limits

    @property
    def label(self) -> str:
        return f"{self.environment.gpu_name} (Triton {self.environment.triton})"


Device = str | torch.device | Machine | None

_machines: Memo[tuple[str, int], Machine] = Memo()


def machine_of(device: Device = None) -> Machine:
    """`cuda`, `cuda:N`, a torch device, `interpret` (also for `cpu`), or None for the GPU if there is one."""
    if isinstance(device, Machine):
        return device
    key = _resolve(device)
    return _machines.get(key) or _machines.keep(key, _describe(*key))


@cache
def _has_cuda() -> bool:
    """Asked once: it counts devices every time, for microseconds."""
    return torch.cuda.is_available()


def _resolve(device: str | torch.device | None) -> tuple[str, int]:
    if device is None or device == "auto":
        return ("cuda", torch.cuda.current_device()) if _has_cuda() else ("interpret", 0)
    kind, _, index = str(device).partition(":")
    if kind in ("interpret", "cpu"):
        return "interpret", 0
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"device must be auto, cuda, cuda:N, interpret or cpu, got {str(device)!r}")
    return "cuda", int(index) if index else _current_cuda_index()


def _current_cuda_index() -> int:
    return torch.cuda.current_device() if _has_cuda() else 0


def _describe(kind: str, index: int) -> Machine:
    if kind == "interpret":
        return Machine(environment_of(interpreter_facts()), INTERPRETER_LIMITS)
    return Machine(environment_of(cuda_facts(index)), cuda_limits(index))


def environment_of(facts: DeviceFacts) -> Environment:
    """Without driver and clocks, which need NVML: serving does not load it, and empty fields are not compared."""
    return Environment(
        kind=facts.kind,
        gpu_name=facts.gpu_name,
        sm_count=facts.sm_count,
        memory_bytes=facts.memory_bytes,
        capability=facts.capability,
        triton=facts.triton,
        mig=mig_slice(facts.gpu_name),
        torch=facts.torch,
        cuda=facts.cuda,
    )
