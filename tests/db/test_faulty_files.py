"""A file that is no sound database of ours gives one clear message and is left as it is."""

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from db_factories import fill

from tilewright.db.reader import Reader
from tilewright.db.store import Store
from tilewright.errors import DamagedDatabase, DatabaseError, NotADatabase, NotWritable, SchemaTooNew


def a_foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE trials (number INTEGER)")


def another_programs_alembic_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        other.execute("INSERT INTO alembic_version VALUES ('v3.0.0.d')")


def a_newer_database(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE alembic_version SET version_num = 'tw9999'")


def a_database_without_mark(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DELETE FROM alembic_version")


def a_database_without_a_column(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DROP VIEW v_trials")
        other.execute("ALTER TABLE trials DROP COLUMN noisy")


def cut_to(size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        fill(path)
        path.write_bytes(path.read_bytes()[:size])

    return make


def bytes_of(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)

    return make


FAULTY = {
    "five bytes": (bytes_of(b"hello"), NotADatabase),
    "one zero": (bytes_of(b"\0"), NotADatabase),
    "zeros": (bytes_of(b"\0" * 8192), NotADatabase),
    "noise": (bytes_of(random.Random(0).randbytes(5000)), NotADatabase),
    "text": (bytes_of(b"SQLite format 4\0" + b"x" * 5000), NotADatabase),
    "cut to the header": (cut_to(100), DatabaseError),
    "cut to 1 KB": (cut_to(1024), DatabaseError),
    "cut to a page": (cut_to(4096), DamagedDatabase),
    "cut to five pages": (cut_to(5 * 4096), DamagedDatabase),
    "foreign": (a_foreign_database, NotADatabase),
    "foreign with a mark": (another_programs_alembic_database, NotADatabase),
    "newer": (a_newer_database, SchemaTooNew),
    "no mark": (a_database_without_mark, NotADatabase),
    "no column": (a_database_without_a_column, DamagedDatabase),
}


OPENED: dict[str, Callable[[Path], object]] = {
    "store": Store.open,
    "store without wal": lambda path: Store.open(path, journal_mode="delete"),
    "reader": Reader.open,
}


@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_file_is_explained_and_left_as_it_is(
    tmp_path: Path, fault: str, opened: Callable[[Path], object]
) -> None:
    path = tmp_path / "tuned.sqlite"
    make, kind = FAULTY[fault]
    make(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(kind) as caught:
        opened(path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    message = str(caught.value)
    assert str(path) in message
    assert "--db" in message
    assert "\n" not in message


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(NotADatabase, match="is a folder; name a file in it"):
        Store.open(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable, match=r"file/sub.*cannot be made"):
        Store.open(tmp_path / "file" / "sub" / "tuned.sqlite")
