"""Results from outside and measurements repeated: how a number earns its trust."""

import math
import socket
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from tilewright.db import queries
from tilewright.db.environment import Environment
from tilewright.db.models import OutsideResultTable, RecordTable, ReproductionTable, RunTable
from tilewright.db.queries import AGREES
from tilewright.db.rows import StoredRecord, Trust
from tilewright.db.store import Store
from tilewright.errors import NothingFound, UsageError

SAME_PLACE = "same day and host"
DIFFERS = "differs"
MIN_GAIN = 0.01  # medians that are closer than what a final calls a gain are equal


@dataclass(frozen=True)
class OutsideResult:
    """One row of somebody else's: reported, or measured here from their code."""

    problem: str
    implementation: str
    hardware: str
    workload: str  # a case's name, or `suite of N cases`
    latency_us: float
    trust: Trust
    environment: str = ""
    percent_sol: float | None = None
    license: str = ""
    source_url: str = ""
    source: str = ""
    protocol: str = ""
    digest: str = ""
    observed: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.latency_us) or self.latency_us <= 0:
            raise UsageError(f"latency_us of {self.implementation!r} must be a positive number, got {self.latency_us}")


def environment_words(environment: Environment, regime: str) -> str:
    """What must be equal for two times of one card to stand in one table, in words."""
    mig = f"MIG {environment.mig}, " if environment.mig else ""
    return f"{mig}Triton {environment.triton}, {regime}"


def suite_words(cases: int) -> str:
    """As boards call it."""
    return f"suite of {cases} cases"


_NAMES = tuple(field.name for field in fields(OutsideResult))
_IDENTITY = ("problem", "implementation", "hardware", "environment", "workload", "trust", "digest", "observed")


def add_outside_results(store: Store, rows: Iterable[OutsideResult]) -> int:
    """Number of new rows; a row that is there already keeps its place and takes the new numbers."""
    wanted = list(rows)

    def action(session: Session) -> int:
        added = 0
        for row in wanted:
            columns: dict[str, Any] = {name: getattr(row, name) for name in _NAMES} | {"trust": str(row.trust)}
            same = select(OutsideResultTable).filter_by(**{name: columns[name] for name in _IDENTITY})
            known = session.scalar(same)
            if known is None:
                session.add(OutsideResultTable(imported_at=datetime.now(UTC), **columns))
                session.flush()
                added += 1
            else:
                for name, value in columns.items():
                    setattr(known, name, value)
        return added

    return store.change(action)


def outside_results(session: Session, problem: str | None = None) -> list[OutsideResult]:
    """In the order in which they came; a question for `Reader.ask`."""
    statement = select(OutsideResultTable).order_by(OutsideResultTable.id)
    if problem is not None:
        statement = statement.filter_by(problem=problem)
    return [_outside(row) for row in session.scalars(statement)]


def _outside(row: OutsideResultTable) -> OutsideResult:
    values = {name: getattr(row, name) for name in _NAMES}
    known = values["trust"] in set(Trust)
    return OutsideResult(**{**values, "trust": Trust(values["trust"]) if known else Trust.REPORTED})


@dataclass(frozen=True)
class Repetition:
    """A record's plan measured once more: median and its 95 % interval, microseconds."""

    median_us: float
    low_us: float
    high_us: float
    host: str = ""  # empty: this one
    measured_at: datetime | None = None  # None: now


@dataclass(frozen=True)
class Marked:
    """What a repetition came to, and the record's trust from now on."""

    verdict: str  # agrees | differs | same day and host
    trust: Trust


def stored_id(session: Session, record: StoredRecord) -> int | None:
    """Where this very record is among the active ones of a database, whichever layer it was read from."""
    row = record.record
    found = queries.records(session, active=True, case_key=row.case_key, env=record.environment, regime=row.regime)
    same = (one for one in found if (one.record.digest, one.record.created_at) == (row.digest, row.created_at))
    return next((one.id for one in same), None)


def mark_reproduced(store: Store, record_id: int, again: Repetition) -> Marked:
    """Stores a repeated measurement beside the record.

    It becomes `reproduced` when the intervals overlap, or the medians differ by less than 1 %, on another UTC day or
    another host than the record's own. Raises NothingFound for an unknown record, UsageError for one without a time.
    """
    host = again.host or socket.gethostname()
    when = again.measured_at or datetime.now(UTC)

    def action(session: Session) -> Marked:
        record = session.get(RecordTable, record_id)
        if record is None:
            raise NothingFound(f"the database has no record {record_id}")
        if record.median_us is None:
            raise UsageError(f"record {record_id} has no measured time that could be reproduced")
        run = session.get(RunTable, record.run_id)
        elsewhere = when.date() != record.created_at.date() or (run is not None and run.host != host)
        verdict = DIFFERS if not _agrees(record, again) else AGREES if elsewhere else SAME_PLACE
        numbers = {name: getattr(again, name) for name in ("median_us", "low_us", "high_us")}
        session.add(ReproductionTable(record_id=record_id, host=host, verdict=verdict, measured_at=when, **numbers))
        session.flush()
        agreed = select(ReproductionTable.id).filter_by(record_id=record_id, verdict=AGREES)
        return Marked(verdict, Trust.REPRODUCED if session.scalar(agreed) is not None else Trust.MEASURED)

    return store.change(action)


def _agrees(record: RecordTable, again: Repetition) -> bool:
    assert record.median_us is not None
    if abs(again.median_us / record.median_us - 1) < MIN_GAIN:
        return True
    low = record.median_us if record.low_us is None else record.low_us
    high = record.median_us if record.high_us is None else record.high_us
    return again.low_us <= high and low <= again.high_us
