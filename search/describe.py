"""The device in the worker's hands: identity, limits, clocks, ceilings, and what disturbs it. Imports torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml
import torch

from tilewright.db.environment import Environment, mig_slice
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, cuda_facts, cuda_limits, interpreter_facts
from tilewright.problem import Ceilings

MATMUL = 8192
COPY_BYTES = 2 << 30
# Reasons that make a time doubtful. A power cap is the normal state of a card under load and is not among them.
DISTURBING = {
    "SwThermalSlowdown": "software thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwSlowdown": "hardware slowdown",
    "HwPowerBrakeSlowdown": "power brake",
}


@dataclass(frozen=True)
class Described:
    """Answer to `describe`; ceilings are None where times are no measurements."""

    environment: Environment
    limits: Limits
    ceilings: Ceilings | None


def describe(name: str) -> Described:
    """`name` is interpret or cuda:N; raises MachineUnfit where there is no such device."""
    if name == "interpret":
        facts = interpreter_facts()
        environment = Environment(
            facts.kind,
            facts.gpu_name,
            facts.sm_count,
            facts.memory_bytes,
            facts.capability,
            facts.triton,
            torch=facts.torch,
        )
        return Described(environment, INTERPRETER_LIMITS, None)
    index = torch.device(name).index or 0
    facts = cuda_facts(index)
    ceilings = measure_ceilings(torch.device(name))
    environment = Environment(
        kind=facts.kind,
        gpu_name=facts.gpu_name,
        sm_count=facts.sm_count,
        memory_bytes=facts.memory_bytes,
        capability=facts.capability,
        triton=facts.triton,
        mig=mig_slice(facts.gpu_name),
        torch=facts.torch,
        cuda=facts.cuda,
        peak_flops_per_s=ceilings.flops_per_s,
        peak_bytes_per_s=ceilings.bytes_per_s,
        **_nvml_facts(torch.device(name)),
    )
    return Described(environment, cuda_limits(index), ceilings)


def measure_ceilings(device: torch.device) -> Ceilings:
    """A large matrix product on random data, and a large copy counted as read and written; best of five medians."""
    size = MATMUL if torch.cuda.mem_get_info(device)[0] > 8 << 30 else MATMUL // 2
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    seconds = _median_s(lambda: torch.mm(a, b, out=out), device)
    count = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device)
    return Ceilings(2 * size**3 / seconds, 2 * count / copy_s)


def _median_s(action: Callable[[], object], device: torch.device, count: int = 10) -> float:
    for _ in range(3):
        action()
    times: list[float] = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times)[count // 2]


def _nvml_facts(device: torch.device) -> dict[str, Any]:
    """Driver, clocks and power limit; what NVML does not tell is left out."""
    try:
        pynvml.nvmlInit()
        handle = _handle(device)
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
    except pynvml.NVMLError:
        return {}


def noise(device: torch.device) -> str:
    """Why a measurement made just now is doubtful; empty when nothing says so."""
    if device.type != "cuda":
        return ""
    try:
        pynvml.nvmlInit()
        handle = _handle(device)
        found = _throttle_reasons(handle)
        others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1
    except pynvml.NVMLError:
        return ""
    if others > 0:
        found.append(f"{others} other processes on the GPU")
    return ", ".join(found)


def _throttle_reasons(handle: Any) -> list[str]:
    active = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    found = []
    for name, text in DISTURBING.items():
        flag = getattr(pynvml, f"nvmlClocksEventReason{name}", None) or getattr(
            pynvml, f"nvmlClocksThrottleReason{name}", 0
        )
        if active & flag:
            found.append(text)
    return found


def _handle(device: torch.device) -> Any:
    """By UUID: CUDA and NVML may number the cards differently."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
