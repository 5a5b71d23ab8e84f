"""The parent's handle on the worker that owns the device: limits, restarts, and answers for whatever happens."""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Self

from tilewright.db.rows import Status
from tilewright.errors import MachineUnfit
from tilewright.problem import WorkloadCase
from tilewright.search import worker
from tilewright.search.final import MIN_ROUNDS
from tilewright.search.outcome import Candidate, FinalEntry, FinalSamples, MeasureOptions, TrialOutcome
from tilewright.search.processes import end_tree, how_it_ended, start

if TYPE_CHECKING:
    from tilewright.kernel_templates.plan import FusionPlan
    from tilewright.search.describe import Described

START_LIMIT_S = 180.0
PREPARE_LIMIT_S = 300.0  # inputs and wide references of a case; nothing of a candidate runs in it
COMPILE_LIMIT_S = 60.0
BASELINE_LIMIT_S = 300.0  # torch.compile, in a final
ROUND_LIMIT_S = 120.0  # beyond the final's own time budget
STRICT_LIMIT_S = 600.0


@dataclass(frozen=True)
class Strict:
    """Answer to a strict verification."""

    status: Status
    reason: str = ""
    deterministic: bool = True


class Lost(Exception):
    """The worker died or was killed while it worked on a request; `status` and `reason` say why."""

    def __init__(self, status: Status, reason: str, phase: str) -> None:
        super().__init__(reason)
        self.status, self.reason, self.phase = status, reason, phase


