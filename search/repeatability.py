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
    """Interquartile range of repeated medians over their median."""
    medians = [median(session.evaluate(case, plan, OPTIONS, run_limit_s=30).samples_us) for _ in range(count)]
    first, middle, third = quantiles(medians, n=4)
    return {"case": case.name, "median_us": middle, "iqr_percent": 100 * (third - first) / middle}
