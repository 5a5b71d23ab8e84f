"""What the coordinator tells whoever watches; the command line draws it."""

from dataclasses import dataclass
from typing import Protocol

from tilewright.db.rows import RecordRow, TrialRow
from tilewright.problem import WorkloadCase


@dataclass(frozen=True)
class CaseResult:
    """How a case ended; `record` is None when nothing valid was found or time ran out before anything was verified."""

    case: WorkloadCase
    record: RecordRow | None
    counts: dict[str, int]  # trials by status, known ones included
    reused: int  # trials answered from the database
    seconds: float
    message: str = ""


class Progress(Protocol):
    def case_begins(self, case: WorkloadCase, number: int, total: int, expected_trials: int) -> None: ...
    def trial_ended(self, case: WorkloadCase, row: TrialRow, best_us: float | None) -> None: ...
    def phase_begins(self, case: WorkloadCase, phase: str) -> None: ...
    def case_ended(self, result: CaseResult) -> None: ...
    def says(self, text: str) -> None: ...


class Silent:
    """Watches nothing."""

    def case_begins(self, case: WorkloadCase, number: int, total: int, expected_trials: int) -> None:
        pass

    def trial_ended(self, case: WorkloadCase, row: TrialRow, best_us: float | None) -> None:
        pass

    def phase_begins(self, case: WorkloadCase, phase: str) -> None:
        pass

    def case_ended(self, result: CaseResult) -> None:
        pass

    def says(self, text: str) -> None:
        pass
