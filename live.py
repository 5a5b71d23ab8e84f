"""What a person sees on stderr while a tune runs: a live bar on a terminal, plain lines elsewhere."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tilewright.db.rows import Status, TrialRow
from tilewright.problem import WorkloadCase
from tilewright.search.progress import CaseResult

PLAIN_EVERY_S = 10.0


@dataclass
class _Case:
    """A case that is being tuned; on several devices there is one for each."""

    task: TaskID
    expected: int
    phase: str = ""
    done: int = 0
    failed: int = 0


class LiveProgress:
    """The progress of a run, for several threads; `measures` is False where times must not be shown as speed."""

    def __init__(self, console: Console, *, measures: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._measures = measures
        self._now_s = now_s
        self._said_s = now_s()
        self._cases: dict[str, _Case] = {}
        self._overall: TaskID | None = None
        self._turn = threading.RLock()
        self._bar = Progress(
            TextColumn("{task.description}", table_column=None),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[best]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> "LiveProgress":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def case_begins(self, case: WorkloadCase, number: int, total: int, expected_trials: int) -> None:
        with self._turn:
            if self._overall is None:
                self._overall = self._bar.add_task("cases", total=total, best="")
            task = self._bar.add_task(case.name, total=expected_trials, best="")
            self._cases[case.key] = _Case(task, expected_trials)

    def phase_begins(self, case: WorkloadCase, phase: str) -> None:
        with self._turn:
            at = self._cases[case.key]
            at.phase = phase
            self._bar.update(at.task, description=f"{case.name} {phase}")

    def trial_ended(self, case: WorkloadCase, row: TrialRow, best_us: float | None) -> None:
        with self._turn:
            at = self._cases[case.key]
            at.done += 1
            at.failed += row.status is not Status.OK
            total = max(at.expected, at.done)
            self._bar.update(at.task, completed=at.done, total=total, best=self._best(best_us))
            if not self._console.is_terminal and self._now_s() - self._said_s >= PLAIN_EVERY_S:
                self._said_s = self._now_s()
                self.says(f"{case.name} {at.phase}: {at.done}/{total} trials, {at.failed} failed {self._best(best_us)}")

    def case_ended(self, result: CaseResult) -> None:
        with self._turn:
            self._bar.remove_task(self._cases.pop(result.case.key).task)
            if self._overall is not None:
                self._bar.advance(self._overall)
            self.says(result_line(result, measures=self._measures))

    def says(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _best(self, best_us: float | None) -> str:
        if best_us is None:
            return ""
        return f"best {best_us:.1f} us" if self._measures else "verified"


def result_line(result: CaseResult, *, measures: bool) -> str:
    """One line a case: the record, what it was compared with, and how many trials failed."""
    failed = sum(count for status, count in result.counts.items() if status != Status.OK)
    trials = f"{sum(result.counts.values())} trials ({failed} failed, {result.reused} known), {result.seconds:.0f} s"
    record = result.record
    if record is None:
        return f"{result.case.name:<10} no record: {result.message}; {trials}"
    label = " | ".join(stage["template"] for stage in record.plan)
    if not measures or record.median_us is None:
        return f"{result.case.name:<10} verified  {label}; {trials}"
    beside = ""
    if record.baseline_us is not None:
        beside = f", {record.baseline_us / record.median_us:.3f}x {record.baseline}"
    if record.floor_us is not None:
        beside += f", {record.floor_us / record.median_us:.0%} of SOL"
    note = f" ({result.message})" if result.message else ""
    return f"{result.case.name:<10} {record.median_us:8.1f} us{beside}  {record.verdict.value}  {label}; {trials}{note}"
