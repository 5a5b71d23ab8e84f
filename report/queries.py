"""What the records say: the best plan of each case, and what a suite amounts to on one card. Pure functions.

Rows are gathered by problem, card, compiler and regime, and numbers never cross such a group. Records of the
interpreter say that a plan is correct and nothing about speed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from math import exp, log
from statistics import mean

from tilewright.db.environment import Environment
from tilewright.db.rows import RecordRow, StoredRecord, Trust, Verdict
from tilewright.errors import ProblemError
from tilewright.problem import Problem, load_problem

NOISE_GRADES = (("A", 0.5), ("B", 1.0), ("C", 2.0))  # half of the 95 % interval, percent of the median


@dataclass(frozen=True)
class Sourced:
    """A stored record and where it was read: `database` or `shipped`."""

    source: str
    stored: StoredRecord


@dataclass(frozen=True)
class BestRow:
    """The record of one case in one group. Times in microseconds, None where they are no measurements."""

    case: str
    case_key: str
    axes: Mapping[str, int]
    weight_mode: str
    label: str
    source: str
    verdict: Verdict
    verified: bool
    deterministic: bool
    invalid: str
    median_us: float | None
    low_us: float | None
    high_us: float | None
    default_us: float | None
    baseline: str
    baseline_us: float | None
    floor_us: float | None
    created_at: datetime | None
    digest: str
    ties: tuple[str, ...] | None = None  # plans of the final that this one does not beat beyond noise
    disturbed: str = ""  # what made the final's times doubtful
    trust: str = Trust.MEASURED
    record_id: int | None = None
    run_id: int | None = None

    @property
    def noise(self) -> str:
        """Grade of the interval's half width: A to 0.5 %, B to 1 %, C to 2 %, D above; `!` where it was disturbed."""
        width = self.half_width_percent
        if width is None:
            return ""
        return next((grade for grade, most in NOISE_GRADES if width <= most), "D") + "!" * bool(self.disturbed)

    @property
    def speedup_default(self) -> float | None:
        return _quotient(self.default_us, self.median_us)

    @property
    def speedup_baseline(self) -> float | None:
        return _quotient(self.baseline_us, self.median_us)

    @property
    def half_width_percent(self) -> float | None:
        """Half of the 95 % interval over the median, percent."""
        if self.low_us is None or self.high_us is None or not self.median_us:
            return None
        return 50 * (self.high_us - self.low_us) / self.median_us

    @property
    def percent_sol(self) -> float | None:
        """Speed of light over the measured time, percent."""
        share = _quotient(self.floor_us, self.median_us)
        return None if share is None else 100 * share


