"""`doctor`: every check answers, nothing is created, and a fault says what to do."""

import os
from pathlib import Path

import pytest

from tilewright.runtime import doctor
from tilewright.runtime.doctor import Check, State


def check(name: str, db: Path | None = None) -> Check:
    return next(found for found in doctor.examine(db) if found.name == name)


def test_every_subject_is_examined() -> None:
    names = {found.name for found in doctor.examine()}
    assert names >= {"torch", "triton", "gpu", "driver", "timer", "database", "triton cache", "temporary folder"}


def test_a_database_that_is_not_there_yet_is_fine_and_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "new.sqlite"
    found = check("database", path)
    assert (found.state, "the first tune makes it" in found.detail) == (State.OK, True)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_is_a_failure_and_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite"
    path.write_bytes(b"not a database" * 100)
    assert check("database", path).state is State.FAIL
    assert path.read_bytes() == b"not a database" * 100


def test_a_sound_database_is_described(tmp_path: Path) -> None:
    from tilewright.db.store import Store

    path = tmp_path / "own.sqlite"
    Store.open(path).close()
    found = check("database", path)
    assert (found.state, found.detail) == (State.OK, f"{path}: current schema, 0 active records, writable")


def test_a_database_on_a_network_share_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.db import paths
    from tilewright.db.store import Store

    Store.open(tmp_path / "own.sqlite").close()
    monkeypatch.setattr(paths, "network_file_system", lambda _: "nfs4")
    found = check("database", tmp_path / "own.sqlite")
    assert found.state is State.WARN
    assert "network file system (nfs4)" in found.detail


def test_the_environment_variable_names_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DB", str(tmp_path / "named.sqlite"))
    assert "named.sqlite" in check("database").detail


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_cache_folder_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(locked / "cache"))
    assert check("triton cache").state is State.FAIL


def test_a_cache_path_below_a_file_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert check("triton cache").state is State.FAIL


def test_an_old_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.OLDEST, "torch", "99.0")
    assert "older than 99.0" in check("torch").detail


def test_a_missing_gpu_is_a_warning_that_names_the_way_on() -> None:
    import torch

    found = check("gpu")
    assert torch.cuda.is_available() or (found.state is State.WARN and "--device interpret" in found.detail)


def test_the_worst_state_decides() -> None:
    checks = [Check("a", State.OK, ""), Check("b", State.WARN, "")]
    assert [
        doctor.worst(checks[:1]),
        doctor.worst(checks),
        doctor.worst([*checks, Check("c", State.FAIL, "")]),
    ] == list(State)
