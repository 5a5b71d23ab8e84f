"""A case's plan captured in a CUDA graph of its own: a callable that replays it. Knows no problem family."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import NotWarmedUp, UsageError
from tilewright.problem import WorkloadCase
from tilewright.runtime.engine import Launcher, empty_tensors, launcher_for, place_of
from tilewright.runtime.machine import Device
from tilewright.runtime.tensors import is_plain


class Replay:
    """`replay()` runs the plan on the static inputs as they are now; `replay(name=tensor)` copies into them first.

    The result is the one static output (a dictionary of them where the problem has several): the next call overwrites
    it. Not for two threads at once. In the interpreter there is no graph: the same callable launches the plan.
    """

    def __init__(self, launcher: Launcher, tensors: dict[str, Any]) -> None:
        self.case = launcher.case
        self.device = launcher.device
        self._launcher = launcher
        self._tensors = tensors
        self._graph = _captured(launcher, tensors) if launcher.device.type == "cuda" else None
        outputs = [spec.name for spec in self.case.problem.outputs]
        self.output: Any = tensors[outputs[0]] if len(outputs) == 1 else {name: tensors[name] for name in outputs}
        self.inputs: Mapping[str, Tensor] = {
            spec.name: tensors[spec.name] for spec in self.case.problem.inputs if isinstance(tensors[spec.name], Tensor)
        }

    def __call__(self, **new: Tensor) -> Any:
        """Copies `new` into the static inputs, on the current stream, and replays; returns the static output."""
        for name, tensor in new.items():
            if name not in self.inputs:
                raise UsageError(f"{self.case.name} has no input {name!r}; it has {', '.join(self.inputs)}")
            if tensor.shape != self.inputs[name].shape:
                raise UsageError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(self.inputs[name].shape)}")
        with torch.no_grad():
            for name, tensor in new.items():
                self.inputs[name].copy_(tensor)
        if self._graph is None or torch.cuda.is_current_stream_capturing():
            self._launcher(self._tensors)  # in another's capture: the kernels become part of that graph
        else:
            with torch.cuda.device(self.device):
                self._graph.replay()
        return self.output


def capture(case: WorkloadCase, inputs: Mapping[str, Any] | None = None, *, device: Device = None) -> Replay:
    """Finds, compiles and captures the case's plan. `inputs` by name become its static inputs, uncopied; others are
    allocated, uninitialised, to be filled through `replay.inputs` or a call. Scalars may be given too.

    UsageError for an input that does not fit the case; NotWarmedUp while another graph is being captured.
    """
    place = place_of(device)
    if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotWarmedUp(
            f"capture({case.name}) was called while a CUDA graph is being captured, and graphs are not captured inside "
            f"others; call it before, or tilewright.runtime.warmup([case]) before and dispatch inside"
        )
    tensors = empty_tensors(case, place)
    for name, value in (inputs or {}).items():
        tensors[name] = _checked(case, name, value, place)
    return Replay(launcher_for(case, place), tensors)


def _checked(case: WorkloadCase, name: str, value: Any, place: torch.device) -> Any:
    specs = {spec.name: spec for spec in case.problem.inputs}
    if name not in specs:
        raise UsageError(f"{case.name} has no input {name!r}; it has {', '.join(specs)}")
    if name in case.problem.scalars:
        return float(value)
    shape, dtype = case.shape(name), getattr(torch, specs[name].dtype)
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype or value.device != place:
        found = f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise UsageError(f"{name} must be a tensor {shape} {dtype} on {place}, got {found}")
    if not is_plain(value):
        raise UsageError(f"{name} must be contiguous and 16-byte aligned to be a static input; pass a copy")
    return value.detach()


def _captured(launcher: Launcher, tensors: dict[str, Any]) -> torch.cuda.CUDAGraph:
    """Launched once before, on a stream of its own, so that compiling and library workspaces lie outside the graph."""
    with torch.cuda.device(launcher.device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launcher(tensors)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread that allocates meanwhile is no part of this capture and must not break it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launcher(tensors)
    return graph
