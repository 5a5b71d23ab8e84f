"""Is a record still worth serving? Judged from rounds of its plan, the default plan and the baselines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.db.rows import StoredRecord, Verdict
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.final import MIN_ROUNDS, Interval, median_interval, ratio_interval
from tilewright.search.outcome import FinalSamples

RECORD, DEFAULT = "record", "default"


@dataclass(frozen=True)
class Subject:
    """A case and the record that serves it here; an objection says why none does, and nothing is timed then. A stale
    one was made with another compiler or source."""

    case: WorkloadCase
    plan: FusionPlan
    record: StoredRecord | None
    objection: str = ""
    stale: bool = False


@dataclass(frozen=True)
class Verified:
    """The outcome for one case; times in microseconds, ratios are the record's over the other's, round by round."""

    subject: Subject
    keep: bool
    reason: str
    times: Mapping[str, Interval] = field(default_factory=dict)
    ratios: Mapping[str, Interval] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    noisy: str = ""

    @property
    def case(self) -> WorkloadCase:
        return self.subject.case

    @property
    def word(self) -> str:
        return "keep" if self.keep else "retune"

    @property
    def drift(self) -> float | None:
        """Its time now over the time that the record states."""
        record = self.subject.record
        stated = record.record.median_us if record else None
        return self.times[RECORD].median / stated if stated and RECORD in self.times else None

    def to_json(self) -> dict[str, Any]:
        record = self.subject.record
        return {
            "case": self.case.name,
            "key": self.case.key,
            "verdict": self.word,
            "reason": self.reason,
            "label": self.subject.plan.label,
            "digest": record.record.digest if record else None,
            "recorded_us": record.record.median_us if record else None,
            "drift": None if self.drift is None else round(self.drift, 4),
            "times_us": {name: _json(interval) for name, interval in self.times.items()},
            "ratios": {name: _json(interval) for name, interval in self.ratios.items()},
            "failures": dict(self.failures),
            "noisy": self.noisy,
        }


def judge(subject: Subject, samples: FinalSamples, *, min_gain: float) -> Verified:
    """Retune where the plan fails, where the default is faster beyond noise by `min_gain`, or where a baseline is
    that the record claims to beat; else keep."""
    rounds = {name: times for name, times in samples.rounds.items() if len(times) >= MIN_ROUNDS}
    times = {name: median_interval(values) for name, values in rounds.items()}
    if RECORD not in rounds:
        reason = samples.failures.get(RECORD, "it was not timed")
        return Verified(subject, False, f"the plan fails: {reason}", times, failures=samples.failures)
    ratios = {name: ratio_interval(rounds[RECORD], values) for name, values in rounds.items() if name != RECORD}
    assert subject.record is not None
    baselines = sorted((name for name in ratios if name != DEFAULT), key=lambda name: times[name].median)
    rivals = [name for name in (DEFAULT,) if name in ratios]
    if subject.record.record.verdict is Verdict.BEATS_ALL:
        rivals += baselines[:1]
    lost = next((name for name in rivals if _loses(ratios[name], min_gain)), None)
    reason = f"{lost} takes {1 / ratios[lost].median:.1%} of its time" if lost else _kept(ratios, baselines)
    return Verified(subject, lost is None, reason, times, ratios, dict(samples.failures), samples.noisy)


def _loses(ratio: Interval, min_gain: float) -> bool:
    """The record's time is above the other's beyond noise, and by as much as a challenger would need."""
    return ratio.low > 1 and ratio.median >= 1 / (1 - min_gain)


def _kept(ratios: Mapping[str, Interval], baselines: list[str]) -> str:
    compared = [name for name in (DEFAULT, *baselines[:1]) if name in ratios]
    return ", ".join(f"{ratios[name].median:.3f} of {name}" for name in compared) or "right, and it is the default plan"


def _json(interval: Interval) -> dict[str, float]:
    return {"median": round(interval.median, 4), "low": round(interval.low, 4), "high": round(interval.high, 4)}
