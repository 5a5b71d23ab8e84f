"""Measures code from elsewhere as our own candidates are: verified first, then timed, in the worker's process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tilewright.db.environment import Environment
from tilewright.db.rows import Status, Trust
from tilewright.db.trust import OutsideResult, environment_words, suite_words
from tilewright.kernel_templates.base import Value
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import Ceilings, WorkloadCase
from tilewright.search.outcome import PROTOCOL, MeasureOptions, TrialOutcome
from tilewright.search.request import Selection
from tilewright.search.session import DeviceSession

if TYPE_CHECKING:
    from tilewright.search.describe import Described

HOOKS = ("tilewright.search.outside_code:install",)
SAMPLES = 50  # of which the median is taken, as SOL-ExecBench does
COMPILE_LIMIT_S, RUN_LIMIT_S = 300.0, 120.0
LEAST_OF_FLOOR = 0.9  # what is faster than this share of the speed of light did not do the work


@dataclass(frozen=True)
class OutsideCode:
    """Sources that lie in `folder`; `writes` says that the outputs are handed in."""

    name: str
    author: str
    folder: Path
    file: str
    function: str
    writes: bool
    digest: str

    def plan(self, cases: Sequence[WorkloadCase]) -> FusionPlan:
        values: dict[str, Value] = {
            "FOLDER": str(self.folder), "FILE": self.file, "FUNCTION": self.function, "WRITES": self.writes,
            "CASES": " ".join(case.name for case in cases),
        }  # fmt: skip
        return FusionPlan((Stage("outside_code", values),))


@dataclass(frozen=True)
class CaseAnswer:
    """What one case came to; times in microseconds, None where they are no measurements."""

    case: str
    status: Status
    reason: str = ""
    median_us: float | None = None
    floor_us: float | None = None
    error_ratio: float | None = None
    noisy: str = ""

    @property
    def percent_sol(self) -> float | None:
        return 100 * self.floor_us / self.median_us if self.floor_us and self.median_us else None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status.value, "percent_sol": self.percent_sol}


@dataclass(frozen=True)
class OutsideReport:
    """Every case up to the first that failed, and the rows to store: none unless all are right and were timed."""

    code: OutsideCode
    problem: str
    environment: Environment
    cases: tuple[CaseAnswer, ...]
    rows: tuple[OutsideResult, ...]

    @property
    def right(self) -> bool:
        return all(case.status is Status.OK for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        """Schema 1 of `tilewright import solution --json`."""
        return {
            "schema": 1,
            "kind": "import-solution",
            "solution": self.code.name,
            "author": self.code.author,
            "digest": self.code.digest,
            "problem": self.problem,
            "hardware": self.environment.gpu_name,
            "right": self.right,
            "stored": len(self.rows),
            "cases": [case.to_json() for case in self.cases],
        }


def measure_code(
    code: OutsideCode, selection: Selection, session: DeviceSession, *, regime: str, says: Callable[[CaseAnswer], None]
) -> OutsideReport:
    """Ends at the first case that fails. Raises MachineUnfit where there is no such device."""
    described = session.describe()
    options = MeasureOptions(regime=regime, min_samples=SAMPLES, max_samples=SAMPLES)
    answers = []
    for answer in _answers(code, selection.cases, session, described.ceilings, options):
        says(answer)
        answers.append(answer)
    rows = _rows(code, selection, described, answers, options) if answers[-1].status is Status.OK else ()
    return OutsideReport(code, selection.problem.name, described.environment, tuple(answers), tuple(rows))


def _answers(
    code: OutsideCode,
    cases: Sequence[WorkloadCase],
    session: DeviceSession,
    ceilings: Ceilings | None,
    options: MeasureOptions,
) -> Iterator[CaseAnswer]:
    plan = code.plan(cases)
    for case in cases:
        limits = {"run_limit_s": RUN_LIMIT_S, "compile_limit_s": COMPILE_LIMIT_S}
        outcome = session.evaluate(case, plan, options, **limits)
        answer = _answer(case, outcome, case.floor_us(ceilings) if ceilings else None)
        if answer.status is Status.OK:
            strict = session.verify_strict(case, plan)
            if strict.status is not Status.OK:
                answer = CaseAnswer(case.name, strict.status, strict.reason)
        yield answer
        if answer.status is not Status.OK:
            return


def _answer(case: WorkloadCase, outcome: TrialOutcome, floor_us: float | None) -> CaseAnswer:
    if outcome.status is not Status.OK:
        return CaseAnswer(case.name, outcome.status, outcome.reason)
    if floor_us is None:
        return CaseAnswer(case.name, Status.OK, error_ratio=outcome.error_ratio)
    us = median(outcome.samples_us)
    if us < LEAST_OF_FLOOR * floor_us:
        reason = f"{us:.1f} us is less than the speed of light allows ({floor_us:.1f} us)"
        return CaseAnswer(case.name, Status.INVALID_TIME, reason)
    return CaseAnswer(case.name, Status.OK, "", us, floor_us, outcome.error_ratio, outcome.noisy)


def _rows(
    code: OutsideCode,
    selection: Selection,
    described: "Described",
    answers: Sequence[CaseAnswer],
    options: MeasureOptions,
) -> list[OutsideResult]:
    """A row a case, and the suite's mean where it is whole."""
    timed = [(answer.case, answer.median_us, answer.percent_sol, answer.noisy) for answer in answers]
    known = [(case, us, sol, noisy) for case, us, sol, noisy in timed if us is not None and sol is not None]
    suite = {case.name for case in selection.problem.suite("full")}
    if {case for case, *_ in known} == suite:
        doubts = "; ".join(dict.fromkeys(noisy for *_, noisy in known if noisy))
        known.append((suite_words(len(suite)), mean(k[1] for k in known), mean(k[2] for k in known), doubts))
    protocol = f"tilewright {PROTOCOL}, {options.regime_name}, median of {SAMPLES}"
    return [
        OutsideResult(
            problem=selection.problem.name,
            implementation=code.name,
            hardware=described.environment.gpu_name,
            environment=environment_words(described.environment, options.regime_name),
            workload=workload,
            latency_us=us,
            percent_sol=sol,
            trust=Trust.MEASURED,
            source=f"by {code.author}",
            protocol=f"{protocol}, noisy: {noisy}" if noisy else protocol,
            digest=code.digest,
            observed=datetime.now(UTC).date().isoformat(),
        )
        for workload, us, sol, noisy in known
    ]
