"""Engines: the writer's, prepared once under a file lock, and plain ones for reading."""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, NullPool, QueuePool, create_engine, event
from sqlalchemy.engine import URL

from tilewright.db import schema
from tilewright.db.faults import explained, result_name
from tilewright.db.mapping import from_json_text, to_json_text
from tilewright.db.paths import Location
from tilewright.errors import DatabaseError, NotWritable, StoreLocked

JournalMode = Literal["wal", "delete", "truncate"]


def open_sqlite(path: Path, query: str, busy_timeout_s: float) -> sqlite3.Connection:
    """A connection that begins no transaction by itself; `query` holds SQLite's URI parameters."""
    uri = f"file:{quote(str(path))}?{query}"
    return sqlite3.connect(uri, uri=True, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)


def sqlite_engine(connect: Callable[[], sqlite3.Connection], *, writes: bool) -> Engine:
    """Writers take the write lock when they begin, so that no transaction fails half way for want of it."""
    engine = create_engine(
        "sqlite://",
        creator=connect,
        poolclass=QueuePool if writes else NullPool,
        json_serializer=to_json_text,
        json_deserializer=from_json_text,
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reads = not writes or connection.get_execution_options().get("reads_only", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def server_engine(location: Location, url: URL, *, writes: bool) -> Engine:
    """For PostgreSQL; a question of several statements sees one state."""
    try:
        engine = create_engine(
            url,
            json_serializer=to_json_text,
            json_deserializer=from_json_text,
            pool_pre_ping=True,
            pool_size=1,  # a fleet has many workers and a server few connections; more are made when threads need them
            max_overflow=16,
        )
    except ModuleNotFoundError as error:
        extra = "pip install 'tilewright[postgres]'"
        raise DatabaseError(f"database {location.shown} needs the driver {error.name}; {extra}") from error
    if writes:
        return engine
    return engine.execution_options(postgresql_readonly=True, isolation_level="REPEATABLE READ")


def writer_engine(path: Path, journal_mode: JournalMode | None, busy_timeout_s: float) -> Engine:
    """Creates or upgrades the file where needed; None keeps its journal mode, and means WAL for a new one."""
    _check_writable(path)

    def connect() -> sqlite3.Connection:
        connection = open_sqlite(path, "mode=rwc", busy_timeout_s)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    engine = sqlite_engine(connect, writes=True)
    try:
        with explained(str(path)):
            _prepare(engine, path, journal_mode, busy_timeout_s)
            if journal_mode == "truncate":
                _truncate_journals(engine)
            with engine.begin():
                """Shows that the write lock can be had."""
    except BaseException:
        engine.dispose()
        raise
    return engine


def _check_writable(path: Path) -> None:
    """Before SQLite leaves files of its own in a folder in which it then cannot write."""
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWritable(f"folder {folder} cannot be made ({error.strerror}); pass another --db") from error
    for needed in (folder, path) if path.exists() else (folder,):
        if not os.access(needed, os.W_OK):
            raise NotWritable(f"{needed} may not be written; change its permissions, or pass another --db")


def _prepare(engine: Engine, path: Path, journal_mode: JournalMode | None, busy_timeout_s: float) -> None:
    """Processes that start together must not each try to set the journal mode and make the tables."""
    if path.exists() and path.stat().st_size > 0 and _is_prepared(engine, path, journal_mode):
        return
    lock = FileLock(f"{path}.lock", timeout=busy_timeout_s + 30.0)
    try:
        held = lock.acquire()
    except Timeout as error:
        raise StoreLocked(f"database {path} is being set up by another process; retry when it is done") from error
    except OSError as error:
        raise NotWritable(f"{path}.lock cannot be made ({error.strerror}); check the folder's permissions") from error
    with held:
        _prepare_alone(engine, path, journal_mode, busy_timeout_s)


def _prepare_alone(engine: Engine, path: Path, journal_mode: JournalMode | None, busy_timeout_s: float) -> None:
    with engine.connect().execution_options(reads_only=True) as connection:
        state = schema.state(connection, str(path))  # raises before anything of a foreign file is changed
    if journal_mode is None and state is schema.State.EMPTY:
        journal_mode = "wal"
    if journal_mode is not None:
        engine.dispose()  # the mode changes only while no other connection is open
        _set_journal_mode(path, journal_mode, busy_timeout_s)
    with engine.begin() as connection:
        if schema.state(connection, str(path)) is not schema.State.CURRENT:
            schema.migrate(connection)


def _is_prepared(engine: Engine, path: Path, journal_mode: JournalMode | None) -> bool:
    """Of the modes, a file remembers only whether it is WAL."""
    with engine.connect().execution_options(reads_only=True) as connection:
        is_current = schema.state(connection, str(path)) is schema.State.CURRENT
        is_wal = connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    return is_current and (journal_mode is None or is_wal == (journal_mode == "wal"))


def _set_journal_mode(path: Path, mode: JournalMode, busy_timeout_s: float) -> None:
    """SQLite's busy timeout does not cover the change from and to WAL, so this waits itself."""
    deadline = time.monotonic() + busy_timeout_s
    with closing(open_sqlite(path, "mode=rwc", busy_timeout_s)) as connection:
        while True:
            try:
                if connection.execute(f"PRAGMA journal_mode = {mode}").fetchone()[0] == mode:
                    return
            except sqlite3.OperationalError as error:
                if not result_name(error).startswith("SQLITE_BUSY"):
                    raise
            if time.monotonic() > deadline:
                what = f"cannot change its journal mode to {mode} while others have it open"
                raise StoreLocked(f"database {path} {what}; retry when they are done")
            time.sleep(0.02)


def _truncate_journals(engine: Engine) -> None:
    """A choice of each connection; the file does not keep it."""
    engine.dispose()

    @event.listens_for(engine, "connect")
    def choose(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA journal_mode = truncate").fetchone()
