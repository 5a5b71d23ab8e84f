"""Which of several records of one case is served, where no final decided between all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from tilewright.db import queries
from tilewright.db.models import RecordTable, RunTable
from tilewright.db.rows import StoredRecord

_EPOCH = datetime.fromtimestamp(0, UTC)
_Group = tuple[str, str, str]  # case key, environment's digest, regime


@dataclass(frozen=True)
class Change:
    """A record that one of the databases served and that the merged one does not."""

    case: str
    gpu: str
    regime: str
    before: str
    before_us: float | None
    after: str
    after_us: float | None


def elect(records: Sequence[StoredRecord], usable: Callable[[StoredRecord], bool]) -> StoredRecord | None:
    """The same record whatever the order; None where none may be served.

    Sound before broken, current sources before stale ones, measured before unmeasured. What lost a later paired final
    to another of them is out. Of the rest, which never met, the one that gains most over the default plan of its own
    final wins, because two boards' times are not comparable; ties go to the older.
    """
    sound = [record for record in records if not record.invalid and not record.quarantine_reason]
    current = [record for record in sound if usable(record)] or sound
    measured = [record for record in current if record.record.median_us is not None]
    if not measured:
        return max(current, key=lambda record: (_created(record), record.record.digest), default=None)
    left = [record for record in measured if not any(_beaten(record, by) for by in measured)]
    by_gain = all(record.record.default_us for record in left)
    return min(left, key=lambda record: (_time(record, by_gain=by_gain), _created(record), record.record.digest))


def _beaten(record: StoredRecord, by: StoredRecord) -> bool:
    """Whether its plan stood in the later final that made the other the record, or made it one again."""
    if _created(by) <= _created(record):
        return False
    met = {entry.get("name") for entry in by.record.evidence.get("finalists", ()) if isinstance(entry, dict)}
    return record.record.digest in met | {by.record.digest}


def _time(record: StoredRecord, *, by_gain: bool) -> float:
    median_us, default_us = record.record.median_us, record.record.default_us
    assert median_us is not None
    return median_us / default_us if by_gain and default_us else median_us


def _created(record: StoredRecord) -> datetime:
    return record.record.created_at or _EPOCH


def served_by(records: Sequence[StoredRecord]) -> list[tuple[_Group, StoredRecord]]:
    return [(_group(record), record) for record in records]


def _group(stored: StoredRecord) -> _Group:
    return (stored.record.case_key, stored.environment.digest, stored.record.regime)


def re_elect(
    session: Session,
    served: Sequence[tuple[_Group, StoredRecord]],
    usable: Callable[[StoredRecord], bool],
) -> tuple[list[Change], int]:
    """Makes the elected ones active; what changed for any of those `served` before, and how many groups stayed."""
    groups: dict[_Group, list[StoredRecord]] = {}
    runs = {row.id: str(row[1:]) for row in session.execute(select(*RunTable.__table__.columns))}
    # ties go to the first: ids, and so the order in which rows arrived, must not decide
    for stored in sorted(queries.records(session, active=False), key=lambda stored: runs[stored.run_id or 0]):
        groups.setdefault(_group(stored), []).append(stored)
    elected = {group: elect(records, usable) for group, records in groups.items()}
    session.execute(update(RecordTable).values(active=False))
    ids = [record.id for record in elected.values() if record is not None]
    session.execute(update(RecordTable).where(RecordTable.id.in_(ids)).values(active=True))
    changes: set[Change] = set()
    for group, before in served:
        after = elected[group]
        if after is not None and _is_same(before, after):
            continue
        changes.add(_change(before, after))
    kept = len(elected) - len({(change.case, change.gpu, change.regime) for change in changes})
    return sorted(changes, key=lambda change: (change.case, change.gpu, change.regime, change.before)), kept


def _is_same(one: StoredRecord, other: StoredRecord) -> bool:
    return (one.record.digest, one.record.created_at) == (other.record.digest, other.record.created_at)


def _change(before: StoredRecord, after: StoredRecord | None) -> Change:
    names = (before.case_name, before.environment.gpu_name, before.record.regime)
    was = (_label(before), before.record.median_us)
    return Change(*names, *was, *(("none", None) if after is None else (_label(after), after.record.median_us)))


def _label(stored: StoredRecord) -> str:
    return " | ".join(str(stage.get("template")) for stage in stored.record.plan)