class DeviceSession:
    """One spawned process per device; it is started again after it is lost. The user's start method is not touched."""

    def __init__(self, device: str, *, hooks: tuple[str, ...] = ()) -> None:
        self.device = device
        self.respawns = -1
        self._hooks = hooks
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker and everything that it started."""
        if self._connection is not None and self._process is not None and self._process.is_alive():
            try:
                self._connection.send(("end", ()))
                self._process.join(2)
            except OSError:
                pass
        self._kill()

    def describe(self) -> "Described":
        """Identity, limits and ceilings; raises MachineUnfit where there is no such device."""
        try:
            answer = self._ask("describe", (), {"": START_LIMIT_S})
        except Lost as lost:
            raise MachineUnfit(f"device {self.device} does not answer: {lost.reason}") from lost
        if isinstance(answer, worker.Failure):
            raise MachineUnfit(f"device {self.device}: {answer.reason}")
        found: Described = answer
        return found

    def evaluate(
        self,
        case: WorkloadCase,
        candidate: Candidate,
        options: MeasureOptions,
        *,
        run_limit_s: float,
        compile_limit_s: float = COMPILE_LIMIT_S,
    ) -> TrialOutcome:
        """Whatever the candidate does is an outcome; it never raises for it."""
        limits = {"": START_LIMIT_S, "prepare": PREPARE_LIMIT_S, "launch": compile_limit_s, "run": run_limit_s}
        begun = time.monotonic()
        try:
            answer = self._ask("evaluate", (case, candidate, options), limits)
        except Lost as lost:
            return TrialOutcome(lost.status, lost.reason, gpu_s=time.monotonic() - begun)
        if isinstance(answer, worker.Failure):
            return TrialOutcome(answer.status, answer.reason, gpu_s=time.monotonic() - begun)
        outcome: TrialOutcome = answer
        return outcome

    def final(
        self,
        case: WorkloadCase,
        entries: list[FinalEntry],
        *,
        rounds: int,
        options: MeasureOptions,
        time_budget_s: float,
        seed: int = 0,
    ) -> FinalSamples:
        """Interleaved rounds; a contestant that takes the process down is struck out and the others begin again."""
        struck: dict[str, str] = {}
        limits = {
            "": START_LIMIT_S,
            "prepare": PREPARE_LIMIT_S,
            "entry": BASELINE_LIMIT_S,
            "launch": COMPILE_LIMIT_S,
            "run": COMPILE_LIMIT_S,
            "rounds": time_budget_s + ROUND_LIMIT_S,
        }
        while True:
            alive = [entry for entry in entries if entry.name not in struck]
            if not alive:
                return FinalSamples({}, struck)
            entered: list[str] = []
            try:
                arguments = (case, alive, rounds, MIN_ROUNDS, options, time_budget_s, seed)
                answer = self._ask("final", arguments, limits, entered.append)
            except Lost as lost:
                answer = worker.Failure(lost.status, lost.reason)
            if not isinstance(answer, worker.Failure):
                samples: FinalSamples = answer
                return replace(samples, failures={**samples.failures, **struck})
            reason = f"{answer.status.value}: {answer.reason}"
            culprit = _culprit(entered, alive)
            if culprit is None:  # it happened in the rounds, where nobody knows whose it was: each alone will tell
                alone = {
                    e.name: self.final(case, [e], rounds=rounds, options=options, time_budget_s=time_budget_s)
                    for e in alive
                }
                found = {name: samples.failures[name] for name, samples in alone.items() if name in samples.failures}
                struck |= found or {alive[-1].name: reason}
            else:
                struck[culprit] = reason

    def verify_strict(self, case: WorkloadCase, plan: "FusionPlan") -> Strict:
        """The check that a record must pass."""
        limits = {"": STRICT_LIMIT_S, "launch": STRICT_LIMIT_S, "run": STRICT_LIMIT_S}
        try:
            answer = self._ask("verify_strict", (case, plan), limits)
        except Lost as lost:
            return Strict(lost.status, lost.reason)
        return Strict(answer.status, answer.reason, getattr(answer, "deterministic", True))

    def _ask(
        self,
        name: str,
        arguments: tuple[Any, ...],
        limits: Mapping[str, float],
        seen: Callable[[str], None] = lambda phase: None,
    ) -> Any:
        """The answer; a worker that dies before anything of the candidate ran is replaced once, and asked again."""
        try:
            return self._ask_once(name, arguments, limits, seen)
        except Lost as lost:
            if lost.phase or lost.status is not Status.CRASHED:
                raise
            return self._ask_once(name, arguments, limits, seen)

    def _ask_once(
        self, name: str, arguments: tuple[Any, ...], limits: Mapping[str, float], seen: Callable[[str], None]
    ) -> Any:
        """`limits` holds seconds by phase, the first word of what the worker says it begins."""
        connection = self._start()
        try:
            connection.send((name, arguments))
            phase, deadline = "", time.monotonic() + limits[""]
            while True:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise self._timed_out(phase, limits)
                reply: worker.Reply = connection.recv()
                if reply.kind == "phase":
                    seen(reply.content)
                    phase = reply.content.partition(" ")[0]
                    deadline = time.monotonic() + limits.get(phase, limits[""])
                    continue
                if reply.kind == "lost":
                    self._kill()
                return reply.content
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise self._died(phase) from error
        except KeyboardInterrupt:
            self._kill()
            raise

    def _start(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._connection is not None:
            return self._connection
        self._kill()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self.device, self._hooks, os.getpid())
        self._process = context.Process(target=worker.main, args=arguments, daemon=False)
        start(self._process, interpret=self.device == "interpret")
        theirs.close()
        # Python waits for its children before it ends, and this one waits for us: without this, a session that was
        # never closed would keep the program alive.
        Finalize(self._process, end_tree, args=(self._process,), exitpriority=10)
        self._connection = ours
        self.respawns += 1
        return ours

    def _timed_out(self, phase: str, limits: Mapping[str, float]) -> Lost:
        self._kill()
        words = {"": "start", "launch": "compile", "prepare": "prepare"}
        return Lost(Status.TIMEOUT, f"{words.get(phase, phase)} limit {limits.get(phase, limits['']):g} s", phase)

    def _died(self, phase: str) -> Lost:
        how = "nothing is known of its end" if self._process is None else how_it_ended(self._process)
        self._kill()
        return Lost(Status.CRASHED, f"the worker process died ({how}) in phase {phase or 'start'}", phase)

    def _kill(self) -> None:
        """The process and its children; no orphan stays."""
        if self._process is not None:
            end_tree(self._process)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _culprit(entered: list[str], alive: list[FinalEntry]) -> str | None:
    """The contestant that was being prepared, or the only one; None when it was lost in the rounds."""
    names = [phase.partition(" ")[2] for phase in entered if phase.startswith("entry ")]
    if len(alive) == 1:
        return alive[0].name
    return names[-1] if names and "rounds" not in entered else None
