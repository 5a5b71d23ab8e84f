"""The best rows with everything that is known of them, as a Listing for wide tables and exports."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tilewright.db.rows import Trust
from tilewright.db.summaries import Wanted
from tilewright.report.here import Here, match
from tilewright.report.listing import Column, Listing
from tilewright.report.queries import BestRow, Group, Sourced
from tilewright.report.tables import flat, heading, summary

COLUMNS = (
    Column("problem", "problem", wide=True),
    Column("gpu", "gpu", wide=True),
    Column("triton", "triton", wide=True),
    Column("case", "case"),
    Column("median_us", "median us", "{:.1f}"),
    Column("low_us", "low us", "{:.1f}"),
    Column("high_us", "high us", "{:.1f}"),
    Column("speedup_default", "default", "{:.3f}x"),
    Column("baseline", "best baseline"),
    Column("speedup_baseline", "baseline", "{:.3f}x"),
    Column("percent_sol", "% SOL", "{:.1f}"),
    Column("ties", "ties", "{:d}"),
    Column("noise", "noise"),
    Column("age_days", "age d", "{:.0f}"),
    Column("trust", "trust"),
    Column("match", "match"),
    Column("verdict", "verdict"),
    Column("plan", "plan"),
    Column("regime", "regime", wide=True),
    Column("weight_mode", "weights", wide=True),
    Column("source", "source", wide=True),
    Column("environment", "environment", wide=True),
    Column("run_id", "run", wide=True),
    Column("record_id", "record", wide=True),
    Column("digest", "digest", wide=True),
    Column("status", "status", wide=True),
)


@dataclass(frozen=True)
class Viewer:
    """Who looks: the machine in front of us and the time by its clock."""

    here: Here | None
    now: datetime


def row_facts(row: BestRow, group: Group, viewer: Viewer) -> dict[str, Any]:
    """What the plain columns do not say: ties, noise, age in days, trust, match with this machine."""
    return {
        "ties": None if row.ties is None else len(row.ties),
        "noise": row.noise,
        "age_days": age_days(row.created_at, viewer.now),
        "trust": str(row.trust),
        "match": match(group.environment, viewer.here),
        "environment": group.environment.digest,
        "record_id": row.record_id,
        "run_id": row.run_id,
    }


def age_days(created_at: datetime | None, now: datetime) -> float | None:
    """Days between then and now, never negative."""
    return None if created_at is None else max(0.0, (now - created_at.astimezone(UTC)).total_seconds() / 86400)


def best_listing(groups: Iterable[Group], viewer: Viewer) -> list[Listing]:
    """One listing a group, so that no table mixes cards, compilers or regimes."""
    return [
        Listing(
            "best",
            COLUMNS,
            [{**flat(group, row), **row_facts(row, group, viewer)} for row in group.rows],
            head=heading(group),
            foot=summary(group),
        )
        for group in groups
    ]


def asked_for(
    records: Sequence[Sourced], wanted: Wanted, trust: Trust | None, statuses: frozenset[str] = frozenset()
) -> list[Sourced]:
    """The records that the filters leave; a record's status is measured, verified or invalid."""
    return [
        sourced
        for sourced in records
        if _fits(sourced, wanted)
        and (trust is None or sourced.stored.trust == trust)
        and (not statuses or record_status(sourced) in statuses)
    ]


def record_status(sourced: Sourced) -> str:
    """measured, verified (correct, no time), or invalid."""
    stored = sourced.stored
    if stored.invalid:
        return "invalid"
    return "measured" if stored.environment.kind == "cuda" and stored.record.median_us is not None else "verified"


def _fits(sourced: Sourced, wanted: Wanted) -> bool:
    stored = sourced.stored
    templates = {str(stage.get("template")) for stage in stored.record.plan}
    return (
        (wanted.problem is None or stored.problem == wanted.problem)
        and (not wanted.cases or stored.case_name in wanted.cases)
        and (not wanted.environment or stored.environment.digest.startswith(wanted.environment))
        and (wanted.run_id is None or stored.run_id == wanted.run_id)
        and (wanted.template is None or wanted.template in templates)
    )


def standing(group: Group, viewer: Viewer) -> tuple[str, ...]:
    """One line on age, trust and match of a group whose times are measurements."""
    if not group.measured:
        return ()
    ages = [age for row in group.rows if (age := age_days(row.created_at, viewer.now)) is not None]
    span = f"{min(ages):.0f} to {max(ages):.0f} days old, " if ages else ""
    again = sum(row.trust == Trust.REPRODUCED for row in group.rows)
    trust = f"{again} of {len(group.rows)} reproduced"
    return (f"{span}{trust}; match with this machine: {match(group.environment, viewer.here)}",)
