"""The final of one case: the best plans, the default, the incumbent and the baselines, interleaved; then the record."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tilewright.db.rows import RecordRow, Status, Verdict
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.case_search import CaseSearch
from tilewright.search.context import Context, StrictOutcome
from tilewright.search.final import MIN_ROUNDS, Decision, Interval, decide
from tilewright.search.outcome import PROTOCOL, FinalEntry, FinalSamples

FINAL_TIME_BUDGET_S = 60.0


@dataclass(frozen=True)
class FinalResult:
    """The record to activate; None with a message when no plan is fit to serve."""

    record: RecordRow | None
    message: str = ""


def run_final(context: Context, search: CaseSearch, incumbent: FusionPlan | None) -> FinalResult:
    """Times the contestants, verifies the winner strictly; one that fails is struck out and the rest decide again."""
    case = search.case
    entries = contestants(context, search, incumbent)
    if not any(entry.plan is not None for entry in entries):
        return FinalResult(None, "no valid plan was found")
    context.progress.phase_begins(case, "final")
    samples = context.device.final(
        case,
        entries,
        rounds=context.effort.rounds if context.measures else MIN_ROUNDS,
        options=context.effort.measure,
        time_budget_s=FINAL_TIME_BUDGET_S,
    )
    struck: list[str] = []
    while True:
        alive = [entry for entry in entries if entry.name not in struck]
        if not any(entry.plan is not None and entry.name in samples.rounds for entry in alive):
            reasons = "; ".join(f"{name}: {why}" for name, why in samples.failures.items())
            return FinalResult(None, f"no plan survived the final: {reasons}"[:500])
        decision = _decide(context, alive, samples)
        plan = next(entry.plan for entry in alive if entry.name == decision.winner)
        assert plan is not None
        strict = context.device.verify_strict(case, plan)
        if strict.status is Status.OK:
            return FinalResult(_record(context, case, plan, strict, decision, alive, samples))
        context.progress.says(f"{case.name}: {plan.label} failed strict verification: {strict.reason}")
        samples.failures[decision.winner] = strict.reason
        struck.append(decision.winner)


def contestants(context: Context, search: CaseSearch, incumbent: FusionPlan | None) -> list[FinalEntry]:
    """Each plan once: as incumbent before default before candidate."""
    plans: dict[str, FinalEntry] = {}

    def add(plan: FusionPlan, source: str) -> None:
        plans.setdefault(plan.digest, FinalEntry(plan.digest, plan, source, search.cost(plan)))

    if incumbent is not None:
        add(incumbent, "incumbent")
    if search.default.digest in search.plans:
        add(search.default, "default")
    for plan in search.best_plans(context.effort.finalists):
        add(plan, "candidate")
    baselines = [FinalEntry(name, None, "baseline") for name in context.baselines]
    return [*plans.values(), *baselines]


def _decide(context: Context, entries: list[FinalEntry], samples: FinalSamples) -> Decision:
    decision = decide(entries, samples, min_gain=context.min_gain)
    if context.measures:
        return decision
    holder = next((e for e in entries if e.source in ("default", "incumbent") and e.name in samples.rounds), None)
    winner = holder.name if holder else decision.winner
    return Decision(winner, Verdict.UNMEASURED, {}, {}, "", (), "times here are no measurements")


def _record(
    context: Context,
    case: WorkloadCase,
    plan: FusionPlan,
    strict: StrictOutcome,
    decision: Decision,
    entries: list[FinalEntry],
    samples: FinalSamples,
) -> RecordRow:
    won = decision.times.get(decision.winner)
    default_plan = context.family.registry.default_plan(case, context.limits, kinds=context.kinds)
    default = decision.times.get(default_plan.digest)
    baseline = decision.times.get(decision.best_baseline)
    return RecordRow(
        case_key=case.key,
        plan=plan.to_json(),
        digest=plan.digest,
        source_hash=context.family.registry.source_hash(plan),
        verdict=decision.verdict,
        regime=context.effort.measure.regime_name,
        weight_mode=case.weight_mode,
        median_us=won.median if won else None,
        low_us=won.low if won else None,
        high_us=won.high if won else None,
        default_us=default.median if default else None,
        baseline=decision.best_baseline,
        baseline_us=baseline.median if baseline else None,
        floor_us=case.floor_us(context.ceilings) if context.ceilings and context.measures else None,
        deterministic=strict.deterministic,
        evidence=_evidence(context, decision, entries, samples),
        created_at=datetime.now(UTC),
    )


def _evidence(context: Context, decision: Decision, entries: list[FinalEntry], samples: FinalSamples) -> dict[str, Any]:
    finalists = [
        {
            "name": entry.name,
            "label": entry.plan.label if entry.plan else entry.name,
            "plan": entry.plan.to_json() if entry.plan else None,
            "source": entry.source,
            "time_us": _interval(decision.times.get(entry.name)),
            "ratio_to_holder": _interval(decision.ratios.get(entry.name)),
            "failure": samples.failures.get(entry.name, ""),
        }
        for entry in entries
    ]
    return {
        "protocol": PROTOCOL,
        "rounds": min((len(times) for times in samples.rounds.values()), default=0),
        "reason": decision.reason,
        "ties": list(decision.ties),
        "noisy": samples.noisy,
        "seed": context.seed,
        "effort": context.effort.name,
        "finalists": finalists,
        "failures": dict(samples.failures),
    }


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [round(x, 4) for x in (interval.median, interval.low, interval.high)]
