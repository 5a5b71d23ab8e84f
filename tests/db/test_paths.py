"""Where a database is, and what is said about it."""

from pathlib import Path

import platformdirs
import pytest

from tilewright.db import store as store_module
from tilewright.db.paths import Mount, default_database, locate, network_file_system
from tilewright.db.store import Store
from tilewright.errors import DatabaseError, UsageError


def test_the_default_is_in_the_users_data_folder() -> None:
    assert locate(None).path == default_database()
    assert default_database().parent == Path(platformdirs.user_data_dir("tilewright"))


def test_a_path_and_its_url_are_the_same_database(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    assert locate(path) == locate(str(path)) == locate(f"sqlite:///{path}") == locate(f"sqlite+pysqlite:///{path}")


def test_a_home_folder_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/tuned.sqlite").path == tmp_path / "tuned.sqlite"


def test_a_path_may_hold_what_urls_reserve(tmp_path: Path) -> None:
    path = tmp_path / "a b?c#d%20e" / "tüned.sqlite"
    Store.open(path).close()
    assert path.is_file()


def test_a_password_is_never_shown() -> None:
    location = locate("postgresql+psycopg://me:secret@host/tuned")
    assert location.shown == "postgresql+psycopg://me:***@host/tuned"
    assert location.path is None


@pytest.mark.parametrize("target", ["", "://", "sqlite://", "sqlite:///:memory:", "post gres://me:secret@host"])
def test_a_target_that_keeps_nothing_or_is_not_understood_is_a_usage_error(target: str) -> None:
    with pytest.raises(UsageError) as caught:
        locate(target)
    assert "secret" not in str(caught.value)


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(DatabaseError, match="psycopg") as caught:
        Store.open("postgresql+psycopg://me:secret@host/tuned")
    assert "secret" not in str(caught.value)


MOUNTS = [Mount("/", "ext4"), Mount("/share", "nfs4"), Mount("/share/local", "xfs"), Mount("/ssh", "fuse.sshfs")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/t.sqlite", None),
        ("/share/t.sqlite", "nfs4"),
        ("/share/local/t.sqlite", None),
        ("/shared/t.sqlite", None),
        ("/ssh/a/b/t.sqlite", "fuse.sshfs"),
    ],
)
def test_a_network_file_system_is_told_by_the_nearest_mount(path: str, expected: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == expected


def test_a_database_on_a_network_share_warns_and_avoids_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "network_file_system", lambda _: "nfs4")
    with Store.open(tmp_path / "tuned.sqlite") as store, store.engine.connect() as connection:
        (warning,) = store.warnings
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
    assert "nfs4" in warning
    assert "journal mode" in warning


def test_a_local_database_warns_of_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "tuned.sqlite") as store:
        assert store.warnings == ()
