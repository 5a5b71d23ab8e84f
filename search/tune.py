"""The coordinator of a run: cases in order, budgets, neighbours as seeds, and the record of each case."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Protocol

from tilewright.db.rows import RecordRow
from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Values
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.case_final import FinalResult, run_final
from tilewright.search.case_search import CaseSearch
from tilewright.search.context import Context
from tilewright.search.progress import CaseResult

NEIGHBOURS = 3  # tuned cases whose winners are tried first


class Records(Protocol):
    """The part of the store that a run writes and reads beside trials."""

    def activate(self, case: WorkloadCase, record: RecordRow) -> None: ...
    def active(self, case: WorkloadCase) -> RecordRow | None: ...
    def winners(self, case: WorkloadCase) -> Sequence[tuple[WorkloadCase, FusionPlan]]: ...


@dataclass(frozen=True)
class Budget:
    """Limits of a run; None is no limit. Seconds and trials are those of all cases together."""

    seconds: float | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "trials"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be positive, got {value}")


class Tuner:
    """Tunes cases one after another; winners of earlier cases are the seeds of later ones."""

    def __init__(
        self,
        context: Context,
        records: Records,
        *,
        refinal: bool = False,
        learned: list[tuple[WorkloadCase, FusionPlan]] | None = None,
    ) -> None:
        self._context = context
        self._records = records
        self._refinal = refinal  # time the finalists again even where nothing new was tried
        self._learned = [] if learned is None else learned  # several tuners may share it

    def run(self, cases: Sequence[WorkloadCase], budget: Budget = Budget()) -> list[CaseResult]:
        """Whatever ends the run, everything finished is stored and every case that is done has its record."""
        context = self._context
        results: list[CaseResult] = []
        begun = context.now_s()
        trials = None if budget.trials is None else -(-budget.trials // len(cases))
        for number, case in enumerate(cases):
            if context.stopping():
                break
            deadline = float("inf")
            if budget.seconds is not None:
                now = context.now_s()
                deadline = now + max(0.0, begun + budget.seconds - now) / (len(cases) - number)
            results.append(self.tune_case(case, number, len(cases), deadline_s=deadline, trial_limit=trials))
        return results

    def tune_case(
        self,
        case: WorkloadCase,
        number: int = 0,
        total: int = 1,
        *,
        deadline_s: float = float("inf"),
        trial_limit: int | None = None,
    ) -> CaseResult:
        """Search and final; a case with a current record and nothing new to try keeps its record."""
        context = self._context
        neighbours = self._neighbours(case)
        search = CaseSearch(context, case, deadline_s=deadline_s, neighbours=neighbours, trial_limit=trial_limit)
        context.progress.case_begins(case, number, total, search.expected_trials)
        begun = context.now_s()
        search.run()
        final = self._final(search)
        if final.record is not None:
            self._learned.append((case, FusionPlan.from_json(final.record.plan)))
        seconds = context.now_s() - begun
        result = CaseResult(case, final.record, dict(search.counts), search.reused, seconds, final.message)
        context.progress.case_ended(result)
        return result

    def _final(self, search: CaseSearch) -> FinalResult:
        context, case = self._context, search.case
        if context.stopping():
            return FinalResult(None, "interrupted before the final")
        if context.share is not None:
            if not context.share.is_last():
                return FinalResult(None, "another board, which ends later, runs the final")
            search.learn_from_others()
        former = self._records.active(case)
        incumbent = self._usable(case, former)
        if former is not None and incumbent is not None and search.fresh == 0 and not self._refinal:
            return FinalResult(former, "nothing new to try: the record stands")
        final = run_final(context, search, incumbent)
        if final.record is not None:
            self._records.activate(case, final.record)
        return final

    def _usable(self, case: WorkloadCase, former: RecordRow | None) -> FusionPlan | None:
        """The former record's plan, if its sources are unchanged and its parts are allowed in this run."""
        if former is None:
            return None
        registry = self._context.family.registry
        try:
            plan = FusionPlan.from_json(former.plan)
            registry.check(plan, case, self._context.limits)
        except UsageError:
            return None
        allowed = all(registry[stage.template].kind in self._context.kinds for stage in plan.stages)
        return plan if allowed and registry.source_hash(plan) == former.source_hash else None

    def _neighbours(self, case: WorkloadCase) -> list[dict[str, Values]]:
        """Winning configs by template of the cases tuned so far, here or in earlier runs, that are nearest in size."""
        known = {other.key: (other, plan) for other, plan in (*self._records.winners(case), *self._learned)}
        others = [entry for entry in known.values() if entry[0] != case]
        nearest = sorted(others, key=lambda entry: (_distance(case, entry[0]), entry[0].name))
        return [{stage.template: stage.values for stage in plan.stages} for _, plan in nearest[:NEIGHBOURS]]


def _distance(case: WorkloadCase, other: WorkloadCase) -> float:
    """Octaves between the FLOPs of two cases."""
    return abs(log2(case.flops / other.flops))
