"""The one writer: trials as they end, records as they are made, each in a transaction of its own."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeVar, Unpack

from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from tilewright.db import mapping, queries, schema
from tilewright.db.engine import JournalMode, server_engine, writer_engine
from tilewright.db.environment import Environment
from tilewright.db.faults import explained
from tilewright.db.models import CaseTable, EnvironmentTable, ProblemTable, RecordTable, RunTable, TrialTable
from tilewright.db.paths import Location, locate, network_file_system
from tilewright.db.rows import RecordRow, RunRow, RunStatus, StoredRecord, TrialRow
from tilewright.db.runs import Owner
from tilewright.errors import NothingFound, UsageError
from tilewright.problem import WorkloadCase

Answer = TypeVar("Answer")


class Store:
    """Opened by `Store.open`; usable from several threads; every method is atomic and durable when it returns."""

    def __init__(self, location: Location, engine: Engine, warnings: tuple[str, ...]) -> None:
        self.location = location
        self.warnings = warnings
        self.engine = engine
        self._reads = engine.execution_options(reads_only=True)

    @classmethod
    def open(
        cls, target: str | Path | None, *, journal_mode: JournalMode | None = None, busy_timeout_s: float = 30.0
    ) -> Self:
        """Creates and migrates; `journal_mode` None keeps the file's own; a new one on a local disk gets WAL."""
        location = locate(target)
        if location.path is None:
            assert location.url is not None
            return cls(location, _open_server(location), ())
        share = network_file_system(location.path)
        warnings: tuple[str, ...] = ()
        if share is not None:
            advice = "SQLite can be damaged there; keep it on a local disk, or use one writer and journal mode delete"
            warnings = (f"database {location.shown} is on a network file system ({share}): {advice}",)
            if journal_mode is None and not location.path.exists():
                journal_mode = "delete"
        return cls(location, writer_engine(location.path, journal_mode, busy_timeout_s), warnings)

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self, env: Environment) -> int:
        """Id of the environment, which is stored if it is new."""
        return self._write(lambda session: _environment_id(session, env))

    def case(self, case: WorkloadCase) -> int:
        """Id of the case, which is stored if it is new."""
        return self._write(lambda session: _case_id(session, case))

    def begin_run(self, run: RunRow, env: Environment) -> int:
        """Id of the new run; runs whose process died without a word are closed as interrupted first."""
        owner = Owner.this_process()

        def action(session: Session) -> int:
            _close_dead_runs(session)
            row = RunTable(
                environment_id=_environment_id(session, env),
                **{name: getattr(run, name) for name in mapping.RUN_FIELDS},
                status=RunStatus.RUNNING,
                note="",
                host=owner.host,
                pid=owner.pid,
                process_started_s=owner.started_s,
                started_at=_now(),
            )
            session.add(row)
            session.flush()
            return row.id

        return self._write(action)

    def finish_run(self, run_id: int, status: RunStatus, note: str = "") -> None:
        def action(session: Session) -> None:
            row = _existing(session, RunTable, run_id)
            row.status, row.note, row.finished_at = RunStatus(status), note, _now()

        self._write(action)

    def add_trial(self, run_id: int, case: WorkloadCase, env: Environment, trial: TrialRow) -> int:
        """Id of the trial; the same trial of the same run (level, digest, source, regime, attempt) is stored once."""
        _check_key(case, trial.case_key)

        def action(session: Session) -> int:
            _existing(session, RunTable, run_id)
            owners = {
                "run_id": run_id,
                "case_id": _case_id(session, case),
                "environment_id": _environment_id(session, env),
            }
            columns = mapping.trial_columns(trial)
            identity = ("level", "digest", "source_hash", "regime", "attempt")
            same = select(TrialTable.id).filter_by(**owners, **{name: columns[name] for name in identity})
            known = session.scalar(same)
            if known is not None:
                return known
            columns["finished_at"] = trial.finished_at or _now()
            row = TrialTable(**owners, **columns)
            session.add(row)
            session.flush()
            return row.id

        return self._write(action)

    def trials(self, **asked: Unpack[queries.TrialFilter]) -> list[TrialRow]:
        """The trials that can be read, in the order in which they were stored."""
        found = self._read(lambda session: queries.trials(session, **asked))
        return [stored.trial for stored in found if not stored.invalid]

    def active_record(self, case: WorkloadCase, env: Environment, regime: str = "graph") -> StoredRecord | None:
        """The incumbent of the case in exactly this environment."""
        found = self._read(lambda s: queries.records(s, active=True, case_key=case.key, env=env, regime=regime))
        return found[0] if found else None

    def activate(self, run_id: int, case: WorkloadCase, env: Environment, record: RecordRow) -> int:
        """Id of the new active record; the former one stays as history."""
        _check_key(case, record.case_key)

        def action(session: Session) -> int:
            _existing(session, RunTable, run_id)
            owners = {"case_id": _case_id(session, case), "environment_id": _environment_id(session, env)}
            former = update(RecordTable).filter_by(**owners, regime=record.regime, active=True)
            session.execute(former.values(active=False))
            columns = mapping.record_columns(record)
            columns["created_at"] = record.created_at or _now()
            row = RecordTable(run_id=run_id, **owners, **columns, active=True, quarantine_reason="")
            session.add(row)
            session.flush()
            return row.id

        return self._write(action)

    def quarantine(self, record_id: int, reason: str) -> None:
        """The record is served no more; the reason is kept with it."""

        def action(session: Session) -> None:
            row = _existing(session, RecordTable, record_id)
            row.active, row.quarantine_reason = False, reason

        self._write(action)

    def write(self, action: Callable[[Session], Answer]) -> Answer:
        """One action of a module of tables of its own, atomic as the others are."""
        return self._write(action)

    def _write(self, action: Callable[[Session], Answer]) -> Answer:
        with explained(self.location.shown), Session(self.engine) as session, session.begin():
            return action(session)

    def _read(self, question: Callable[[Session], Answer]) -> Answer:
        with explained(self.location.shown), Session(self._reads) as session:
            return question(session)


