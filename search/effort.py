"""How much to spend: the three efforts of the command line."""

from dataclasses import dataclass

from tilewright.errors import UsageError
from tilewright.search.outcome import MeasureOptions


@dataclass(frozen=True)
class Effort:
    """Budgets of one case. `stage_trials` counts per template, rounds are those of the paired final."""

    name: str
    stage_trials: int
    plan_trials: int
    kept_per_stage: int  # best configs of each template that plans are composed of
    finalists: int
    rounds: int
    measure: MeasureOptions
    whole_space: bool = False  # every valid config, or stage_trials of them that fill the space evenly


EFFORTS = {
    "quick": Effort("quick", 16, 8, 2, 4, 40, MeasureOptions(min_samples=8, max_samples=16, budget_ms=15, warmup_ms=5)),
    "standard": Effort(
        "standard", 48, 16, 3, 8, 100, MeasureOptions(min_samples=10, max_samples=30, budget_ms=40, warmup_ms=10)
    ),
    "full": Effort("full", 256, 40, 4, 8, 100, MeasureOptions()),
}
SPACE = Effort("space", 2000, 40, 4, 8, 100, MeasureOptions(), whole_space=True)  # of `record --space`
CUT_FACTOR = 3.0  # a candidate this many times slower than the best of its kind is cut after its first samples


def effort_named(name: str) -> Effort:
    if name == SPACE.name:
        return SPACE
    if name not in EFFORTS:
        raise UsageError(f"effort must be one of {', '.join(EFFORTS)}, got {name!r}")
    return EFFORTS[name]


def run_limit_s(best_us: float | None) -> float:
    """Longest that one evaluation may hold the device, seconds: five, or twenty times 100 runs of the best."""
    return 5.0 if best_us is None else max(5.0, 20 * 100 * best_us * 1e-6)
