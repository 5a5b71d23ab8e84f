"""What a driver's error means to a person: one exception of ours, with the database and the next step."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from tilewright.errors import (
    DamagedDatabase,
    DatabaseError,
    DiskFull,
    NotADatabase,
    NotWritable,
    StoreLocked,
    Unreachable,
)

# by prefix of SQLite's extended result names; the first that fits counts
_MEANINGS: tuple[tuple[str, type[DatabaseError], str], ...] = (
    ("SQLITE_BUSY", StoreLocked, "is being written by another process; retry when it is done, or pass another --db"),
    ("SQLITE_LOCKED", StoreLocked, "is being written by another connection; retry when it is done"),
    ("SQLITE_FULL", DiskFull, "cannot grow: the disk is full; free some space and run again, what is stored is kept"),
    ("SQLITE_NOTADB", NotADatabase, "is not an SQLite database and is left as it is; pass another --db"),
    (
        "SQLITE_CORRUPT",
        DamagedDatabase,
        "is cut off or malformed and is left as it is; restore a copy, or pass another --db",
    ),
    (
        "SQLITE_READONLY",
        NotWritable,
        "may not be written; change its permissions and its folder's, or pass another --db",
    ),
    (
        "SQLITE_CANTOPEN",
        NotWritable,
        "cannot be opened for writing; check its folder's permissions, or pass another --db",
    ),
    ("SQLITE_PERM", NotWritable, "may not be opened; change its permissions, or pass another --db"),
    ("SQLITE_IOERR", DatabaseError, "met a disk error; check the disk and its free space, what is stored is kept"),
)


@contextmanager
def explained(shown: str) -> Iterator[None]:
    """Turns the driver's errors into ours; `shown` names the database in the message."""
    try:
        yield
    except DBAPIError as error:
        if error.connection_invalidated or went_away(error.orig):
            why = " ".join(str(error.orig).split())
            raise Unreachable(f"database {shown} does not answer, or went away; retry when it is up ({why})") from error
        raise explanation(shown, error.orig or error) from error
    except sqlite3.Error as error:
        raise explanation(shown, error) from error


def explanation(shown: str, error: BaseException) -> DatabaseError:
    """The exception to raise for a driver's error."""
    name = result_name(error)
    for prefix, kind, meaning in _MEANINGS:
        if name.startswith(prefix):
            return kind(f"database {shown} {meaning} ({error})")
    return DatabaseError(f"database {shown}: {error}")


def went_away(error: BaseException | None) -> bool:
    """Whether a server's driver says that the connection is gone: no SQLSTATE, classes 08 and 57P, or 25P03."""
    if error is None or isinstance(error, sqlite3.Error):
        return False
    state = getattr(error, "sqlstate", None)
    if state is None:
        return type(error).__name__ in ("OperationalError", "ConnectionTimeout")
    return str(state).startswith(("08", "57P", "25P03"))


def result_name(error: BaseException) -> str:
    """SQLite's name for the error, empty for other databases and for errors of the Python layer."""
    return str(getattr(error, "sqlite_errorname", "") or "")
