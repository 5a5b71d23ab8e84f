"""The search of one case: stages first, each template by its own study, then plans composed of the best stages.

A stage is measured once and shared by every plan that contains it; plans are judged by the time of the whole block.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from tilewright.db.rows import Level, Status, TrialRow
from tilewright.errors import MachineUnfit
from tilewright.kernel_templates.base import Values
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import WorkloadCase
from tilewright.search.context import Context, open_study, plan_row, stage_row, waits_for_others
from tilewright.search.effort import CUT_FACTOR, run_limit_s
from tilewright.search.outcome import TrialOutcome
from tilewright.search.space import StageSpace, case_spaces, compositions, coordinates, space_filling
from tilewright.search.stale import current_hash
from tilewright.search.study import PointStudy, key_of

STAGE_SHARE = 0.8  # of the time of a case; the rest is kept for whole blocks, which decide
PLAN_MARGIN = 1.25  # plans whose stage times add up to more than this times the best sum are not measured


class CaseSearch:
    """Holds what is known of one case in one run; `deadline_s` is on the context's clock."""

    def __init__(
        self,
        context: Context,
        case: WorkloadCase,
        *,
        deadline_s: float,
        neighbours: Sequence[Mapping[str, Values]] = (),
        trial_limit: int | None = None,
    ) -> None:
        self.context = context
        self.case = case
        self.counts: Counter[str] = Counter()
        self.reused = 0
        now = context.now_s()
        self._deadline_s = deadline_s
        self._stages_until_s = now + STAGE_SHARE * (deadline_s - now)
        self._neighbours = neighbours
        self._left = trial_limit
        self._registry = context.family.registry
        self.spaces = case_spaces(self._registry, case, context.limits, context.kinds)
        if context.effort.whole_space:
            count = context.effort.stage_trials
            for name, space in self.spaces.items():
                self.spaces[name] = space_filling(space, case, context.limits, count=count, seed=context.seed)
        self.stages: dict[str, dict[str, tuple[Stage, float]]] = {name: {} for name in self.spaces}
        self.plans: dict[str, tuple[FusionPlan, float]] = {}
        self._costs: dict[str, tuple[int, int]] = {}
        self._yardstick_us = 1.0  # of a shared case: the default plan on this board, never taken from another
        self._known = {} if context.share else self._current(context.known_trials(case))

    @property
    def default(self) -> FusionPlan:
        return self._registry.default_plan(self.case, self.context.limits, kinds=self.context.kinds)

    @property
    def expected_trials(self) -> int:
        """Trials that a run to the end would take, those already known included."""
        stages = sum(min(len(space.valid), self.context.effort.stage_trials) for space in self.spaces.values())
        total = stages + self.context.effort.plan_trials
        return total if self._left is None else min(total, self._left)

    def run(self) -> None:
        """Fills `stages` and `plans`; ends early at the deadline, the trial limit, or when asked to stop."""
        self.context.progress.phase_begins(self.case, "default")
        default_us = self._measure_plan(self.default)
        if self.context.share is not None:
            if default_us is None:
                raise MachineUnfit(f"the default plan of {self.case.name} failed here: this board cannot share it")
            self._yardstick_us = default_us
            self.learn_from_others()
        self.context.progress.phase_begins(self.case, "stages")
        self._search_stages()
        self.context.progress.phase_begins(self.case, "plans")
        self._search_plans()

    @property
    def fresh(self) -> int:
        """Trials run now rather than answered from the database."""
        return sum(self.counts.values()) - self.reused

    def out_of_time(self) -> bool:
        return self.context.stopping() or self.context.now_s() >= self._deadline_s or self._left == 0

    def best_stages(self, count: int) -> dict[str, list[tuple[Stage, float]]]:
        """The fastest stages of each template, fastest first."""
        return {
            name: sorted(found.values(), key=lambda entry: (entry[1], entry[0].digest))[:count]
            for name, found in self.stages.items()
        }

    def best_plans(self, count: int) -> list[FusionPlan]:
        """The fastest plans, measured as whole blocks, fastest first."""
        ranked = sorted(self.plans.values(), key=lambda entry: (entry[1], entry[0].digest))
        return [plan for plan, _ in ranked[:count]]

    def cost(self, plan: FusionPlan) -> tuple[int, int]:
        """Registers and shared memory of a plan's stages together; zeros where they are not known."""
        costs = [self._costs.get(stage.digest, (0, 0)) for stage in plan.stages]
        return sum(registers for registers, _ in costs), sum(shared for _, shared in costs)

    def learn_from_others(self) -> None:
        """Of a shared case: what all boards have stored, at this board's scale, as if it were measured here."""
        share = self.context.share
        if share is None:
            return
        self._known = self._current(share.known(self.case, self.default.digest, self._yardstick_us))
        for row in self._known.values():
            if row.level is Level.STAGE and row.template in self.spaces:
                self._note_stage(Stage(row.template, row.config), row)
            elif row.level is Level.PLAN:
                plan = FusionPlan.from_json(row.config)
                if all(stage.template in self.spaces for stage in plan.stages):
                    self._note_plan(plan, row)

    def _current(self, rows: Iterable[TrialRow]) -> dict[tuple[Level, str], TrialRow]:
        """Results of earlier runs in this regime whose sources are unchanged."""
        known: dict[tuple[Level, str], TrialRow] = {}
        for row in rows:
            if row.regime == self._regime and row.source_hash == current_hash(self._registry, row):
                known[row.level, row.digest] = row  # the latest attempt
        return known

    def _enough_of_stages(self) -> bool:
        return self.out_of_time() or self.context.now_s() >= self._stages_until_s

    def _search_stages(self) -> None:
        studies = {name: self._stage_study(space) for name, space in self.spaces.items()}
        turn = deque(studies)
        waiting: deque[Stage] = deque()
        while True:
            while turn and len(waiting) < self.context.look_ahead and not self._enough_of_stages():
                name = turn.popleft()
                values = studies[name].ask()
                if values is not None:
                    turn.append(name)
                    stage = Stage(name, values)
                    self.context.compiler.submit(stage, self.case)
                    waiting.append(stage)
            if not waiting and not self._enough_of_stages() and waits_for_others(studies.values()):
                turn.extend(studies)
                continue
            if not waiting or self._enough_of_stages():
                break
            stage = waiting.popleft()
            studies[stage.template].tell(stage.values, self._relative(self._measure_stage(stage)))
        for study in studies.values():
            study.leave()
        self.learn_from_others()

    def _relative(self, time_us: float | None) -> float | None:
        return None if time_us is None else time_us / self._yardstick_us

    def _stage_study(self, space: StageSpace) -> PointStudy:
        context, template = self.context, space.template
        study = open_study(context, space.valid, context.effort.stage_trials, template.name, template.source_hash)
        for values in space.valid:
            row = self._known.get((Level.STAGE, Stage(template.name, values).digest))
            if row is not None:
                study.add_known(values, self._relative(self._note_stage(Stage(template.name, values), row)))
                self._count(row, reused=True)
        wanted = [
            template.default(self.case, context.limits),
            *(n[template.name] for n in self._neighbours if template.name in n),
        ]
        study.enqueue([values for values in wanted if study.holds(values)])
        return study

    def _measure_stage(self, stage: Stage) -> float | None:
        template = self._registry[stage.template]
        compiled = self.context.compiler.result(stage, self.case)
        if compiled.status is not Status.OK:
            outcome = TrialOutcome(compiled.status, compiled.reason, compile_s=compiled.seconds, facts=compiled.facts)
        else:
            best = min((time for _, time in self.stages[stage.template].values()), default=None)
            outcome = self._evaluate(stage, best)
            outcome = replace(outcome, compile_s=compiled.seconds, facts=compiled.facts)
        row = stage_row(self.case, template, stage.values, outcome, self._regime)
        if row.noisy:
            row = self._again(
                row,
                lambda: stage_row(
                    self.case,
                    template,
                    stage.values,
                    replace(self._evaluate(stage, None), compile_s=compiled.seconds, facts=compiled.facts),
                    self._regime,
                ),
            )
        value = self._note_stage(stage, row)
        self._finish(row)
        return value

    def _evaluate(self, candidate: Stage | FusionPlan, best_us: float | None) -> TrialOutcome:
        options = self.context.effort.measure
        if best_us is not None and self.context.measures:
            options = replace(options, cut_above_us=CUT_FACTOR * best_us)
        return self.context.device.evaluate(self.case, candidate, options, run_limit_s=self._run_limit_s(best_us))

    def _run_limit_s(self, best_us: float | None) -> float:
        return run_limit_s(best_us) if self.context.measures else 120.0

    @property
    def _regime(self) -> str:
        return self.context.effort.measure.regime_name

    def _again(self, doubted: TrialRow, measure: Callable[[], TrialRow]) -> TrialRow:
        """A time taken under throttle or contention is kept, marked, and taken once more."""
        self.context.record_trial(self.case, doubted)
        return replace(measure(), attempt=2)

    def _note_stage(self, stage: Stage, row: TrialRow) -> float | None:
        if row.status is not Status.OK or row.median_us is None:
            return None
        self.stages[stage.template][stage.digest] = (stage, row.median_us)
        self._costs[stage.digest] = (row.registers or 0, row.shared_memory_bytes or 0)
        return row.median_us

    def _search_plans(self) -> None:
        ranked = self.best_stages(self.context.effort.kept_per_stage)
        composed = compositions(self._registry, self.case, ranked)
        if not composed:
            return
        limit = PLAN_MARGIN * composed[0][0] if self.context.measures else float("inf")
        may = self.context.may_measure
        plans = {plan.digest: plan for total, plan in composed if total <= limit and may(self.case, plan)}
        if not plans:
            return
        points = {digest: coordinates(plan, ranked) for digest, plan in plans.items()}
        budget = self.context.effort.plan_trials
        # boards whose ranks differ are no help to each other: their coordinates name other plans
        names = sorted(f"{digest} {point}" for digest, point in points.items())
        study = open_study(self.context, list(points.values()), budget, "plans", *names)
        study.enqueue(list(points.values())[: max(1, budget // 2)])
        by_point = {key_of(point): plans[digest] for digest, point in points.items()}
        while not self.out_of_time():
            point = study.ask()
            if point is not None:
                study.tell(point, self._relative(self._measure_plan(by_point[key_of(point)])))
            elif not waits_for_others([study]):
                return

    def _measure_plan(self, plan: FusionPlan) -> float | None:
        """Time of the whole block; answered from what is known where it is known."""
        if plan.digest in self.plans:
            return self.plans[plan.digest][1]
        row = self._known.get((Level.PLAN, plan.digest))
        if row is not None:
            self._count(row, reused=True)
        else:
            failure = self._compile_all(plan)
            best = min((time for _, time in self.plans.values()), default=None)
            outcome = failure or self._evaluate(plan, best)
            row = plan_row(self.case, self.context.family, plan, outcome, self._regime)
            if row.noisy:
                row = self._again(
                    row,
                    lambda: plan_row(self.case, self.context.family, plan, self._evaluate(plan, None), self._regime),
                )
            self._finish(row)
        return self._note_plan(plan, row)

    def _note_plan(self, plan: FusionPlan, row: TrialRow) -> float | None:
        if row.status is not Status.OK or row.median_us is None:
            return None
        self.plans[plan.digest] = (plan, row.median_us)
        return row.median_us

    def _compile_all(self, plan: FusionPlan) -> TrialOutcome | None:
        for stage in plan.stages:
            self.context.compiler.submit(stage, self.case)
        for stage in plan.stages:
            compiled = self.context.compiler.result(stage, self.case)
            if compiled.status is not Status.OK:
                return TrialOutcome(compiled.status, f"{stage.template}: {compiled.reason}", compile_s=compiled.seconds)
        return None

    def _finish(self, row: TrialRow) -> None:
        """Stored before anything else happens, so that nothing finished is ever lost."""
        self.context.record_trial(self.case, row)
        if self._left is not None:
            self._left -= 1
        self._count(row, reused=False)

    def _count(self, row: TrialRow, *, reused: bool) -> None:
        self.counts[row.status.value] += 1
        self.reused += reused
        best = min((time for _, time in self.plans.values()), default=None)
        self.context.progress.trial_ended(self.case, row, best)
