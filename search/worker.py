"""The process that owns the device: answers one request after another until its parent is gone.

Nothing here is imported by the parent. Torch and Triton are loaded after the environment is set, because Triton
decides on its interpreter when a kernel is decorated.
"""

import contextlib
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from tilewright.db.rows import Status
from tilewright.search.outcome import Candidate, FinalEntry, FinalSamples, MeasureOptions, TrialOutcome
from tilewright.search.processes import settle

STICKY = ("illegal memory access", "device-side assert", "launch failure", "misaligned address", "hardware stack error",
          "illegal instruction", "unspecified launch", "an illegal", "CUDA error: invalid program counter")  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What goes back: `kind` is phase (a step begins), done, or lost (the answer stands, the process ends)."""

    kind: str
    content: Any


def main(connection: Connection, device: str, hooks: tuple[str, ...], parent: int) -> None:
    """Entry point of the spawned process."""
    settle(hooks, parent=parent)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        desk = Desk(connection, device)
        while True:
            name, arguments = connection.recv()
            if name == "end":
                return
            reply = desk.answer(name, arguments)
            connection.send(reply)
            if reply.kind == "lost":
                return


class Desk:
    """Takes requests; keeps the state of the case in hand."""

    def __init__(self, connection: Connection, device: str) -> None:
        import torch

        self._connection = connection
        self._name = device
        self._torch = torch
        self._device = torch.device("cpu" if device == "interpret" else device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._state: Any = None
        self._limits: Any = None

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Reply:
        """Never raises for what a candidate does; an error that spoils the device's context ends the process."""
        try:
            return Reply("done", getattr(self, name)(*arguments))
        except Exception as error:
            status, reason = classify(error)
            self._state = None
            lost = status is Status.CRASHED or self._context_is_lost()
            return Reply("lost" if lost else "done", Failure(Status.CRASHED if lost else status, reason))

    def describe(self) -> Any:
        from tilewright.search.describe import describe

        described = describe(self._name)
        self._limits = described.limits
        return described

    def evaluate(self, case: Any, candidate: Candidate, options: MeasureOptions) -> TrialOutcome:
        """Verify, then measure; a candidate that spoils what others will read is wrong however fast it was."""
        from tilewright.kernel_templates.inputs import InputOptions
        from tilewright.search.verify import quick_check

        state = self._open(case)
        begun = time.perf_counter()
        every = [InputOptions(seed) for seed in range(self._sets(options))]
        first = state.segment(candidate).first
        for each in every:
            state.note_inputs(each, first)
        outcome = self._outcome(quick_check(state, candidate, phase=self._phase))
        if outcome.status is Status.OK:
            outcome = self._measured(state, candidate, options, outcome)
        changed = {name for each in every for name in state.changed_inputs(each, first)}
        if changed and outcome.status is Status.OK:
            reason = f"changes its input {', '.join(sorted(changed))} when called again"
            outcome = TrialOutcome(Status.WRONG, reason, error_ratio=outcome.error_ratio)
        return replace(outcome, gpu_s=time.perf_counter() - begun)

    def _measured(
        self, state: Any, candidate: Candidate, options: MeasureOptions, verified: TrialOutcome
    ) -> TrialOutcome:
        from tilewright.kernel_templates.inputs import InputOptions
        from tilewright.search.measure import InvalidTime, make_timer, measure, measure_once, prepare
        from tilewright.search.verify import replay_check

        timer = make_timer(self._device, options)
        ready = prepare(state, candidate, self._sets(options), timer)
        finding = replay_check(state, *ready[0], InputOptions())
        if finding.status is not Status.OK:
            return self._outcome(finding)
        try:
            samples = measure(ready, options, timer) if self._measures else measure_once(ready, timer)
        except InvalidTime as error:
            return TrialOutcome(Status.INVALID_TIME, str(error))
        return replace(verified, samples_us=tuple(samples), noisy=self._noise())

    @staticmethod
    def _outcome(finding: Any) -> TrialOutcome:
        return TrialOutcome(finding.status, finding.reason, error_ratio=finding.error_ratio)

    def final(
        self,
        case: Any,
        entries: list[FinalEntry],
        rounds: int,
        least: int,
        options: MeasureOptions,
        time_budget_s: float,
        seed: int,
    ) -> FinalSamples:
        """Verifies each contestant, then times all of them interleaved."""
        from tilewright.search.contest import enter
        from tilewright.search.measure import interleaved, make_timer

        state = self._open(case)
        timer = make_timer(self._device, options)
        sets = self._sets(options)
        contestants, failures = {}, {}
        for entry in entries:
            self._phase(f"entry {entry.name}")
            try:
                contestants[entry.name] = enter(state, entry, timer, sets)
            except Exception as error:
                status, reason = classify(error)
                if status is Status.CRASHED or self._context_is_lost():
                    raise
                failures[entry.name] = reason
        self._phase("rounds")
        times, invalid = interleaved(
            contestants, timer, rounds=rounds, least=least, time_budget_s=time_budget_s, seed=seed
        )
        rounds_us = {name: tuple(values) for name, values in times.items()}
        return FinalSamples(rounds_us, {**failures, **invalid}, noisy=self._noise())

    def verify_strict(self, case: Any, plan: Any) -> Any:
        from tilewright.kernel_templates.families import load_family
        from tilewright.search.verify import strict_check

        self._phase("strict")
        self._state = None
        self._free()
        family = load_family(case.problem.family)
        return strict_check(family, case, plan, self._device, self._limits or self.describe().limits)

    def _open(self, case: Any) -> Any:
        """The state of this case; the former one's memory is given back first."""
        from tilewright.kernel_templates.families import load_family
        from tilewright.search.case_state import CaseState
        from tilewright.search.verify import QUICK

        if self._state is None or self._state.case != case:
            self._state = None
            self._free()
            self._phase("prepare")
            self._state = CaseState(case, load_family(case.problem.family), self._device)
            self._state.prepare(*QUICK)
        return self._state

    @property
    def _measures(self) -> bool:
        return bool(self._device.type == "cuda")

    def _sets(self, options: MeasureOptions) -> int:
        """Input sets that are rotated; one where times are no measurements."""
        return options.input_sets if self._measures else 1

    def _phase(self, name: str) -> None:
        self._connection.send(Reply("phase", name))

    def _free(self) -> None:
        if self._measures:
            self._torch.cuda.empty_cache()

    def _noise(self) -> str:
        from tilewright.search.describe import noise

        return noise(self._device)

    def _context_is_lost(self) -> bool:
        if not self._measures:
            return False
        try:
            self._torch.cuda.synchronize(self._device)
        except Exception:
            return True
        return False


@dataclass(frozen=True)
class Failure:
    """A request that ended in an exception."""

    status: Status
    reason: str


def classify(error: Exception) -> tuple[Status, str]:
    """Status and reason of an exception that a candidate caused; names stand for types, which may not be importable."""
    name, text = type(error).__name__, " ".join(str(error).split())[:400]
    reason = f"{name}: {text}"
    if any(sign in text for sign in STICKY):
        return Status.CRASHED, reason
    if name == "OutOfResources" or "out of resource" in text:
        return Status.OUT_OF_RESOURCES, reason
    if name in ("OutOfMemoryError", "MemoryError") or "out of memory" in text or "can't allocate memory" in text:
        return Status.OUT_OF_RESOURCES, f"device out of memory: {text}"
    if name == "AcceleratorError":
        return Status.CRASHED, reason
    if name in ("CompilationError", "CompileTimeAssertionFailure", "PTXASError", "UnsupportedLanguageConstruct"):
        return Status.COMPILE_ERROR, reason
    return Status.ERROR, reason
