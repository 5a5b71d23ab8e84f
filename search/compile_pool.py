"""Processes that compile ahead of the device; a bad compile costs itself: its process is replaced, the others go on."""

import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from statistics import quantiles
from types import TracebackType
from typing import Any, Self

from tilewright.db.rows import Status
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import WorkloadCase
from tilewright.search.context import Compiled
from tilewright.search.outcome import Facts
from tilewright.search.processes import end_tree, how_it_ended, settle, start

READY, BEGUN = "ready", "begun"
START_LIMIT_S = 180.0  # of a process until it can compile; no candidate pays for it
FIRST_LIMIT_S, LEAST_LIMIT_S, LEARNED_FROM = 60.0, 15.0, 20


@dataclass
class CompileLimit:
    """Seconds that one compile may take: 60, and after 20 compiles their 90 % quantile, but never under 15."""

    seconds: list[float] = field(default_factory=list)

    @property
    def limit_s(self) -> float:
        if len(self.seconds) < LEARNED_FROM:
            return FIRST_LIMIT_S
        return min(FIRST_LIMIT_S, max(LEAST_LIMIT_S, quantiles(self.seconds[:LEARNED_FROM], n=10)[-1]))


@dataclass(frozen=True)
class Job:
    """One stage to compile at one case."""

    key: str
    stage: Stage
    case: WorkloadCase


@dataclass
class _Child:
    process: BaseProcess
    connection: Connection
    begun_s: float
    job: Job | None = None
    ready: bool = False
    begun: bool = False  # it has read its job


class PooledCompiler:
    """Compiles stages of one family for one device; answers are kept by stage and case."""

    def __init__(
        self,
        family: str,
        limits: Limits,
        *,
        processes: int,
        hooks: tuple[str, ...] = (),
        limit: CompileLimit | None = None,
    ) -> None:
        self._arguments = (family, limits, hooks, os.getpid())
        self._processes = processes
        self._limit = limit or CompileLimit()
        self._waiting: deque[Job] = deque()
        self._known: set[str] = set()
        self._answers: dict[str, Compiled] = {}
        self._children: list[_Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, stage: Stage, case: WorkloadCase) -> None:
        """Queues the stage unless it is queued or answered already."""
        job = Job(f"{stage.digest}@{case.key}", stage, case)
        if job.key not in self._known:
            self._known.add(job.key)
            self._waiting.append(job)
            self._pump(0)

    def result(self, stage: Stage, case: WorkloadCase) -> Compiled:
        """Waits for one stage that was submitted."""
        self.submit(stage, case)
        key = f"{stage.digest}@{case.key}"
        while key not in self._answers:
            self._pump(0.2)
        return self._answers[key]

    def close(self) -> None:
        for child in tuple(self._children):
            self._end(child)

    def _pump(self, patience_s: float) -> None:
        """Hands out work, takes in answers, ends what is over its limit; waits at most `patience_s`."""
        self._hand_out()
        busy = [child for child in self._children if child.job is not None]
        ready: Sequence[Any] = wait([child.connection for child in busy], patience_s) if busy else []
        for child in busy:
            limit_s = self._limit.limit_s if child.ready else START_LIMIT_S
            if child.connection in ready:
                self._take(child)
            elif time.monotonic() - child.begun_s > limit_s:
                word = "compile" if child.ready else "compiler's start"
                self._replace(child, Compiled(Status.TIMEOUT, f"{word} limit {limit_s:g} s"))
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            child = next((c for c in self._children if c.job is None), None)
            if child is None and len(self._children) < self._processes:
                child = self._spawn()
            if child is None:
                return
            try:
                child.connection.send((self._waiting[0].stage, self._waiting[0].case))
            except OSError:  # it was killed while it had nothing to do: another takes the job
                self._end(child)
                continue
            child.job, child.begun, child.begun_s = self._waiting.popleft(), False, time.monotonic()

    def _take(self, child: _Child) -> None:
        assert child.job is not None
        try:
            answer: Compiled | str = child.connection.recv()
        except (EOFError, ConnectionResetError):
            if child.ready and not child.begun:  # its pipe took the job, but it was ended while it had nothing to do
                self._waiting.appendleft(child.job)
                self._end(child)
                return
            doing = "" if child.ready else " before it could compile"
            how = how_it_ended(child.process)
            self._replace(child, Compiled(Status.CRASHED, f"the compiler died{doing} ({how})"))
            return
        if isinstance(answer, str):
            child.ready, child.begun, child.begun_s = True, answer == BEGUN, time.monotonic()
            return
        if answer.seconds is not None and answer.status is Status.OK:
            self._limit.seconds.append(answer.seconds)
        self._answers[child.job.key] = answer
        child.job = None

    def _replace(self, child: _Child, answer: Compiled) -> None:
        assert child.job is not None
        self._answers[child.job.key] = answer
        self._end(child)

    def _end(self, child: _Child) -> None:
        end_tree(child.process)
        child.connection.close()
        self._children.remove(child)

    def _spawn(self) -> _Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=child_main, args=(theirs, *self._arguments), daemon=True)
        start(process, interpret=False)
        theirs.close()
        child = _Child(process, ours, time.monotonic())
        self._children.append(child)
        return child


def child_main(connection: Connection, family: str, limits: Limits, hooks: tuple[str, ...], parent: int) -> None:
    """Entry point of a compiling process; it never touches a device."""
    settle(hooks, parent=parent)
    os.nice(5)
    from tilewright.kernel_templates.families import load_family

    load_family(family)
    connection.send(READY)
    while True:
        try:
            stage, case = connection.recv()
        except EOFError:
            return
        connection.send(BEGUN)
        connection.send(compile_one(family, stage, case, limits))


def compile_one(family: str, stage: Stage, case: WorkloadCase, limits: Limits) -> Compiled:
    """Compiles every kernel of a stage; whatever the compiler says against it becomes the answer."""
    from tilewright.kernel_templates.compile import compile_stage
    from tilewright.kernel_templates.families import load_family
    from tilewright.search.worker import classify

    begun = time.perf_counter()
    try:
        kernels = compile_stage(load_family(family).registry[stage.template], stage.values, case, limits)
    except Exception as error:
        status, reason = classify(error)
        status = Status.COMPILE_ERROR if status is Status.ERROR else status
        return Compiled(status, reason, seconds=time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    if not kernels:
        return Compiled(seconds=seconds)
    used = [resources(kernel.cubin) for kernel in kernels]
    shared = max(kernel.shared_memory_bytes for kernel in kernels)
    facts = Facts(max(u[0] for u in used), shared, sum(u[1] for u in used))
    if shared > limits.shared_memory_bytes:
        reason = f"needs {shared} bytes of shared memory, the limit is {limits.shared_memory_bytes}"
        return Compiled(Status.OUT_OF_RESOURCES, reason, facts, seconds)
    return Compiled(facts=facts, seconds=seconds)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory (spills), by cuobjdump; zeros where that tool is missing."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            tool = triton.knobs.nvidia.cuobjdump.path
            text = subprocess.run(
                [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
            ).stdout
        except (OSError, RuntimeError):
            return 0, 0
    registers = [int(number) for number in re.findall(r"\bREG:(\d+)", text)]
    spills = [int(number) for number in re.findall(r"\b(?:STACK|LOCAL):(\d+)", text)]
    return max(registers, default=0), sum(spills)
