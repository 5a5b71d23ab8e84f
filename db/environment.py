"""Identity of the device and its software, as far as a measurement depends on it."""

import hashlib
import json
import re
from dataclasses import dataclass, fields

_GIB = 1 << 30


def normalised_gpu_name(name: str) -> str:
    """One spelling per model: `NVIDIA_H200` and ` NVIDIA  H200` are `NVIDIA H200`; `NVIDIA H200 NVL` is another."""
    return re.sub(r"[\s_]+", " ", name).strip()


def mig_slice(name: str) -> str:
    """The slice that a reported GPU name carries, such as 1g.18gb; empty for a whole card."""
    found = re.search(r"\bMIG (\S+)", name)
    return found.group(1) if found else ""


@dataclass(frozen=True)
class Environment:
    """Where a trial ran. The first block is its identity; the second is kept beside it."""

    kind: str  # cuda | interpret | replay
    gpu_name: str
    sm_count: int
    memory_bytes: int
    capability: str
    triton: str
    mig: str = ""

    torch: str = ""
    cuda: str = ""
    driver: str = ""
    ptxas: str = ""
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    peak_flops_per_s: float | None = None  # measured ceilings of this card
    peak_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpu_name", normalised_gpu_name(self.gpu_name))

    @property
    def identity(self) -> tuple[str, ...]:
        """What must be equal for a record to be served as exact."""
        return (
            self.kind, self.gpu_name, str(self.sm_count), str(round(self.memory_bytes / _GIB)),
            self.capability, self.mig, public_version(self.triton),
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """Content address of every field, clocks and ceilings excepted: they move between runs on one machine."""
        moving = {"sm_clock_mhz", "memory_clock_mhz", "peak_flops_per_s", "peak_bytes_per_s"}
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in moving}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def public_version(version: str) -> str:
    """Without the local build tag: `2.11.0+cu130` is `2.11.0`."""
    return version.partition("+")[0]
