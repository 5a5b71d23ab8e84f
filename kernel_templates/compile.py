"""Compiles what a plan launches for any target, without a GPU and without a CUDA context.

A stub driver tells Triton which card to compile for; meta tensors stand for real ones. The kernels land in Triton's
own cache under the keys that a launch on the real card looks up, so compiling ahead in other processes pays.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewright.kernel_templates.base import Limits, Template, allocate
from tilewright.problem import WorkloadCase


class _StubDriver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Within it, Triton compiles for this capability; afterwards its driver is as before."""
    config = triton.runtime.driver
    before = config._active
    config.set_active(_StubDriver(capability))
    try:
        yield
    finally:
        config._active = before


@dataclass(frozen=True)
class CompiledKernel:
    """What is known of a kernel before any GPU sees it."""

    name: str
    shared_memory_bytes: int
    num_warps: int
    cubin: bytes


@dataclass
class Compiler:
    """A `Run` that compiles instead of launching, and keeps what it compiled."""

    kernels: list[CompiledKernel] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> Any:
        compiled = kernel.warmup(*args, grid=grid, **options)
        metadata = compiled.metadata
        self.kernels.append(
            CompiledKernel(metadata.name, metadata.shared, metadata.num_warps, compiled.asm.get("cubin", b""))
        )
        return compiled


def compile_stage(template: Template, values: Any, case: WorkloadCase, limits: Limits) -> list[CompiledKernel]:
    """Compiles every kernel that the stage launches at this case; nothing for library templates."""
    if template.kind == "library" or limits.kind != "cuda":
        return []
    compiler = Compiler()
    tensors: dict[str, Any] = dict(case.problem.scalars)
    names = [spec.name for spec in case.problem.tensors.values() if spec.shape is not None]
    tensors |= allocate(case, names, "meta")
    for name, scratch in template.scratch(values, case).items():
        tensors[name] = torch.empty(scratch.shape, dtype=scratch.dtype, device="meta")
    with compiling_for(limits.capability):
        template.launch(tensors, values, case, compiler)
    return compiler.kernels
