"""How a record's environment compares with the machine in front of us, told without loading torch."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from tilewright.db.environment import Environment, normalised_gpu_name, public_version

EXACT, STALE, FOREIGN = "exact", "stale", "foreign"  # as the runtime grades them, templates' sources aside


@dataclass(frozen=True)
class Here:
    """The first GPU and the compiler beside it."""

    gpu_name: str
    capability: str
    triton: str


@cache
def this_machine() -> Here | None:
    """None where there is no NVIDIA GPU, or no driver that tells of one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    text = name.decode() if isinstance(name, bytes) else name
    return Here(normalised_gpu_name(text), f"{major}.{minor}", public_version(triton))


def match(environment: Environment, here: Here | None) -> str:
    """exact; stale where only Triton differs; foreign on another card, or without one."""
    if here is None or environment.kind != "cuda":
        return FOREIGN
    if (environment.gpu_name, environment.capability) != (here.gpu_name, here.capability):
        return FOREIGN
    return EXACT if public_version(environment.triton) == here.triton else STALE
