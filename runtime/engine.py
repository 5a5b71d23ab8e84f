"""Runs a plan on real tensors: finds it once for a case and device, then only launches. Knows no problem family."""

import threading
from collections.abc import Iterable
from typing import Any

import torch

from tilewright.errors import NotWarmedUp, TilewrightError
from tilewright.kernel_templates.base import allocate, run_kernel
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.inputs import pack
from tilewright.kernel_templates.plan import left_behind
from tilewright.problem import WorkloadCase
from tilewright.runtime import quarantine
from tilewright.runtime.check import complaint_against
from tilewright.runtime.log import warn_once
from tilewright.runtime.machine import Device, Machine, machine_of
from tilewright.runtime.memo import Memo
from tilewright.runtime.quarantine import Failed
from tilewright.runtime.serving import Grade, Lookup, lookup, lookup_again
from tilewright.runtime.trace import counter_for


class WrongOutput(Exception):
    """A plan that was to be checked failed the check."""


class Unchecked(Exception):
    """A plan could not be checked, so that nothing is known of it."""


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
        self._use(lookup(case, machine))

    def _use(self, found: Lookup) -> None:
        self.found = found
        recorded = found.grade in (Grade.EXACT, Grade.COMPATIBLE)
        self._counter = None if recorded else counter_for(self.case, found.grade)
        self.plan = plan = found.plan
        registry = load_family(self.case.problem.family).registry
        self.leaves = left_behind(registry, plan, self.case)
        self._steps = [(registry[s.template].launch, s.values) for s in plan.stages]
        problem = self.case.problem
        specs = problem.intermediates
        self._output, self._dtype = problem.outputs[0].name, getattr(torch, problem.dtype)
        workspace = [(s.name, self.case.shape(s.name) or (), getattr(torch, s.dtype)) for s in specs]
        for stage in plan.stages:
            for name, scratch in registry[stage.template].scratch(stage.values, self.case).items():
                workspace.append((name, tuple(scratch.shape), scratch.dtype))
        # new_empty takes sizes one by one, but none at all only as an empty tuple.
        self._workspace = [(name, shape or ((),), dtype) for name, shape, dtype in workspace]

    def __call__(self, tensors: dict[str, Any]) -> None:
        """`tensors` holds the problem's inputs and outputs, checked; outputs are written in place, and so is an
        intermediate that the caller gives; `leaves` names those that then hold their final value."""
        if self._counter is not None:
            self._counter.calls += 1
        if not self.ready:
            self._first(tensors)
        elif self._index is None or self._index == torch.cuda.current_device():
            self._launch(tensors)
        else:
            with torch.cuda.device(self._index):
                self._launch(tensors)

    def _launch(self, tensors: dict[str, Any]) -> None:
        everything = dict(tensors)
        # The cheapest ways to ask: a method instead of torch.empty, sizes one by one, a dtype only where it differs.
        new_empty, own = tensors[self._output].new_empty, self._dtype
        for name, shape, dtype in self._workspace:
            if name not in tensors:
                everything[name] = new_empty(*shape) if dtype is own else new_empty(*shape, dtype=dtype)
        for launch, values in self._steps:
            launch(everything, values, self.case, run_kernel)

    def _first(self, tensors: dict[str, Any]) -> None:
        """One thread compiles, the others wait. A plan that fails here gives way to the next best, at last to the
        default; a failure of that one, a wrong call and a lack of memory are the caller's to see."""
        if self._index is not None and torch.cuda.is_current_stream_capturing():
            raise NotWarmedUp(
                f"{self.case.name} was never run on {self.device}, and compiling would break the CUDA graph capture; "
                f"call tilewright.runtime.warmup([case]) or dispatch once before capturing"
            )
        with self._lock, torch.cuda.device(-1 if self._index is None else self._index):
            if self.ready:
                self._launch(tensors)
                return
            blamed: list[tuple[Failed, str]] = []
            while not self._runs(tensors, blamed):
                pass
            for failed, reason in blamed:  # another plan runs, so that it was not the machine
                quarantine.put(failed, reason)
            self.ready = True

    def _runs(self, tensors: dict[str, Any], blamed: list[tuple[Failed, str]]) -> bool:
        """Checks, launches and waits for the plan in hand; one that fails is held back, and the next best in hand."""
        try:
            self._prove()
            self._launch(tensors)
            self._wait()
            return True
        except (TilewrightError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a plan does: it is recorded, and another serves
            if self.found.grade is Grade.DEFAULT:
                raise
            self._give_way(error, blamed)
            return False

    def _prove(self) -> None:
        """A plan from another compiler or source is checked before it touches the caller's tensors."""
        if self.found.grade is not Grade.STALE:
            return
        family = load_family(self.case.problem.family)
        try:
            complaint = complaint_against(self.plan, self.case, family, self.device)
        except torch.OutOfMemoryError as error:
            raise Unchecked("there is not enough memory to check it") from error
        if complaint:
            raise WrongOutput(complaint)

    def _wait(self) -> None:
        """A fault on the device shows only when somebody waits for it: here, while it is known whose it is."""
        if self._index is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def _give_way(self, error: Exception, blamed: list[tuple[Failed, str]]) -> None:
        """Holds the plan in hand back from this process, and takes the next best."""
        found, registry = self.found, load_family(self.case.problem.family).registry
        assert found.record is not None
        row, label = found.record.record, self._machine.label
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        warn_once(
            ("obstacle", found.source, row.case_key, row.digest),
            "plan %s of %s (%s, from %s) fails on %s and is not used any more: %s",
            found.plan.label, self.case.name, found.grade, found.source, label, reason,
        )  # fmt: skip
        failed = Failed.of(self.case, found.plan, registry, self._machine.environment)
        quarantine.hold(failed, reason)
        if not isinstance(error, Unchecked | OSError | MemoryError):
            blamed.append((failed, reason))
        try:
            self._wait()
        except RuntimeError:  # the device's context is lost: nothing can run in this process any more
            quarantine.put(failed, reason)
            raise error from None
        self._use(lookup_again(self.case, self._machine))


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
