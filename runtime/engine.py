"""Runs a plan on real tensors: finds it once for a case and device, then only launches. Knows no problem family."""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from triton.errors import TritonError

from tilewright.errors import NotWarmedUp
from tilewright.kernel_templates.base import allocate, run_kernel
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.inputs import pack
from tilewright.kernel_templates.plan import FusionPlan, left_behind
from tilewright.problem import WorkloadCase
from tilewright.runtime.log import warn_once
from tilewright.runtime.machine import Device, Machine, machine_of
from tilewright.runtime.memo import Memo
from tilewright.runtime.serving import Grade, lookup


class Launcher:
    """One case on one device. Intermediates come from torch's caching allocator on every call and are not kept, so
    that calls on side streams, from several threads and inside CUDA graphs never share them."""

    def __init__(self, case: WorkloadCase, machine: Machine, device: torch.device) -> None:
        self.case = case
        self.device = device
        self._machine = machine
        self._index = device.index if device.type == "cuda" else None
        self._lock = threading.Lock()
        self.ready = False  # every kernel is compiled and loaded
        self.found = lookup(case, machine)
        self.plan = self.found.plan
        self._use(self.plan)

    def _use(self, plan: FusionPlan) -> None:
        registry = load_family(self.case.problem.family).registry
        self.plan = plan
        self.leaves = left_behind(registry, plan, self.case)
        self._steps = [(registry[s.template].launch, s.values) for s in plan.stages]
        specs = self.case.problem.intermediates
        self._workspace = [(s.name, self.case.shape(s.name) or (), getattr(torch, s.dtype)) for s in specs]
        for stage in plan.stages:
            for name, scratch in registry[stage.template].scratch(stage.values, self.case).items():
                self._workspace.append((name, scratch.shape, scratch.dtype))

    def __call__(self, tensors: dict[str, Any]) -> None:
        """`tensors` holds the problem's inputs and outputs, checked; outputs are written in place, and so is an
        intermediate that the caller gives; `leaves` names those that then hold their final value."""
        if not self.ready:
            self._first(tensors)
        elif self._index is None or self._index == torch.cuda.current_device():
            self._launch(tensors)
        else:
            with torch.cuda.device(self._index):
                self._launch(tensors)

    def _launch(self, tensors: dict[str, Any]) -> None:
        device = self.device
        everything = dict(tensors)
        for name, shape, dtype in self._workspace:
            if name not in tensors:
                everything[name] = torch.empty(shape, dtype=dtype, device=device)
        for launch, values in self._steps:
            launch(everything, values, self.case, run_kernel)

    def _first(self, tensors: dict[str, Any]) -> None:
        """One thread compiles, the others wait. A tuned plan that cannot be built here gives way to the default."""
        if self._index is not None and torch.cuda.is_current_stream_capturing():
            raise NotWarmedUp(
                f"{self.case.name} was never run on {self.device}, and compiling would break the CUDA graph capture; "
                f"call tilewright.runtime.warmup([case]) or dispatch once before capturing"
            )
        with self._lock, torch.cuda.device(-1 if self._index is None else self._index):
            try:
                self._launch(tensors)
            except TritonError as error:
                if self.found.grade is Grade.DEFAULT:
                    raise
                warn_once(
                    ("unbuildable", self.plan.digest, self.case.key),
                    "plan %s of %s does not build on %s, the default plan runs: %s",
                    self.plan.label, self.case.name, self._machine.label, str(error).strip().splitlines()[0],
                )  # fmt: skip
                registry = load_family(self.case.problem.family).registry
                self._use(registry.default_plan(self.case, self._machine.limits))
                self._launch(tensors)
            self.ready = True


_launchers: Memo[tuple[str, torch.device], Launcher] = Memo()


def launcher_for(case: WorkloadCase, device: torch.device) -> Launcher:
    """The launcher of this case on this device, made on first use."""
    key = (case.key, device)
    return _launchers.get(key) or _launchers.keep(key, Launcher(case, machine_of(device), device))


def place_of(device: Device) -> torch.device:
    """Where tensors for this device live; the CPU for the interpreter."""
    if machine_of(device).environment.kind != "cuda":
        return torch.device("cpu")
    named = torch.device("cuda" if device is None or isinstance(device, Machine) or device == "auto" else device)
    return named if named.index is not None else torch.device("cuda", torch.cuda.current_device())


def empty_tensors(case: WorkloadCase, place: torch.device) -> dict[str, Any]:
    """Uninitialised inputs and outputs of the case and its scalars, weights packed where the case says so."""
    names = [spec.name for spec in (*case.problem.inputs, *case.problem.outputs) if spec.shape is not None]
    tensors: dict[str, Any] = {**case.problem.scalars, **allocate(case, names, place)}
    if case.weight_mode == "packed":
        for parts in case.problem.packings.values():
            pack(tensors, parts)
    return tensors


def warmup(cases: Iterable[WorkloadCase], device: Device = None) -> None:
    """Compiles and loads what these cases run: later calls only launch, and may be captured in a CUDA graph."""
    place = place_of(device)
    for case in cases:
        launcher_for(case, place)(empty_tensors(case, place))
