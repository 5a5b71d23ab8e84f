"""The one writer: trials as they end, records as they are made, each in a transaction of its own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from sqlalchemy import Engine, event, select, update
from sqlalchemy.orm import Session

from tilewright.db import mapping, queries, schema, shared_rows
from tilewright.db.engine import JournalMode, server_engine, writer_engine
from tilewright.db.environment import Environment
from tilewright.db.faults import explained
from tilewright.db.models import RecordTable, RunTable, TrialTable
from tilewright.db.paths import Location, locate, network_file_system
from tilewright.db.rows import RecordRow, RunRow, RunStatus, StoredRecord, StoredTrial, TrialRow
from tilewright.db.runs import Owner
from tilewright.db.shared_rows import now
from tilewright.errors import NothingFound, UsageError
from tilewright.problem import WorkloadCase

Answer = TypeVar("Answer")


class Store:
    """Opened by `Store.open`; usable from several threads; every method is atomic and durable when it returns.

    A `guard` is called first in every transaction that writes, and forbids it by raising.
    """

    def __init__(self, location: Location, engine: Engine, warnings: tuple[str, ...]) -> None:
        self.guard: Callable[[Session], None] = lambda session: None
        self._known_environments: dict[Environment, int] = {}
        self._known_cases: dict[str, int] = {}
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
            if journal_mode is not None:
                raise UsageError(f"journal_mode is {journal_mode}, and {location.shown} is a server: it has none")
            return cls(location, _open_server(location), ())
        share = network_file_system(location.path)
        warnings: tuple[str, ...] = ()
        if share is not None:
            advice = "SQLite can be damaged there; keep it on a local disk, or use one writer and journal mode delete"
            warnings = (f"database {location.shown} is on a network file system ({share}): {advice}",)
            if journal_mode is None and not location.path.exists():
                journal_mode = "delete"
        return cls(location, writer_engine(location.path, journal_mode, busy_timeout_s), warnings)

    def limit_transactions(self, seconds: float) -> None:
        """For a server: a process that stops, or is cut off, inside a transaction keeps its locks no longer."""
        settings = (
            f"SET idle_in_transaction_session_timeout = {round(1000 * seconds)}",
            f"SET tcp_keepalives_idle = {max(1, round(seconds / 2))}",
            f"SET tcp_keepalives_interval = {max(1, round(seconds / 6))}",
            "SET tcp_keepalives_count = 3",
        )

        @event.listens_for(self.engine, "connect")
        def limit(connection: Any, _: object) -> None:
            for setting in settings:
                connection.execute(setting)
            connection.commit()

        self.engine.dispose()

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self, env: Environment) -> int:
        """Id of the environment, which is stored if it is new."""
        return self.change(lambda session: self._owners(session, env=env)["environment_id"])

    def case(self, case: WorkloadCase) -> int:
        """Id of the case, which is stored if it is new."""
        return self.change(lambda session: self._owners(session, case=case)["case_id"])

    def begin_run(self, run: RunRow, env: Environment, *, device: str = "", job_id: int | None = None) -> int:
        """Id of the new run; runs whose process died without a word are closed as interrupted first.

        So are earlier runs for the same job: whoever had it before has lost it.
        """
        owner = Owner.this_process()

        def action(session: Session) -> int:
            shared_rows.close_dead_runs(session)
            if job_id is not None:
                shared_rows.close_runs_of_job(session, job_id)
            row = RunTable(
                **self._owners(session, env=env),
                device=device,
                job_id=job_id,
                **{name: getattr(run, name) for name in mapping.RUN_FIELDS},
                status=RunStatus.RUNNING,
                note="",
                host=owner.host,
                pid=owner.pid,
                process_started_s=owner.started_s,
                started_at=now(),
            )
            session.add(row)
            session.flush()
            return row.id

        return self.change(action)

    def finish_run(self, run_id: int, status: RunStatus, note: str = "") -> None:
        def action(session: Session) -> None:
            row = _existing(session, RunTable, run_id)
            row.status, row.note, row.finished_at = RunStatus(status), note, now()

        self.change(action)

    def add_trial(self, run_id: int, case: WorkloadCase, env: Environment, trial: TrialRow) -> int:
        """Id of the trial; the same trial of the same run (level, digest, source, regime, attempt) is stored once."""
        _check_key(case, trial.case_key)

        def action(session: Session) -> int:
            _existing(session, RunTable, run_id)
            owners = {"run_id": run_id, **self._owners(session, case=case, env=env)}
            columns = mapping.trial_columns(trial)
            identity = ("level", "digest", "source_hash", "regime", "attempt")
            same = select(TrialTable.id).filter_by(**owners, **{name: columns[name] for name in identity})
            known = session.scalar(same)
            if known is not None:
                return known
            columns["finished_at"] = trial.finished_at or now()
            row = TrialTable(**owners, **columns)
            session.add(row)
            session.flush()
            return row.id

        return self.change(action)

    def add_trials(self, run_id: int, env: Environment, trials: Sequence[tuple[WorkloadCase, TrialRow]]) -> None:
        """All of them or none, each once, as `add_trial` stores one."""

        def action(session: Session) -> None:
            rows = [
                {
                    "run_id": run_id,
                    **self._owners(session, case=case, env=env),
                    **mapping.trial_columns(trial),
                    "finished_at": trial.finished_at or now(),
                }
                for case, trial in trials
            ]
            shared_rows.insert_absent(session, TrialTable, rows)

        self.change(action)

    def trials(self, **asked: Unpack[queries.TrialFilter]) -> list[TrialRow]:
        """The trials that can be read, in the order in which they were stored."""
        return [stored.trial for stored in self.stored_trials(**asked)]

    def stored_trials(self, **asked: Unpack[queries.TrialFilter]) -> list[StoredTrial]:
        """As `trials`, each with the run that it belongs to."""
        found = self._read(lambda session: queries.trials(session, **asked))
        return [stored for stored in found if not stored.invalid]

    def active_record(self, case: WorkloadCase, env: Environment, regime: str = "graph") -> StoredRecord | None:
        """The incumbent of the case in exactly this environment."""
        found = self._read(lambda s: queries.records(s, active=True, case_key=case.key, env=env, regime=regime))
        return found[0] if found else None

    def active_records(self, problem: str, env: Environment | None, regime: str) -> list[StoredRecord]:
        """What is served of a problem, in exactly this environment where one is given."""
        return self._read(lambda s: queries.records(s, active=True, problem=problem, env=env, regime=regime))

    def activate(self, run_id: int, case: WorkloadCase, env: Environment, record: RecordRow) -> int:
        """Id of the new active record; the former one stays as history. The same record is stored once."""
        _check_key(case, record.case_key)

        def action(session: Session) -> int:
            _existing(session, RunTable, run_id)
            owners = self._owners(session, case=case, env=env)
            session.execute(
                shared_rows.locked_environment(owners["environment_id"])
            )  # two winners, one after the other
            if record.created_at is not None:
                this = {"run_id": run_id, "digest": record.digest, "created_at": record.created_at}
                known = session.scalar(select(RecordTable.id).filter_by(**owners, **this))
                if known is not None:
                    return known
            former = update(RecordTable).filter_by(**owners, regime=record.regime, active=True)
            session.execute(former.values(active=False))
            columns = mapping.record_columns(record)
            columns["created_at"] = record.created_at or now()
            row = RecordTable(run_id=run_id, **owners, **columns, active=True, quarantine_reason="")
            session.add(row)
            session.flush()
            return row.id

        return self.change(action)

    def quarantine(self, record_id: int, reason: str) -> None:
        """The record is served no more; the reason is kept with it."""

        def action(session: Session) -> None:
            row = _existing(session, RecordTable, record_id)
            row.active, row.quarantine_reason = False, reason

        self.change(action)

    def _owners(
        self, session: Session, *, case: WorkloadCase | None = None, env: Environment | None = None
    ) -> dict[str, int]:
        """Ids by column; those that are known cost no query, and a fleet's trials no write to one shared row."""
        owners: dict[str, int] = {}
        if case is not None:
            owners["case_id"] = self._known_cases.get(case.key) or shared_rows.case_id(session, case)
            session.info.setdefault("cases", {})[case.key] = owners["case_id"]
        if env is not None:
            owners["environment_id"] = self._known_environments.get(env) or shared_rows.environment_id(session, env)
            session.info.setdefault("environments", {})[env] = owners["environment_id"]
        return owners

    def change(self, action: Callable[[Session], Answer]) -> Answer:
        """One transaction that writes; for other modules of this room too."""
        with explained(self.location.shown), Session(self.engine) as session:
            with session.begin():
                self.guard(session)
                answer = action(session)
            self._known_cases |= session.info.get("cases", {})  # only now are they certain to be there
            self._known_environments |= session.info.get("environments", {})
            return answer

    def _read(self, question: Callable[[Session], Answer]) -> Answer:
        with explained(self.location.shown), Session(self._reads) as session:
            return question(session)


Table = TypeVar("Table", RunTable, RecordTable)


def _open_server(location: Location) -> Engine:
    assert location.url is not None
    engine = server_engine(location, location.url, writes=True)
    try:
        with explained(location.shown), engine.begin() as connection:
            if schema.state(connection, location.shown) is not schema.State.CURRENT:
                schema.migrate(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _check_key(case: WorkloadCase, key: str) -> None:
    if case.key != key:
        raise UsageError(f"the row's case_key {key!r} is not that of case {case.name}, {case.key!r}")


def _existing(session: Session, table: type[Table], row_id: int) -> Table:
    row = session.get(table, row_id)
    if row is None:
        raise NothingFound(f"the database has no row {row_id} in {table.__tablename__}")
    return row