Table = TypeVar("Table", RunTable, RecordTable)


def _open_server(location: Location) -> Engine:
    assert location.url is not None
    engine = server_engine(location, location.url, writes=True)
    with explained(location.shown), engine.begin() as connection:
        if schema.state(connection, location.shown) is not schema.State.CURRENT:
            schema.migrate(connection)
    return engine


def _now() -> datetime:
    return datetime.now(UTC)


def _check_key(case: WorkloadCase, key: str) -> None:
    if case.key != key:
        raise UsageError(f"the row's case_key {key!r} is not that of case {case.name}, {case.key!r}")


def _existing(session: Session, table: type[Table], row_id: int) -> Table:
    row = session.get(table, row_id)
    if row is None:
        raise NothingFound(f"the database has no row {row_id} in {table.__tablename__}")
    return row


def _environment_id(session: Session, env: Environment) -> int:
    """Clocks and ceilings, which are no part of the identity, are kept at the latest values seen."""
    row = session.scalar(select(EnvironmentTable).filter_by(digest=env.digest))
    if row is None:
        row = EnvironmentTable(digest=env.digest, created_at=_now(), **mapping.environment_columns(env))
        session.add(row)
        session.flush()
        return row.id
    for name in mapping.MOVING_FIELDS:
        if getattr(env, name) is not None:
            setattr(row, name, getattr(env, name))
    return row.id


def _case_id(session: Session, case: WorkloadCase) -> int:
    known = session.scalar(select(CaseTable.id).filter_by(key=case.key))
    if known is not None:
        return known
    problem = session.scalar(select(ProblemTable).filter_by(name=case.problem.name))
    if problem is None:
        problem = ProblemTable(name=case.problem.name, family=case.problem.family)
        session.add(problem)
        session.flush()
    row = CaseTable(
        problem_id=problem.id,
        key=case.key,
        variant_key=case.variant_key,
        name=case.name,
        dtype=case.problem.dtype,
        weight_mode=case.weight_mode,
        axes=dict(case.shape_axes),
    )
    session.add(row)
    session.flush()
    return row.id


def _close_dead_runs(session: Session) -> None:
    for row in session.scalars(select(RunTable).filter_by(status=RunStatus.RUNNING)):
        if Owner(row.host, row.pid, row.process_started_s).is_dead():
            row.status, row.note, row.finished_at = RunStatus.INTERRUPTED, "its process ended without a word", _now()
