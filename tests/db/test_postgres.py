"""The same store and reader on a real PostgreSQL server."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from db_factories import a_case, a_record, a_run, a_trial, an_env
from postgres_server import Server
from sqlalchemy import text
from sqlalchemy.engine import make_url

from tilewright.db import schema
from tilewright.db.models import Base
from tilewright.db.paths import without_password
from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus, Status
from tilewright.db.store import Store
from tilewright.errors import MissingDatabase, Unreachable


def lived_in(target: str | Path) -> None:
    """A database after everything that a store can do."""
    other = an_env(gpu_name="NVIDIA H100", power_limit_w=350.0)
    with Store.open(target) as store:
        run = store.begin_run(a_run(), an_env(), device="cuda:1")
        for number in range(3):
            store.add_trial(run, a_case(), an_env(), a_trial(number))
        store.add_trial(run, a_case(), an_env(), a_trial(2))  # stored already
        store.add_trial(run, a_case(), other, a_trial(7, status=Status.WRONG, reason="of", median_us=float("nan")))
        first = store.activate(run, a_case(), an_env(), a_record())
        store.activate(run, a_case(), an_env(), a_record(90.0))
        store.quarantine(store.activate(run, a_case(), other, a_record(80.0)), "wrong at seq_len 1000")
        store.finish_run(run, RunStatus.DONE, "a note")
        assert first == 1


def answers(target: str | Path) -> list[Any]:
    """Everything that a reader tells, without the moments of writing."""
    with Reader.open(target) as reader:
        records = [*reader.active_records(), *reader.record_history(a_case().key)]
        return [
            [dataclasses.replace(r, record=dataclasses.replace(r.record, created_at=None)) for r in records],
            [dataclasses.replace(t, trial=dataclasses.replace(t.trial, finished_at=None)) for t in reader.trials()],
            [dataclasses.replace(run, started_at=None, finished_at=None) for run in reader.runs()],  # type: ignore[arg-type]
            reader.environments(),
            reader.counts(),
        ]


def test_a_server_answers_like_a_file(server_url: str, tmp_path: Path) -> None:
    for target in (server_url, tmp_path / "tuned.sqlite"):
        lived_in(target)
    assert answers(server_url) == answers(tmp_path / "tuned.sqlite")


def test_views_show_what_is_served_and_what_was_measured(server_url: str) -> None:
    lived_in(server_url)
    with Store.open(server_url) as store, store.engine.connect() as connection:
        assert connection.execute(text("SELECT median_us FROM v_best")).scalars().all() == [90.0]
        assert connection.execute(text("SELECT count(*) FROM v_trials")).scalar() == 4


def test_migrated_tables_are_those_of_the_models(server_url: str) -> None:
    with Store.open(server_url) as store, store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


@pytest.mark.parametrize("revision", schema.REVISIONS[:-1])
def test_an_older_schema_is_upgraded_with_its_rows(server_url: str, revision: str) -> None:
    lived_in(server_url)
    before = answers(server_url)[1]
    with Store.open(server_url) as store, store.engine.begin() as connection:
        command.downgrade(schema.alembic_config(connection), revision)
    with pytest.raises(MissingDatabase, match="no current tables"):
        Reader.open(server_url)
    Store.open(server_url).close()
    assert answers(server_url)[1] == before


def together(action: Callable[[int], None], count: int = 8) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            action(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_stores_that_open_an_empty_database_at_once_and_write_the_same_rows_meet_no_error(server_url: str) -> None:
    def write(number: int) -> None:
        with Store.open(server_url) as store:
            run = store.begin_run(a_run(), an_env())
            for trial in range(4):
                store.add_trial(run, a_case(), an_env(sm_clock_mhz=number), a_trial(trial))
                store.activate(run, a_case(), an_env(), a_record(100.0 - trial))

    together(write)
    with Reader.open(server_url) as reader:
        assert (len(reader.environments()), len(reader.trials()), len(reader.active_records())) == (1, 32, 1)


def test_a_text_with_a_nul_is_stored_and_marked(server_url: str) -> None:
    with Store.open(server_url) as store:
        run = store.begin_run(a_run(), an_env())
        store.add_trial(run, a_case(), an_env(), a_trial(reason="cut\0off"))
        assert [trial.reason for trial in store.trials()] == ["cut\ufffdoff"]


def test_plain_postgresql_urls_and_parameters_pass_through(server_url: str) -> None:
    plain = server_url.replace("postgresql+psycopg", "postgresql") + "?sslmode=disable&application_name=tilewright"
    with Store.open(plain) as store, store.engine.connect() as connection:
        assert connection.execute(text("SELECT current_setting('application_name')")).scalar() == "tilewright"


def test_a_password_from_the_environment_or_a_file_is_used(
    server_url: str, shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = make_url(server_url)._replace(password=None).render_as_string(hide_password=False)
    monkeypatch.setenv("PGPASSWORD", shared_server.password)
    Store.open(bare).close()
    monkeypatch.delenv("PGPASSWORD")
    with pytest.raises(Unreachable):
        Store.open(bare)
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"127.0.0.1:*:*:owner:{shared_server.password}\n", encoding="ascii")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    Store.open(bare).close()


@pytest.mark.parametrize("broken", ["password", "port", "database"])
def test_no_message_shows_the_password(server_url: str, broken: str) -> None:
    secret = "swordfish-3"
    url = make_url(server_url)
    changed = {"password": url, "port": url._replace(port=1), "database": url._replace(database="none_such")}[broken]
    target = changed._replace(password=secret).render_as_string(hide_password=False)
    with pytest.raises(Unreachable) as caught:
        Store.open(target)
    assert secret not in str(caught.value)
    assert "***" in str(caught.value)


@pytest.mark.parametrize(
    ("text_", "shown"),
    [
        ("postgresql://me:secret@host/db?sslmode=require", "postgresql://me:***@host/db?sslmode=require"),
        (
            "postgresql://host/db?password=secret&sslpassword=secret",
            "postgresql://host/db?password=***&sslpassword=***",
        ),
        ("postgresql://me:sec/ret@host:port/db", "postgresql://***"),
        ("tuned.sqlite", "tuned.sqlite"),
    ],
)
def test_what_is_stored_of_a_url_holds_no_password(text_: str, shown: str) -> None:
    assert without_password(text_).replace("%2A", "*") == shown


def test_a_server_that_went_away_is_named_as_such_and_serves_again(own_server: Server) -> None:
    with Store.open(own_server.new_database()) as store:
        run = store.begin_run(a_run(), an_env())
        store.add_trial(run, a_case(), an_env(), a_trial())
        own_server.kill()
        with pytest.raises(Unreachable, match="does not answer, or went away"):
            store.add_trial(run, a_case(), an_env(), a_trial(1))
        own_server.start()
        store.add_trial(run, a_case(), an_env(), a_trial(1))
        assert len(store.trials()) == 2
