"""What `tilewright verify` calls: the records that this machine serves, checked and timed again, quickly."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from tilewright.db.environment import Environment
from tilewright.db.rows import Status, StoredRecord
from tilewright.errors import NothingFound, UsageError
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import Family, load_family
from tilewright.problem import WorkloadCase
from tilewright.search.context import CompileAhead
from tilewright.search.final import MIN_GAIN, MIN_ROUNDS
from tilewright.search.outcome import FinalEntry, MeasureOptions
from tilewright.search.recheck import DEFAULT, RECORD, Subject, Verified, judge
from tilewright.search.request import Selection, resolve
from tilewright.search.run import compiler_for, environment_json
from tilewright.search.session import DeviceSession

# For the device described: the records that matter there.
Subjects = Callable[[Environment, Limits], Sequence[Subject]]

INPUT_SETS = 2
RUN_LIMIT_S = 60.0
CASE_S = 1.5  # a case without baselines, on an H200; what is left of the budget must do for the cases to come


@dataclass(frozen=True)
class VerifyRequest:
    """The options of `tilewright verify`; `budget` is in seconds, and costs baselines when it runs short."""

    problem: str
    cases: Sequence[str] = ()
    suite: str | None = None
    device: str = "auto"
    baselines: Sequence[str] = ()
    rounds: int = 12
    min_gain: float = MIN_GAIN
    budget: float = 60.0

    def check(self, family: Family) -> tuple[str, ...]:
        """The baselines to run; without a wish, those of a final that need no compiler of a whole block."""
        for name in self.baselines:
            if name not in family.baselines:
                raise UsageError(f"baseline must be one of {', '.join(family.baselines)}, got {name!r}")
        if self.rounds < MIN_ROUNDS:
            raise UsageError(f"rounds must be at least {MIN_ROUNDS}, got {self.rounds}")
        quick = tuple(name for name in family.final_baselines if not name.startswith("torch_compile"))
        return tuple(self.baselines) or quick


@dataclass(frozen=True)
class VerifyReport:
    """What was kept and what should be tuned again; `seconds` is wall time."""

    problem: str
    environment: Environment
    cases: tuple[Verified, ...]
    seconds: float
    measures: bool

    @property
    def all_kept(self) -> bool:
        return all(case.keep for case in self.cases)

    @property
    def reproduced(self) -> list[StoredRecord]:
        """The records that passed on this machine as they were made: what a caller may mark as reproduced."""
        kept = (case.subject for case in self.cases if case.keep and not case.subject.stale)
        return [subject.record for subject in kept if subject.record is not None]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "tilewright.verify/1",
            "tool_version": version("tilewright"),
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "problem": self.problem,
            "environment": environment_json(self.environment),
            "seconds": round(self.seconds, 1),
            "measures": self.measures,
            "keep": sum(case.keep for case in self.cases),
            "retune": [case.case.name for case in self.cases if not case.keep],
            "cases": [case.to_json() for case in self.cases],
        }


def run_verify(request: VerifyRequest, subjects: Subjects, says: Callable[[str], None]) -> VerifyReport:
    """Raises NothingFound where no record of the problem was made on this card."""
    selection = resolve(request.problem, cases=request.cases, suite=request.suite, device=request.device)
    family = load_family(selection.problem.family)
    baselines = request.check(family)
    begun = time.monotonic()
    with DeviceSession(selection.device) as session:
        described = session.describe()
        found = _asked(request, selection, subjects(described.environment, described.limits))
        with compiler_for(described.limits, selection.problem.family) as compiler:
            desk = _Desk(request, family, described.limits, session, compiler, begun)
            desk.submit(found)
            verified = []
            for number, subject in enumerate(found):
                verified.append(desk.verify(subject, desk.affordable(baselines, len(found) - number)))
                says(f"{subject.case.name}: {verified[-1].word}, {verified[-1].reason}")
    measures = described.limits.kind != "interpret"
    return VerifyReport(
        selection.problem.name, described.environment, tuple(verified), time.monotonic() - begun, measures
    )


def _asked(request: VerifyRequest, selection: Selection, found: Sequence[Subject]) -> list[Subject]:
    """Those that the request names; all of them where it names none."""
    wanted: set[WorkloadCase] = set(selection.cases) if request.cases or request.suite else set()
    kept = [subject for subject in found if not wanted or subject.case in wanted]
    if not kept:
        raise NothingFound(f"no record of {selection.problem.name} was made on this card; `tilewright tune` makes some")
    return kept


@dataclass(frozen=True)
class _Desk:
    """One run's tools; `begun` is on the monotonic clock."""

    request: VerifyRequest
    family: Family
    limits: Limits
    session: DeviceSession
    compiler: CompileAhead
    begun: float

    def affordable(self, baselines: tuple[str, ...], cases_left: int) -> tuple[str, ...]:
        """None when the time left does only for the check against the default."""
        left_s = self.begun + self.request.budget - time.monotonic()
        return baselines if left_s > CASE_S * cases_left else ()

    def submit(self, subjects: Sequence[Subject]) -> None:
        """Compiles ahead what will be timed, in the order in which it is."""
        for subject in subjects:
            for entry in self._plans(subject):
                assert entry.plan is not None
                for stage in entry.plan.stages:
                    self.compiler.submit(stage, subject.case)

    def verify(self, subject: Subject, baselines: tuple[str, ...]) -> Verified:
        if subject.objection:
            return Verified(subject, False, subject.objection)
        if self.limits.kind == "interpret":
            return self._checked(subject)
        plans = self._plans(subject)
        for entry in plans:
            assert entry.plan is not None
            for stage in entry.plan.stages:
                self.compiler.result(stage, subject.case)  # the worker compiles again what failed here, and says why
        others = [FinalEntry(name, None, "baseline") for name in baselines]
        samples = self.session.final(
            subject.case,
            [*plans, *others],
            rounds=self.request.rounds,
            options=_options(subject),
            time_budget_s=self.request.budget,
        )
        return judge(subject, samples, min_gain=self.request.min_gain)

    def _checked(self, subject: Subject) -> Verified:
        """Where times are no measurements, being right is all there is to verify."""
        outcome = self.session.evaluate(subject.case, subject.plan, MeasureOptions(), run_limit_s=RUN_LIMIT_S)
        right = outcome.status is Status.OK
        return Verified(subject, right, "right" if right else f"the plan fails: {outcome.reason}")

    def _plans(self, subject: Subject) -> list[FinalEntry]:
        """The record's plan and the default, once where they are the same."""
        if subject.objection:
            return []
        plans = [FinalEntry(RECORD, subject.plan, "incumbent")]
        default = self.family.registry.default_plan(subject.case, self.limits)
        if default.digest != subject.plan.digest:
            plans.append(FinalEntry(DEFAULT, default, "default"))
        return plans


def _options(subject: Subject) -> MeasureOptions:
    """Graph or eager, cold or warm, as the record was timed."""
    name = subject.record.record.regime if subject.record else "graph"
    return MeasureOptions(regime=name.removesuffix("-warm"), cold_l2=not name.endswith("-warm"), input_sets=INPUT_SETS)