@dataclass(frozen=True)
class Aggregate:
    """A suite on one card; `missing` names its cases without a record, and the mean is then not the public metric."""

    suite: str
    cases: int
    missing: tuple[str, ...]
    mean_us: float | None
    geomean_speedup_default: float | None
    geomean_speedup_baseline: float | None
    mean_percent_sol: float | None
    verified: int

    @property
    def complete(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Group:
    """Rows that may be compared with each other: one problem, card, compiler, regime and weight mode."""

    problem: str
    environment: Environment
    regime: str
    weight_mode: str
    rows: tuple[BestRow, ...]
    aggregate: Aggregate

    @property
    def measured(self) -> bool:
        """False where times are no measurements."""
        return self.environment.kind == "cuda"


def best_per_case(records: Iterable[Sourced]) -> tuple[Group, ...]:
    """Every case's record, in groups; of two records of one case the sound one, the earlier source, the newest wins."""
    grouped: dict[tuple[object, ...], list[Sourced]] = {}
    for sourced in records:
        stored = sourced.stored
        key = (stored.problem, *stored.environment.identity, stored.record.regime, stored.record.weight_mode)
        grouped.setdefault(key, []).append(sourced)
    groups = [_group(found) for found in grouped.values()]
    return tuple(
        sorted(groups, key=lambda g: (g.problem, not g.measured, g.environment.identity, g.regime, g.weight_mode))
    )


def chosen_records(records: Iterable[Sourced]) -> list[Sourced]:
    """One record of each case, environment and regime, as `best_per_case` chooses it."""
    found = list(records)
    order = {source: rank for rank, source in enumerate(dict.fromkeys(s.source for s in found))}
    chosen: dict[tuple[object, ...], Sourced] = {}
    for sourced in sorted(found, key=lambda s: (bool(s.stored.invalid), order[s.source], -_age(s.stored))):
        stored = sourced.stored
        chosen.setdefault((stored.record.case_key, *stored.environment.identity, stored.record.regime), sourced)
    return list(chosen.values())


def _group(found: list[Sourced]) -> Group:
    chosen = {sourced.stored.record.case_key: sourced for sourced in chosen_records(found)}
    newest = max(found, key=lambda s: _age(s.stored)).stored
    measured = newest.environment.kind == "cuda"
    rows = sorted((_row(s, measured) for s in chosen.values()), key=lambda r: (tuple(r.axes.values()), r.case_key))
    aggregate = _aggregate(newest.problem, newest.record.weight_mode, rows)
    return Group(
        newest.problem, newest.environment, newest.record.regime, newest.record.weight_mode, tuple(rows), aggregate
    )


def _age(stored: StoredRecord) -> float:
    return stored.record.created_at.timestamp() if stored.record.created_at else 0.0


def _row(sourced: Sourced, measured: bool) -> BestRow:
    stored, record = sourced.stored, sourced.stored.record
    sound = measured and not stored.invalid
    return BestRow(
        case=stored.case_name,
        case_key=record.case_key,
        axes=stored.axes,
        weight_mode=record.weight_mode,
        label=" | ".join(str(stage.get("template", "?")) for stage in record.plan),
        source=sourced.source,
        verdict=record.verdict,
        verified=not stored.invalid,
        deterministic=record.deterministic,
        invalid=stored.invalid,
        median_us=record.median_us if sound else None,
        low_us=record.low_us if sound else None,
        high_us=record.high_us if sound else None,
        default_us=record.default_us if sound else None,
        baseline=record.baseline,
        baseline_us=record.baseline_us if sound else None,
        floor_us=record.floor_us if sound else None,
        created_at=record.created_at,
        digest=record.digest,
        ties=_ties(record),
        disturbed=str(record.evidence.get("noisy", "")),
        trust=stored.trust,
        record_id=stored.id,
        run_id=stored.run_id,
    )


def _ties(record: RecordRow) -> tuple[str, ...] | None:
    """None where the evidence does not say."""
    ties = record.evidence.get("ties")
    return tuple(str(name) for name in ties) if isinstance(ties, list) else None


def _aggregate(problem: str, weight_mode: str, rows: list[BestRow]) -> Aggregate:
    """Over the suite that holds most of the rows; over all rows where the problem is not known here."""
    suite, wanted = _suite_of(problem, weight_mode, frozenset(row.case_key for row in rows))
    inside = [row for row in rows if not suite or row.case_key in wanted]
    usable = {row.case_key for row in inside if row.verified}
    return Aggregate(
        suite=suite,
        cases=len(wanted) if suite else len(rows),
        missing=tuple(name for key, name in wanted.items() if key not in usable),
        mean_us=_mean(row.median_us for row in inside),
        geomean_speedup_default=_geometric_mean(row.speedup_default for row in inside),
        geomean_speedup_baseline=_geometric_mean(row.speedup_baseline for row in inside),
        mean_percent_sol=_mean(row.percent_sol for row in inside),
        verified=len(usable),
    )


@cache
def known_problem(problem: str) -> Problem | None:
    try:
        return load_problem(problem)
    except ProblemError:
        return None


def _suite_of(problem: str, weight_mode: str, keys: frozenset[str]) -> tuple[str, Mapping[str, str]]:
    """The best covered suite, as case keys and names; an empty name where no suite holds any of the rows."""
    known = known_problem(problem)
    best: tuple[str, Mapping[str, str]] = ("", {})
    most = 0
    for name in known.suites if known else ():
        assert known is not None
        cases = known.suite(name, weight_mode="packed" if weight_mode == "packed" else "separate")
        wanted = {case.key: case.name for case in cases}
        covered = len(keys & wanted.keys())
        if covered > most:
            best, most = (name, wanted), covered
    return best


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value]
    return exp(mean(log(value) for value in known)) if known else None
