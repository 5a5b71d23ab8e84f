"""The records that a case has had, oldest first, each beside the one before it."""

from collections.abc import Sequence
from typing import Any

from tilewright.report.listing import Column, Listing
from tilewright.report.queries import Sourced

_COLUMNS = (
    Column("created", "created"),
    Column("median_us", "median us", "{:.1f}"),
    Column("change", "change", "{:+.1%}"),
    Column("verdict", "verdict"),
    Column("state", "state"),
    Column("plan", "plan", elastic=True),
    Column("low_us", "low us", "{:.1f}", wide=True),
    Column("high_us", "high us", "{:.1f}", wide=True),
    Column("trust", "trust", wide=True),
    Column("gpu", "gpu", wide=True),
    Column("triton", "triton", wide=True),
    Column("regime", "regime", wide=True),
    Column("environment", "environment", wide=True),
    Column("run_id", "run", wide=True),
    Column("record_id", "record", wide=True),
    Column("digest", "digest", wide=True),
    Column("source", "source", wide=True),
)


def history(case: str, records: Sequence[Sourced]) -> Listing:
    """`change` compares with the record before it in the same environment, regime and weight mode alone."""
    rows = []
    before: dict[tuple[object, ...], float] = {}
    for sourced in sorted(records, key=lambda s: (s.stored.record.created_at is not None, _when(s), s.stored.id or 0)):
        stored, record = sourced.stored, sourced.stored.record
        group = (sourced.source, stored.problem, *stored.environment.identity, record.regime, record.weight_mode)
        time_us = record.median_us if stored.environment.kind == "cuda" and not stored.invalid else None
        earlier = before.get(group)
        rows.append(_row(sourced, time_us, time_us / earlier - 1 if time_us and earlier else None))
        if time_us:
            before[group] = time_us
    places = {(row["gpu"], row["triton"]) for row in rows}
    foot = (f"{len(places)} environments: times of different ones do not compare",) if len(places) > 1 else ()
    return Listing(
        "history",
        _COLUMNS,
        rows,
        head=(f"{case}: {len(rows)} record{'s' * (len(rows) != 1)}",),
        foot=foot,
        facts={"case": case},
    )


def _when(sourced: Sourced) -> float:
    created = sourced.stored.record.created_at
    return created.timestamp() if created else 0.0


def _row(sourced: Sourced, time_us: float | None, change: float | None) -> dict[str, Any]:
    stored, record = sourced.stored, sourced.stored.record
    created = record.created_at
    state = "active" if stored.active else "quarantined" if stored.quarantine_reason else "former"
    return {
        "created": created.isoformat(sep=" ", timespec="minutes")[:16] if created else None,
        "median_us": time_us,
        "change": change,
        "verdict": record.verdict.value,
        "state": "invalid" if stored.invalid else state,
        "reason": stored.quarantine_reason or stored.invalid,
        "plan": " | ".join(str(stage.get("template", "?")) for stage in record.plan),
        "low_us": record.low_us if time_us else None,
        "high_us": record.high_us if time_us else None,
        "trust": str(stored.trust),
        "gpu": stored.environment.gpu_name,
        "triton": stored.environment.triton,
        "regime": record.regime,
        "environment": stored.environment.digest,
        "run_id": stored.run_id,
        "record_id": stored.id,
        "digest": record.digest,
        "source": sourced.source,
    }
