"""Two sets of records side by side: runs, environments or files. Times only where the hardware is the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Any

from tilewright.db.rows import StoredRecord
from tilewright.report.listing import Column, Listing

_SAME = (
    Column("case", "case"),
    Column("a_us", "A us", "{:.1f}"),
    Column("b_us", "B us", "{:.1f}"),
    Column("ratio", "B / A", "{:.3f}"),
    Column("judgement", "B is"),
    Column("a_sol", "A % SOL", "{:.0f}"),
    Column("b_sol", "B % SOL", "{:.0f}"),
    Column("plans", "plans", elastic=True),
)
_OTHER = tuple(column for column in _SAME if column.key not in ("ratio",))


@dataclass(frozen=True)
class Side:
    """One of the two, under the name that the user gave it."""

    name: str
    records: Sequence[StoredRecord]

    def by_case(self) -> Mapping[tuple[str, ...], StoredRecord]:
        """The newest sound record of each problem, case, regime and weight mode."""
        found: dict[tuple[str, ...], StoredRecord] = {}
        for stored in sorted(self.records, key=_when):
            if not stored.invalid:
                record = stored.record
                found[stored.problem, record.case_key, record.regime, record.weight_mode] = stored
        return found

    @property
    def hardware(self) -> frozenset[tuple[str, ...]]:
        """GPU, slice and compiler: what must be equal for times to compare."""
        return frozenset(
            (s.environment.kind, s.environment.gpu_name, s.environment.mig, s.environment.triton) for s in self.records
        )


def _when(stored: StoredRecord) -> float:
    created = stored.record.created_at
    return created.timestamp() if created else 0.0


def compare(a: Side, b: Side) -> Listing:
    """Case by case; `faster` and `slower` only where the 95 % intervals part. A row that one side lacks says so."""
    left, right = a.by_case(), b.by_case()
    rows = [_row(left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys())]
    rows.sort(key=lambda row: (row["problem"], tuple(row["axes"].values()), row["case"]))
    cards = {(one[1], one[2]) for one in a.hardware | b.hardware}
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    mean = exp(fmean(log(ratio) for ratio in ratios)) if ratios else None
    head = (f"A = {a.name}: {_places(a)}", f"B = {b.name}: {_places(b)}")
    foot = [f"{len(ratios)} cases compared" + (f", geometric mean of B / A {mean:.3f}" if mean is not None else "")]
    if len(cards) > 1:
        foot.append("different hardware: times do not compare across it, % of speed of light does")
    facts = {
        "a": {"name": a.name, "places": _places(a)},
        "b": {"name": b.name, "places": _places(b)},
        "same_hardware": len(cards) <= 1,
        "geomean_ratio": mean,
    }
    return Listing("compare", _SAME if len(cards) <= 1 else _OTHER, rows, head=head, foot=tuple(foot), facts=facts)


def _places(side: Side) -> str:
    texts = sorted(f"{gpu}{f' MIG {mig}' if mig else ''}, Triton {triton}" for _, gpu, mig, triton in side.hardware)
    return "; ".join(texts) or "no records"


def _row(a: StoredRecord | None, b: StoredRecord | None) -> dict[str, Any]:
    either = a or b
    assert either is not None
    a_us, b_us = _time(a), _time(b)
    same = a is not None and b is not None and _card(a) == _card(b)
    return {
        "problem": either.problem,
        "case": either.case_name,
        "axes": dict(either.axes),
        "regime": either.record.regime,
        "weight_mode": either.record.weight_mode,
        "a_us": a_us,
        "b_us": b_us,
        "ratio": b_us / a_us if same and a_us and b_us else None,
        "judgement": _judgement(a, b),
        "a_sol": _sol(a),
        "b_sol": _sol(b),
        "plans": _plans(a, b),
    }


def _card(stored: StoredRecord) -> tuple[str, str]:
    return stored.environment.gpu_name, stored.environment.mig


def _time(stored: StoredRecord | None) -> float | None:
    return stored.record.median_us if stored is not None and stored.environment.kind == "cuda" else None


def _sol(stored: StoredRecord | None) -> float | None:
    time_us, floor_us = _time(stored), stored.record.floor_us if stored else None
    return 100 * floor_us / time_us if time_us and floor_us else None


def _judgement(a: StoredRecord | None, b: StoredRecord | None) -> str:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    if _time(a) is None or _time(b) is None:
        return "unmeasured"
    if _card(a) != _card(b):
        return "elsewhere"
    bounds = (a.record.low_us, a.record.high_us, b.record.low_us, b.record.high_us)
    if any(bound is None for bound in bounds):
        return "unknown"
    a_low, a_high, b_low, b_high = (float(bound) for bound in bounds if bound is not None)
    return "faster" if b_high < a_low else "slower" if b_low > a_high else "same"


def _plans(a: StoredRecord | None, b: StoredRecord | None) -> str:
    if a is None or b is None:
        return ""
    if a.record.digest == b.record.digest:
        return "same plan"
    names = [[str(stage.get("template", "?")) for stage in one.record.plan] for one in (a, b)]
    return "same templates" if names[0] == names[1] else " | ".join(names[0]) + " -> " + " | ".join(names[1])
