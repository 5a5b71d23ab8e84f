"""Old files are brought up to date with everything that they hold."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from db_factories import fill

from tilewright.db import schema
from tilewright.db.models import Base
from tilewright.db.reader import Reader
from tilewright.db.store import Store


def rows(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with closing(sqlite3.connect(path)) as other:
        there = {name for (name,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        tables = [table.name for table in Base.metadata.sorted_tables]
        return {t: other.execute(f"SELECT * FROM {t} ORDER BY id").fetchall() if t in there else [] for t in tables}


def an_older_file(path: Path, revision: str = "tw0001") -> None:
    fill(path)
    with Store.open(path) as store, store.engine.begin() as connection:
        command.downgrade(schema.alembic_config(connection), revision)


def mark(path: Path) -> str:
    with closing(sqlite3.connect(path)) as other:
        return str(other.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def test_an_older_file_is_upgraded_with_its_rows(tmp_path: Path) -> None:
    path, untouched = tmp_path / "tuned.sqlite", tmp_path / "same.sqlite"
    an_older_file(path)
    before = rows(path)
    assert len(before["trials"]) == 3
    with Store.open(path) as store:
        assert [trial.attempt for trial in store.trials()] == [1, 1, 1]
    after = rows(path)
    assert {table: [row[: len(before[table][0])] for row in after[table]] for table in after} == before
    assert mark(path) == schema.HEAD
    fill(untouched)
    assert {table: len(found) for table, found in rows(untouched).items()} == {t: len(f) for t, f in after.items()}


def test_a_mark_set_back_by_hand_is_upgraded_too(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    fill(path)
    before = rows(path)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE alembic_version SET version_num = 'tw0001'")
    Store.open(path).close()
    assert (mark(path), rows(path)) == (schema.HEAD, before)


def test_a_reader_answers_from_an_older_file_without_changing_it(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    an_older_file(path)
    before = path.read_bytes()
    with Reader.open(path) as reader:
        assert (len(reader.active_records()), len(reader.trials())) == (1, 3)
    assert path.read_bytes() == before
    assert mark(path) == "tw0001"


def test_an_upgrade_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.sqlite"
    an_older_file(path)
    before = rows(path)

    def fail(*_: object) -> None:
        upgrade(*_)  # type: ignore[arg-type]
        raise RuntimeError("power cut")

    upgrade = command.upgrade
    monkeypatch.setattr(command, "upgrade", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        Store.open(path)
    assert (mark(path), rows(path)) == ("tw0001", before)


def test_migrated_tables_are_those_of_the_models(tmp_path: Path) -> None:
    with Store.open(tmp_path / "tuned.sqlite") as store, store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_the_revisions_written_in_the_code_are_those_of_the_scripts() -> None:
    scripts = ScriptDirectory(str(Path(schema.__file__).parent / "migrations"))
    assert tuple(script.revision for script in reversed(list(scripts.walk_revisions()))) == schema.REVISIONS


def test_all_revisions_can_be_undone(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    an_older_file(path, "base")
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("alembic_version",)]
