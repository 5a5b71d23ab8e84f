"""Joins the databases of machines that never met: what is the same is told by its content, ids mean nothing.

Every rule is a choice from a set (insert if absent, the larger of two, the elected of all), so that neither the order
of the sources nor a repetition changes the result.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Row, insert, select, update
from sqlalchemy.orm import Session

from tilewright.db import mapping, queries
from tilewright.db.election import Change, re_elect, served_by
from tilewright.db.models import Base, CaseTable, EnvironmentTable, ProblemTable, RecordTable, RunTable, TrialTable
from tilewright.db.reader import Reader
from tilewright.db.rows import StoredRecord
from tilewright.db.store import Store
from tilewright.errors import DatabaseError, UsageError

CHUNK = 2000  # rows
RUNS_IN_HAND = 256  # whose trials are remembered: a source's trials come run by run, or a fleet's side by side
RUN_IDENTITY = (
    "command", "seed", "effort", "tool_version", "protocol", "host", "pid", "process_started_s", "started_at", "device",
    "job_id",
)  # fmt: skip
RUN_END = ("finished_at", "status", "note")
TRIAL_IDENTITY = ("level", "digest", "source_hash", "regime", "attempt")
CASE_CONTENT = ("variant_key", "name", "dtype", "weight_mode", "axes")


@dataclass
class MergeReport:
    """What was new, what was there already, and which records changed."""

    new: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    changes: list[Change] = field(default_factory=list)
    kept: int = 0

    def to_json(self) -> dict[str, Any]:
        changes = [vars(change) for change in self.changes]
        return {
            "schema": "tilewright.merge/1",
            "new": dict(self.new),
            "known": dict(self.known),
            "changes": changes,
            "records_kept": self.kept,
        }


def merge(
    sources: Sequence[str | Path], output: str | Path, usable: Callable[[StoredRecord], bool] = lambda record: True
) -> MergeReport:
    """All or nothing. Sources are only read, older ones from an upgraded copy; an output that exists takes part.

    Raises DatabaseError where two rows claim to be the same and differ.
    """
    readers: list[Reader] = []
    try:
        for source in sources:
            readers.append(Reader.open(source))
        with Store.open(output) as store:
            if any(reader.location == store.location for reader in readers):
                raise UsageError(f"output {store.location.shown} is one of the sources; it takes part in any case")
            return store.change(lambda session: _merge(session, readers, usable))
    finally:
        for reader in readers:
            reader.close()


def _merge(session: Session, readers: Sequence[Reader], usable: Callable[[StoredRecord], bool]) -> MergeReport:
    report = MergeReport()
    served = served_by(queries.records(session, active=True))
    for reader in readers:
        served += served_by(reader.active_records())
        _Join(session, reader, report).run()
    report.changes, report.kept = re_elect(session, served, usable)
    return report


class _Join:
    """One source into the output: rows of which others speak come first; `_ids` leads from its ids to the output's."""

    def __init__(self, session: Session, reader: Reader, report: MergeReport) -> None:
        self._session, self._reader, self._report = session, reader, report
        self._ids: dict[str, dict[int, int]] = {}

    def run(self) -> None:
        self._ids["environments"] = self._environments()
        self._ids["cases"] = self._cases()
        self._ids["runs"] = self._runs()
        self._trials()
        self._records()

    def _environments(self) -> dict[int, int]:
        """Clocks and ceilings, which are no part of the identity, come from the row made last."""
        here = {row.digest: row for row in self._session.execute(select(*_columns(EnvironmentTable)))}
        ids = {}
        for row in self._rows(EnvironmentTable):
            known = here.get(row.digest)
            ids[row.id] = self._insert(EnvironmentTable, row) if known is None else known.id
            if known is not None and _moving(row) > _moving(known):
                values = {name: getattr(row, name) for name in ("created_at", *mapping.MOVING_FIELDS)}
                self._session.execute(update(EnvironmentTable).filter_by(id=known.id).values(**values))
            self._count("environments", known is None)
        return ids

    def _cases(self) -> dict[int, int]:
        """Of two problems that have the same case, the first in the alphabet keeps it."""
        problems = {row.id: (row.name, row.family) for row in self._rows(ProblemTable)}
        problem_ids = {theirs: self._problem(*names) for theirs, names in problems.items()}
        ids = {}
        for row in self._rows(CaseTable):
            theirs = (*problems[row.problem_id], *_content(row, CASE_CONTENT))
            joined = select(*_columns(CaseTable), ProblemTable.name.label("problem"), ProblemTable.family)
            joined = joined.join(ProblemTable, ProblemTable.id == CaseTable.problem_id).where(CaseTable.key == row.key)
            known = self._session.execute(joined).first()
            values = {name: getattr(row, name) for name in ("key", *CASE_CONTENT)}
            values["problem_id"] = problem_ids[row.problem_id]
            if known is None:
                ids[row.id] = self._added(CaseTable, values)
            else:
                ids[row.id] = known.id
                if theirs < (known.problem, known.family, *_content(known, CASE_CONTENT)):
                    self._session.execute(update(CaseTable).filter_by(id=known.id).values(**values))
            self._count("cases", known is None)
        return ids

    def _problem(self, name: str, family: str) -> int:
        known = self._session.execute(select(*_columns(ProblemTable)).where(ProblemTable.name == name)).first()
        if known is None:
            return self._added(ProblemTable, {"name": name, "family": family})
        if known.family != family:
            raise DatabaseError(f"problem {name} is of family {known.family} in one database and {family} in another")
        return int(known.id)

    def _runs(self) -> dict[int, int]:
        """A run that one database saw end has ended."""
        digests = {row.id: row.digest for row in self._session.execute(select(*_columns(EnvironmentTable)))}
        here = {
            (*_content(row, RUN_IDENTITY), digests[row.environment_id]): row
            for row in self._session.execute(select(*_columns(RunTable)))
        }
        ids = {}
        for row in self._rows(RunTable):
            environment_id = self._ids["environments"][row.environment_id]
            known = here.get((*_content(row, RUN_IDENTITY), digests[environment_id]))
            ids[row.id] = self._insert(RunTable, row, environment_id=environment_id) if known is None else known.id
            if known is not None and _end(row) > _end(known):
                values = {name: getattr(row, name) for name in RUN_END}
                self._session.execute(update(RunTable).filter_by(id=known.id).values(**values))
            self._count("runs", known is None)
        return ids

    def _trials(self) -> None:
        known: dict[int, dict[str, str]] = {}
        for row in self._rows(TrialTable):
            owners = self._owners(row)
            run_id = owners["run_id"]
            if run_id not in known:
                if len(known) >= RUNS_IN_HAND:
                    known.pop(next(iter(known)))
                known[run_id] = self._trials_of(run_id)
            identity, content = _trial_address(row, owners)
            if identity not in known[run_id]:
                self._insert(TrialTable, row, **owners)
                known[run_id][identity] = content
                self._count("trials", True)
            elif known[run_id][identity] == content:
                self._count("trials", False)
            else:
                what = f"trial {row.id} of {self._reader.location.shown} ({row.label}, run on {row.started_at})"
                raise DatabaseError(f"{what} is in the output with other content; nothing was merged")

    def _trials_of(self, run_id: int) -> dict[str, str]:
        found = self._session.execute(select(*_columns(TrialTable)).where(TrialTable.run_id == run_id))
        return dict(_trial_address(row, dict(row._mapping)) for row in found)

    def _records(self) -> None:
        """Never active: that is decided at the end. A record that one database took out is out."""
        for row in self._rows(RecordTable):
            owners = self._owners(row)
            same = {**owners, "digest": row.digest, "regime": row.regime, "created_at": row.created_at}
            known = self._session.execute(select(*_columns(RecordTable)).filter_by(**same)).first()
            if known is None:
                self._insert(RecordTable, row, **owners, active=False)
            elif row.quarantine_reason > known.quarantine_reason:
                reason = update(RecordTable).filter_by(id=known.id).values(quarantine_reason=row.quarantine_reason)
                self._session.execute(reason)
            self._count("records", known is None)

    def _owners(self, row: Row[Any]) -> dict[str, int]:
        return {
            "run_id": self._ids["runs"][row.run_id],
            "case_id": self._ids["cases"][row.case_id],
            "environment_id": self._ids["environments"][row.environment_id],
        }

    def _rows(self, table: type[Base]) -> Iterator[Row[Any]]:
        """The source's rows by id, some at a time: a large file is never held as a whole."""
        last, key = 0, table.__table__.c.id
        while True:
            statement = select(*_columns(table)).where(key > last).order_by(key).limit(CHUNK)
            rows = self._reader.ask(lambda session, asked=statement: session.execute(asked).all())  # type: ignore[misc]
            yield from rows
            if len(rows) < CHUNK:
                return
            last = rows[-1].id

    def _insert(self, table: type[Base], row: Row[Any], **changes: Any) -> int:
        values = {name: value for name, value in row._mapping.items() if name != "id"}
        return self._added(table, {**values, **changes})

    def _added(self, table: type[Base], values: Mapping[str, Any]) -> int:
        added = self._session.execute(insert(table).values(**values).returning(table.__table__.c.id))
        return int(added.scalar_one())

    def _count(self, what: str, new: bool) -> None:
        (self._report.new if new else self._report.known)[what] += 1


def _columns(table: type[Base]) -> list[ColumnElement[Any]]:
    return list(table.__table__.columns)


def _content(row: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Comparable whatever is NULL."""
    return tuple(_text(getattr(row, name)) for name in names)


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else json.dumps(value, sort_keys=True, default=str)


def _moving(row: Row[Any]) -> tuple[str, ...]:
    return _content(row, ("created_at", *mapping.MOVING_FIELDS))


def _end(row: Row[Any]) -> tuple[bool, tuple[str, ...]]:
    return row.finished_at is not None, _content(row, RUN_END)


def _trial_address(row: Row[Any], owners: Mapping[str, Any]) -> tuple[str, str]:
    """What tells a trial from others of its run, and what it says."""
    identity = [owners["case_id"], owners["environment_id"], *_content(row, TRIAL_IDENTITY)]
    content = _content(row, mapping.TRIAL_FIELDS)
    return json.dumps(identity), hashlib.sha256(json.dumps(content).encode()).hexdigest()
