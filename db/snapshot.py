"""Reading an SQLite file without writing anything beside it, whatever state its writer left it in.

The file is opened by SQLite alone while a writer lives: closing it by other means would drop the locks that
SQLite holds on it in this process.
"""

import shutil
import sqlite3
import tempfile
import time
import weakref
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sqlalchemy import Engine

from tilewright.db import schema
from tilewright.db.engine import open_sqlite, sqlite_engine
from tilewright.db.faults import result_name
from tilewright.errors import MissingDatabase, StoreLocked

_CLOCK_TICK_S = 0.02  # two writes within one tick of the file system's clock leave the same time
_LOCKS = Path("/proc/locks")

FileMark = tuple[int, int, int] | None  # inode, size, time of change; None where there is no file


class Manner(Enum):
    """How a file can be read in the state that it is in."""

    QUIET = "quiet"  # nobody writes: read as it is, and look afterwards whether that stayed so
    SHARED = "shared"  # a writer lives: SQLite's own locks give a consistent view
    LEFT = "left"  # a writer died and left a log: only a private copy can be recovered


@dataclass(frozen=True)
class Sight:
    """The files as they were at one moment; without a writer, equal sights mean that nothing was written between."""

    manner: Manner
    main: FileMark
    log: FileMark
    journal: FileMark

    @classmethod
    def of(cls, path: Path) -> "Sight":
        main, log, journal = (_mark(_beside(path, suffix)) for suffix in ("", "-wal", "-journal"))
        if main is None:
            raise MissingDatabase(f"there is no database at {path}; `tilewright tune` makes one, --db names another")
        if log is not None and log[1] > 0:
            return cls(Manner.SHARED if _is_held(_beside(path, "-shm")) else Manner.LEFT, main, log, journal)
        # a journal beside a live writer needs no copy: SQLite itself tells a dead writer's, and then refuses
        busy = journal is not None and journal[1] > 0
        return cls(Manner.SHARED if busy else Manner.QUIET, main, log, journal)

    def still_fits(self, path: Path) -> bool:
        """Whether an engine made for this sight may be used now."""
        now = Sight.of(path)
        return now == self or now.manner is self.manner is Manner.SHARED

    def vouches_for(self, path: Path) -> bool:
        """Whether what was read since then is consistent."""
        return self.manner is Manner.SHARED or Sight.of(path) == self


class Snapshot:
    """An engine on the file, or on a private copy of it, that answers in the newest schema."""

    def __init__(self, path: Path, sight: Sight, busy_timeout_s: float) -> None:
        self._path = path
        self._sight = sight
        self._busy_timeout_s = busy_timeout_s
        self._folders: list[str] = []
        self._remove_folders = weakref.finalize(self, _remove, self._folders)
        try:
            self.engine = self._open()
        except BaseException:
            self._remove_folders()
            raise

    def close(self) -> None:
        self.engine.dispose()
        self._remove_folders()

    def _open(self) -> Engine:
        if self._sight.manner is Manner.QUIET:
            return self._newest(self._path, "mode=ro&immutable=1")
        if self._sight.manner is Manner.SHARED:
            try:
                return self._newest(self._path, "mode=ro")
            except sqlite3.Error as error:
                if not result_name(error).startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
                    raise
        return self._newest(self._raw_copy(), "mode=rw")

    def _newest(self, path: Path, query: str) -> Engine:
        """An older database is upgraded, and an empty one filled with tables, in a private copy."""
        with closing(open_sqlite(path, query, self._busy_timeout_s)) as probe:
            probe.execute("SELECT count(*) FROM sqlite_master").fetchone()
            engine = sqlite_engine(lambda: open_sqlite(path, query, self._busy_timeout_s), writes=False)
            with engine.connect() as connection:
                if schema.state(connection, str(self._path)) is schema.State.CURRENT:
                    return engine
            upgraded = self._private_folder() / "upgraded.sqlite"
            with closing(open_sqlite(upgraded, "mode=rwc", self._busy_timeout_s)) as target:
                probe.backup(target)
                target.execute("PRAGMA journal_mode = delete").fetchone()
        engine = sqlite_engine(lambda: open_sqlite(upgraded, "mode=rw", self._busy_timeout_s), writes=False)
        with engine.begin() as connection:
            schema.migrate(connection)
        return engine

    def _raw_copy(self) -> Path:
        """The file with its log or journal, as they were when they were seen."""
        copy = self._private_folder() / "copy.sqlite"
        for suffix in ("", "-wal", "-journal"):
            if _beside(self._path, suffix).exists():
                shutil.copyfile(_beside(self._path, suffix), _beside(copy, suffix))
        if Sight.of(self._path) != self._sight:
            raise StoreLocked(f"database {self._path} changed while it was read; retry")
        return copy

    def _private_folder(self) -> Path:
        self._folders.append(tempfile.mkdtemp(prefix="tilewright-"))
        return Path(self._folders[-1])


def _remove(folders: list[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _mark(path: Path) -> FileMark:
    """If the file was written in this tick of the clock, waits for the next, so that a further write would show."""
    try:
        found = path.stat()
        if 0 <= time.time() - found.st_mtime < _CLOCK_TICK_S:
            time.sleep(_CLOCK_TICK_S)
            found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _is_held(index: Path) -> bool:
    """Whether a process has the shared index of the log open; where that cannot be told, its existence counts."""
    try:
        inode = index.stat().st_ino
    except FileNotFoundError:
        return False
    try:
        return f":{inode} " in _LOCKS.read_text(encoding="ascii")
    except OSError:
        return True
