"""How far a card's times repeat: one plan against itself, and one plan again and again."""

from statistics import median, quantiles
from typing import Any

from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.final import decide, ratio_interval
from tilewright.search.outcome import FinalEntry, MeasureOptions
from tilewright.search.session import DeviceSession

OPTIONS = MeasureOptions(min_samples=10, max_samples=20, budget_ms=20)


def twins(session: DeviceSession, case: WorkloadCase, plan: FusionPlan, count: int) -> dict[str, Any]:
    """Finals of one plan against itself: either may be called faster, and neither should be."""
    different, ratios = 0, []
    entries = [FinalEntry("a", plan, "default"), FinalEntry("b", plan, "candidate")]
    exchanged = [FinalEntry("b", plan, "default"), FinalEntry("a", plan, "candidate")]
    for seed in range(count):
        samples = session.final(case, entries, rounds=40, options=OPTIONS, time_budget_s=20, seed=seed)
        ratio = ratio_interval(samples.rounds["b"], samples.rounds["a"])
        ratios.append(ratio.median)
        different += decide(entries, samples).winner == "b" or decide(exchanged, samples).winner == "a"
    return {
        "case": case.name,
        "finals": count,
        "called_different": different,
        "worst_ratio": max(ratios, key=lambda r: abs(r - 1)),
    }


def noise_floor(session: DeviceSession, case: WorkloadCase, plan: FusionPlan, count: int = 20) -> dict[str, Any]:
    """Interquartile ranges, percent: of repeated medians, and of the ratios that decide.

    `iqr_percent` is of medians taken alone, one after the other: a card near its power limit changes its clock, and
    they drift with it. `paired_iqr_percent` is of the plan against itself in `count` interleaved contests.
    """
    medians = [median(session.evaluate(case, plan, OPTIONS, run_limit_s=30).samples_us) for _ in range(count)]
    entries = [FinalEntry("a", plan, "default"), FinalEntry("b", plan, "candidate")]
    ratios = []
    for seed in range(count):
        rounds = session.final(case, entries, rounds=20, options=OPTIONS, time_budget_s=20, seed=seed).rounds
        ratios.append(median(rounds["b"]) / median(rounds["a"]))
    return {
        "case": case.name,
        "median_us": median(medians),
        "iqr_percent": 100 * _iqr(medians) / median(medians),
        "paired_iqr_percent": 100 * _iqr(ratios),
    }


def _iqr(values: list[float]) -> float:
    first, _, third = quantiles(values, n=4)
    return third - first
