"""Where the database is: the default, a path, or any SQLAlchemy URL; passwords are never shown."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import platformdirs
import psutil
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from tilewright.errors import NotADatabase, UsageError

# file systems whose locks SQLite's documentation warns about
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "ncpfs", "9p", "lustre", "gpfs", "beegfs"}
    | {"ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"}
    | {"afpfs", "webdav", "davfs", "fuse.davfs2", "pvfs2", "orangefs", "wekafs"}
)  # fmt: skip


class Mount(NamedTuple):
    """A mounted file system; the tests pass their own."""

    mountpoint: str
    fstype: str


@dataclass(frozen=True)
class Location:
    """A database: `path` for an SQLite file, `url` for a server; `shown` is fit for messages."""

    shown: str
    path: Path | None = None
    url: URL | None = None


def default_database() -> Path:
    """The user's own database, under the platform's data folder."""
    return Path(platformdirs.user_data_dir("tilewright")) / "tilewright.sqlite"


def locate(target: str | Path | None) -> Location:
    """The database that a path or an SQLAlchemy URL names; None is the default one."""
    if target is None:
        return _file(default_database())
    if isinstance(target, Path) or "://" not in target:
        if not str(target):
            raise UsageError("the database must be a path or an SQLAlchemy URL, got an empty string")
        return _file(Path(target))
    try:
        url = make_url(target)
    except (ArgumentError, ValueError) as error:
        raise UsageError("the database URL is not understood; write scheme://user:password@host/name") from error
    if url.get_backend_name() == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise UsageError(f"{target} keeps nothing; name a file, as in sqlite:///tuned.sqlite")
        return _file(Path(str(url.database)))
    if url.get_backend_name() != "postgresql":
        raise UsageError(f"the database must be a file or a PostgreSQL server, got {url.get_backend_name()}://")
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    return Location(shown_url(url), url=url)


def shown_url(url: URL) -> str:
    """Fit for messages and for the database itself: no password, not even one among the parameters."""
    hidden = {name: "***" for name in url.query if "password" in name.lower()}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def without_password(text: str) -> str:
    """The text, or, where it is a database URL, the form that may be shown and stored."""
    if "://" not in text:
        return text
    try:
        return shown_url(make_url(text))
    except (ArgumentError, ValueError):
        return text.partition("://")[0] + "://***"


def _file(path: Path) -> Location:
    path = Path(os.path.realpath(path.expanduser()))  # SQLite puts its log beside the target of a link
    if path.is_dir():
        raise NotADatabase(f"{path} is a folder; name a file in it")
    if path.is_file() and path.stat().st_size == 1:  # which SQLite takes for an empty file, and overwrites
        raise NotADatabase(f"database {path} is one byte long and is left as it is; pass another --db")
    return Location(str(path), path=path)


def network_file_system(path: Path, mounts: Sequence[Mount] | None = None) -> str | None:
    """Type of the network file system that holds the path, or None for a local disk."""
    if mounts is None:
        mounts = [Mount(p.mountpoint, p.fstype) for p in psutil.disk_partitions(all=True)]
    folder = path.resolve().parent
    holding = [mount for mount in mounts if folder.is_relative_to(mount.mountpoint)]
    # of two mounts at one point the later hides the earlier
    _, best = max(enumerate(holding), key=lambda m: (len(m[1].mountpoint), m[0]), default=(0, Mount("/", "")))
    return best.fstype if best.fstype.lower() in NETWORK_FILE_SYSTEMS else None
