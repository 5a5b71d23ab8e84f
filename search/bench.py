"""Our records against what a user would run instead: interleaved, same inputs, one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Any

from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import Ceilings, WorkloadCase
from tilewright.search.context import Device
from tilewright.search.final import MIN_ROUNDS, Interval, median_interval, ratio_interval
from tilewright.search.outcome import FinalEntry, FinalSamples, MeasureOptions

OURS = "tilewright"
TIME_BUDGET_S = 45.0


@dataclass(frozen=True)
class BenchCase:
    """One case: times in microseconds, ratios are ours over the baseline, round by round."""

    case: WorkloadCase
    plan: FusionPlan
    grade: str
    times: dict[str, Interval]
    ratios: dict[str, Interval]
    floor_us: float | None
    rounds: int
    failures: dict[str, str]
    noisy: str

    @property
    def best_baseline(self) -> str | None:
        return min((n for n in self.times if n != OURS), key=lambda name: self.times[name].median, default=None)

    @property
    def ratio(self) -> float | None:
        """Ours over the best baseline, paired; None where either is missing."""
        return self.ratios[self.best_baseline].median if self.best_baseline in self.ratios else None

    @property
    def summary(self) -> str:
        """One line for whoever watches; no time where times are no measurements."""
        if self.floor_us is None:
            return "ran" if OURS in self.times else f"failed: {self.failures}"
        return "no comparison" if self.ratio is None else f"{self.ratio:.3f} of {self.best_baseline}"

    def to_json(self) -> dict[str, Any]:
        ours = self.times.get(OURS)
        return {
            "case": self.case.name,
            "axes": dict(self.case.shape_axes),
            "plan": self.plan.to_json(),
            "label": self.plan.label,
            "grade": self.grade,
            "times_us": {name: _json(interval) for name, interval in self.times.items()},
            "ratios": {name: _json(interval) for name, interval in self.ratios.items()},
            "best_baseline": self.best_baseline,
            "ratio_to_best": None if self.ratio is None else round(self.ratio, 4),
            "floor_us": None if self.floor_us is None else round(self.floor_us, 2),
            "percent_sol": round(100 * self.floor_us / ours.median, 1) if self.floor_us and ours else None,
            "rounds": self.rounds,
            "failures": self.failures,
            "noisy": self.noisy,
        }

    def unmeasured_json(self) -> dict[str, Any]:
        """What ran, without times."""
        shown = ("case", "axes", "plan", "label", "grade", "failures")
        return {**{name: self.to_json()[name] for name in shown}, "ran": sorted(self.times)}


def bench_case(
    device: Device,
    case: WorkloadCase,
    plan: FusionPlan,
    grade: str,
    *,
    baselines: Sequence[str],
    rounds: int,
    options: MeasureOptions,
    ceilings: Ceilings | None,
) -> BenchCase:
    """Times one plan and the baselines of its case in shuffled, interleaved rounds."""
    entries = [FinalEntry(OURS, plan, "candidate"), *(FinalEntry(name, None, "baseline") for name in baselines)]
    samples = device.final(case, entries, rounds=rounds, options=options, time_budget_s=TIME_BUDGET_S)
    return summarise(case, plan, grade, samples, ceilings)


def summarise(
    case: WorkloadCase, plan: FusionPlan, grade: str, samples: FinalSamples, ceilings: Ceilings | None
) -> BenchCase:
    """Medians and paired ratios of one case's rounds."""
    rounds = {name: times for name, times in samples.rounds.items() if len(times) >= MIN_ROUNDS}
    times = {name: median_interval(values) for name, values in rounds.items()}
    ratios = {}
    if OURS in rounds:
        ratios = {name: ratio_interval(rounds[OURS], values) for name, values in rounds.items() if name != OURS}
    count = min((len(values) for values in rounds.values()), default=0)
    floor = case.floor_us(ceilings) if ceilings else None
    return BenchCase(case, plan, grade, times, ratios, floor, count, dict(samples.failures), samples.noisy)


