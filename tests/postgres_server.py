"""A throw-away PostgreSQL server from Debian's binaries, in a folder of its own; it can be killed and started again."""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

START_LIMIT_S = 60.0
SETTINGS = {
    "fsync": "off",  # a killed server loses nothing without it; a power cut is not tested
    "max_connections": "300",
    "shared_buffers": "64MB",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "autovacuum": "on",
}


def why_none() -> str:
    """Why no server can be started here; empty where one can."""
    if find_spec("psycopg") is None or find_spec("procrastinate") is None:
        return "psycopg and procrastinate are not installed: pip install 'tilewright[postgres]'"
    if _binaries() is None:
        return "no PostgreSQL server is installed: apt-get install postgresql"
    return ""


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb else None


class Server:
    """Runs as an unprivileged user where this process is root, because PostgreSQL refuses root."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tilewright-postgres-"))
        self.password = secrets.token_hex(8)
        self.port = _free_port()
        self._binaries = _binaries()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count()
        password_file = self.folder / "password"
        password_file.write_text(self.password, encoding="ascii")
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres" if _has_user("postgres") else "nobody")
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            for path in (self.folder, password_file):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        options = ("-U", "owner", "-A", "scram-sha-256", "--pwfile", str(password_file), "-E", "UTF8", "--no-sync")
        self._run("initdb", "-D", str(self.folder / "data"), *options, "--locale", "C")
        self.start()

    def url(self, database: str, user: str = "owner", password: str | None = None) -> str:
        return f"postgresql+psycopg://{user}:{password or self.password}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """URL of an empty database."""
        name = f"tuned{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        import psycopg

        where = f"host=127.0.0.1 port={self.port} user=owner password={self.password} dbname={database}"
        with closing(psycopg.connect(where, autocommit=True)) as connection:
            cursor = connection.execute(statement.encode())
            return list(cursor.fetchall()) if cursor.description else []

    def start(self) -> None:
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [str(self._tool("postgres")), "-D", str(self.folder / "data"), "-p", str(self.port), *settings],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                **self._user,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.execute("SELECT 1")
                return
            except Exception:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "log").read_text()[-2000:]) from None
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9 of the server and all of its processes."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        for process in (server, *server.children()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # at once
            self._process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tool(self, name: str) -> Path:
        assert self._binaries is not None
        return self._binaries / name

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._tool(name)), *arguments], cwd=self.folder, capture_output=True, text=True, **self._user
        )
        assert done.returncode == 0, done.stderr


def _has_user(name: str) -> bool:
    return any(entry.pw_name == name for entry in pwd.getpwall())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """One for all tests that leave it running."""
    reason = why_none()
    if reason:
        pytest.skip(reason)
    server = Server()
    yield server
    server.close()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that a test may kill."""
    reason = why_none()
    if reason:
        pytest.skip(reason)
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server_url(shared_server: Server) -> str:
    """URL of an empty database, password included."""
    return shared_server.new_database()
