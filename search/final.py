"""The statistics of a final: medians with intervals, paired comparisons, and who becomes the record.

Intervals are order statistics (the sign test turned around): exact for any distribution of times, and deterministic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tilewright.db.rows import Verdict
from tilewright.search.outcome import FinalEntry, FinalSamples

CONFIDENCE = 0.95
MIN_GAIN = 0.01
MIN_ROUNDS = 6  # fewer give no 95 % interval at all


@dataclass(frozen=True)
class Interval:
    """A median with the bounds of its 95 % interval."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Distribution-free interval of the median; raises ValueError below MIN_ROUNDS values."""
    count = len(values)
    if count < MIN_ROUNDS:
        raise ValueError(f"an interval needs at least {MIN_ROUNDS} values, got {count}")
    ordered = sorted(values)
    rank = interval_rank(count)
    return Interval(median(ordered), ordered[rank], ordered[count - 1 - rank])


def interval_rank(count: int) -> int:
    """Largest k for which [x(k), x(n-1-k)] still covers the median with the wanted confidence."""
    tail, rank = 0.0, 0
    for k in range(count // 2):
        tail += math.comb(count, k) * 0.5**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank = k
    return rank


def ratio_interval(times: Sequence[float], reference: Sequence[float]) -> Interval:
    """Paired: time over reference, round by round; below 1 is faster."""
    return median_interval([a / b for a, b in zip(times, reference, strict=True)])


@dataclass(frozen=True)
class Decision:
    """The outcome of a final: the winner by name, why, and everything a reader needs to doubt it."""

    winner: str
    verdict: Verdict
    times: dict[str, Interval]
    ratios: dict[str, Interval]  # each contestant over the holder (incumbent, else default)
    best_baseline: str
    ties: tuple[str, ...]  # plans that the winner does not beat beyond noise
    reason: str


def decide(entries: Sequence[FinalEntry], samples: FinalSamples, *, min_gain: float = MIN_GAIN) -> Decision:
    """A challenger wins only if it beats incumbent and default beyond noise, by at least `min_gain`.

    A baseline cannot be served, so it does not keep a faster plan out: the verdict says whether it was beaten too.
    """
    alive = [entry for entry in entries if entry.name in samples.rounds]
    plans = [entry for entry in alive if entry.plan is not None]
    if not plans:
        raise ValueError("no plan finished the final")
    holder = _holder(plans)
    times = {entry.name: median_interval(samples.rounds[entry.name]) for entry in alive}
    ratios = {e.name: ratio_interval(samples.rounds[e.name], samples.rounds[holder.name]) for e in alive}
    baselines = sorted((e.name for e in alive if e.plan is None), key=lambda name: times[name].median)
    rivals = [entry.name for entry in plans if entry is holder or entry.source == "default"]
    winner, reason = holder, ""
    challengers = sorted((e for e in plans if e is not holder), key=lambda e: (times[e.name].median, e.name))
    losses = {entry.name: _lost_to(samples, entry.name, rivals, min_gain) for entry in challengers}
    beating = [entry for entry in challengers if losses[entry.name] is None]
    if beating:
        equal = [e for e in beating if e is beating[0] or _ties(samples, beating[0].name, e.name)]
        winner = min(equal, key=lambda e: (e.cost, e.name))  # of equals, the one that leaves most of the card free
    elif challengers:
        rival = losses[challengers[0].name]
        reason = f"fastest challenger is not faster than {rival} beyond noise and {min_gain:.0%}"
    ties = tuple(e.name for e in plans if e is not winner and _ties(samples, winner.name, e.name))
    beaten = not baselines or _lost_to(samples, winner.name, baselines[:1], 0.0) is None
    verdict = _verdict(winner, holder, beats_baseline=beaten)
    return Decision(winner.name, verdict, times, ratios, (baselines or [""])[0], ties, reason)


def _holder(plans: Sequence[FinalEntry]) -> FinalEntry:
    """Who is to be beaten: the incumbent, else the default, else the first."""
    for source in ("incumbent", "default"):
        for entry in plans:
            if entry.source == source:
                return entry
    return plans[0]


def _ties(samples: FinalSamples, name: str, other: str) -> bool:
    """True when `name` is not faster beyond noise."""
    return ratio_interval(samples.rounds[name], samples.rounds[other]).high >= 1


def _lost_to(samples: FinalSamples, name: str, rivals: Sequence[str], min_gain: float) -> str | None:
    for rival in rivals:
        ratio = ratio_interval(samples.rounds[name], samples.rounds[rival])
        if ratio.high >= 1 or ratio.median > 1 - min_gain:
            return rival
    return None


def _verdict(winner: FinalEntry, holder: FinalEntry, *, beats_baseline: bool) -> Verdict:
    if winner is not holder:
        return Verdict.BEATS_ALL if beats_baseline else Verdict.BEATS_DEFAULT
    return Verdict.INCUMBENT_KEPT if holder.source == "incumbent" else Verdict.DEFAULT_KEPT
