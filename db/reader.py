"""Read-only access to what was found; nothing is written, not even beside the file."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self, TypeVar, Unpack

from sqlalchemy.orm import Session

from tilewright.db import queries, schema
from tilewright.db.engine import server_engine
from tilewright.db.environment import Environment
from tilewright.db.faults import explained
from tilewright.db.paths import Location, locate
from tilewright.db.rows import Status, StoredRecord, StoredRun, StoredTrial
from tilewright.db.snapshot import Sight, Snapshot
from tilewright.errors import DatabaseError, MissingDatabase, StoreLocked

Answer = TypeVar("Answer")


class Source(Protocol):
    """Where a reader's answers come from."""

    def read(self, question: Callable[[Session], Answer]) -> Answer: ...

    def close(self) -> None: ...


class Reader:
    """Opened by `Reader.open`; each answer is consistent and as new as the call; usable from several threads."""

    def __init__(self, location: Location, source: Source) -> None:
        self.location = location
        self._source = source

    @classmethod
    def open(cls, target: str | Path | None, *, busy_timeout_s: float = 30.0) -> Self:
        """Raises a DatabaseError now rather than at the first question."""
        location = locate(target)
        file = location.path
        source: Source = ServerSource(location) if file is None else FileSource(file, busy_timeout_s)
        try:
            source.read(queries.environments)
        except BaseException:
            source.close()
            raise
        return cls(location, source)

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def active_records(self, **asked: Unpack[queries.RecordFilter]) -> list[StoredRecord]:
        """What is served, newest first; `gpu` in any spelling."""
        return self._source.read(lambda session: queries.records(session, active=True, **asked))

    def record_history(self, case_key: str) -> list[StoredRecord]:
        """Every record that the case ever had, in every environment, newest first."""
        return self._source.read(lambda session: queries.records(session, active=False, case_key=case_key))

    def trials(self, **asked: Unpack[queries.TrialFilter]) -> list[StoredTrial]:
        """In the order in which they were stored; `limit` keeps the latest."""
        return self._source.read(lambda session: queries.trials(session, **asked))

    def runs(self) -> list[StoredRun]:
        """Newest first."""
        return self._source.read(queries.runs)

    def environments(self) -> list[Environment]:
        """In the order in which they were first seen."""
        return list(self._source.read(queries.environments).values())

    def ask(self, question: Callable[[Session], Answer]) -> Answer:
        """One question of a module of queries, answered as the others are."""
        return self._source.read(question)

    def counts(self, case_key: str | None = None) -> dict[Status, int]:
        """Trials by status, of one case or of all."""
        return self._source.read(lambda session: queries.counts(session, case_key))


class FileSource:
    """An SQLite file, which others may write, close, replace or remove between two questions and during one."""

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._sight: Sight | None = None
        self._snapshot: Snapshot | None = None
        self._turn = threading.Lock()

    def read(self, question: Callable[[Session], Answer]) -> Answer:
        """Asks again whenever the file moved while it was read."""
        deadline = time.monotonic() + self._busy_timeout_s
        with self._turn:
            while True:
                sight = self._look()
                try:
                    answer = self._ask(sight, question)
                except MissingDatabase:
                    raise
                except DatabaseError:
                    if sight.still_fits(self._path) or time.monotonic() > deadline:
                        raise
                else:
                    if sight.vouches_for(self._path):
                        return answer
                if time.monotonic() > deadline:
                    raise StoreLocked(f"database {self._path} changed all the time while it was read; retry")

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def _look(self) -> Sight:
        if self._sight is None or not self._sight.still_fits(self._path):
            self.close()
            self._sight = Sight.of(self._path)
        return self._sight

    def _ask(self, sight: Sight, question: Callable[[Session], Answer]) -> Answer:
        with explained(str(self._path)):
            if self._snapshot is None:
                self._snapshot = Snapshot(self._path, sight, self._busy_timeout_s)
            with Session(self._snapshot.engine) as session:
                return question(session)


class ServerSource:
    """A database server, whose transactions are read-only and consistent by themselves."""

    def __init__(self, location: Location) -> None:
        assert location.url is not None
        self._shown = location.shown
        self._engine = server_engine(location, location.url, writes=False)
        with explained(self._shown), self._engine.connect() as connection:
            if schema.state(connection, self._shown) is not schema.State.CURRENT:
                raise MissingDatabase(f"database {self._shown} has no current tables; `tilewright tune` makes them")

    def read(self, question: Callable[[Session], Answer]) -> Answer:
        with explained(self._shown), Session(self._engine) as session:
            return question(session)

    def close(self) -> None:
        self._engine.dispose()
