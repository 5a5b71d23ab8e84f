"""Facts about the device in front of us, read from torch and Triton alone."""

from dataclasses import dataclass

import torch
import triton

from tilewright.errors import MachineUnfit
from tilewright.kernel_templates.base import Limits


@dataclass(frozen=True)
class DeviceFacts:
    """What identifies a device and its software; sizes in bytes."""

    kind: str  # cuda | interpret
    gpu_name: str
    sm_count: int
    memory_bytes: int
    capability: str  # "9.0"
    triton: str
    torch: str
    cuda: str


def triton_version() -> tuple[int, int]:
    major, minor = triton.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def cuda_facts(index: int = 0) -> DeviceFacts:
    """Raises MachineUnfit where there is no such GPU."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise MachineUnfit(f"no CUDA device {index} here ({torch.cuda.device_count()} visible); try --device interpret")
    p = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        "cuda", p.name, p.multi_processor_count, p.total_memory, f"{p.major}.{p.minor}",
        triton.__version__, torch.__version__, torch.version.cuda or "",
    )  # fmt: skip


def interpreter_facts() -> DeviceFacts:
    """Triton's interpreter as a device of its own: its times are no measurements."""
    return DeviceFacts("interpret", "Triton interpreter", 1, 0, "0.0", triton.__version__, torch.__version__, "")


def cuda_limits(index: int = 0) -> Limits:
    p = torch.cuda.get_device_properties(index)
    return Limits(
        kind="cuda",
        capability=p.major * 10 + p.minor,
        shared_memory_bytes=p.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        sm_count=p.multi_processor_count,
        registers_per_sm=p.regs_per_multiprocessor,  # type: ignore[attr-defined]
        triton=triton_version(),
    )


# Opt-in shared memory per block by compute capability, from the CUDA programming guide's table of limits.
SHARED_MEMORY_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


def named_limits(capability: int, sm_count: int) -> Limits:
    """Limits of a card that is not here, for compiling ahead."""
    return Limits("cuda", capability, SHARED_MEMORY_BYTES[capability], sm_count, triton=triton_version())


INTERPRETER_LIMITS = Limits("interpret", 0, 227 * 1024, 1, triton=triton_version())