@dataclass(frozen=True)
class BenchReport:
    """All cases of a bench; aggregates speak of the cases in which ours and a baseline finished."""

    problem: str
    environment: dict[str, Any]
    protocol: dict[str, Any]
    cases: tuple[BenchCase, ...]
    tool_version: str
    finished_at: str
    measures: bool = True  # False: the times only show that everything runs

    @property
    def compared(self) -> list[BenchCase]:
        return [case for case in self.cases if case.ratio is not None]

    @property
    def worst_ratio(self) -> float:
        return max((case.ratio for case in self.compared if case.ratio is not None), default=float("inf"))

    def aggregates(self) -> dict[str, Any]:
        compared = self.compared
        if not compared:
            return {"cases": 0}
        ours = fmean(case.times[OURS].median for case in compared)
        best = fmean(case.times[str(case.best_baseline)].median for case in compared)
        names = sorted({name for case in compared for name in case.times})
        return {
            "cases": len(compared),
            "mean_us": {n: _mean([c.times[n].median for c in compared if n in c.times], len(compared)) for n in names},
            "mean_best_baseline_us": round(best, 2),
            "ratio_of_means": round(ours / best, 4),
            "geomean_speedup": round(exp(fmean(-log(case.ratio) for case in compared if case.ratio)), 4),
            "worst_ratio": round(self.worst_ratio, 4),
            "baselines_failed": {c.case.name: sorted(set(c.failures) - {OURS}) for c in compared if c.failures},
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "tilewright.bench/1",
            "tool_version": self.tool_version,
            "finished_at": self.finished_at,
            "problem": self.problem,
            "environment": self.environment,
            "protocol": self.protocol,
            "measures": self.measures,
            "aggregates": self.aggregates() if self.measures else {},
            "cases": [case.to_json() if self.measures else case.unmeasured_json() for case in self.cases],
        }

    def text(self) -> str:
        """A table of 80 columns."""
        if not self.measures:
            return "\n".join(
                f"{case.case.name:<9} {'ran' if OURS in case.times else f'failed: {case.failures}'}  {case.plan.label}"
                for case in self.cases
            )
        lines = [f"{'case':<9}{'ours us':>9}{'best us':>9}  {'baseline':<26}{'ratio':>7}  {'95 %':<13}{'SOL':>5}"]
        for case in self.cases:
            ours, best = case.times.get(OURS), case.best_baseline
            if ours is None or best is None or case.ratio is None:
                reasons = "; ".join(f"{name}: {why}" for name, why in case.failures.items())
                lines.append(f"{case.case.name:<9} no comparison: {reasons}"[:80])
                continue
            ratio = case.ratios[best]
            sol = f"{case.floor_us / ours.median:5.0%}" if case.floor_us else ""
            lines.append(
                f"{case.case.name:<9}{ours.median:9.1f}{case.times[best].median:9.1f}  {best:<26}"
                f"{ratio.median:7.3f}  {ratio.low:.3f}-{ratio.high:.3f}  {sol}"
            )
        for name, value in self.aggregates().items():
            lines.append(f"{name}: {value}")
        return "\n".join(lines)


def run_cases(
    cases: Sequence[WorkloadCase],
    plan_for: Callable[[WorkloadCase], tuple[FusionPlan, str]],
    *,
    says: Callable[[str], None],
    **settings: Any,
) -> tuple[BenchCase, ...]:
    """`plan_for` gives the plan that the runtime would serve, and its grade."""
    results = []
    for case in cases:
        plan, grade = plan_for(case)
        result = bench_case(case=case, plan=plan, grade=grade, **settings)
        says(f"{case.name}: {result.summary}")
        results.append(result)
    return tuple(results)


def _mean(values: list[float], wanted: int) -> float | None:
    """Mean over all cases; None where some case lacks the contestant: such a mean would compare different work."""
    return round(fmean(values), 2) if len(values) == wanted else None


def _json(interval: Interval) -> dict[str, float]:
    return {"median": round(interval.median, 4), "low": round(interval.low, 4), "high": round(interval.high, 4)}
