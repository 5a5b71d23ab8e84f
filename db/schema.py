"""Which revision a database has, and bringing an older one up to the newest, in one transaction."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from tilewright.db.models import Base
from tilewright.errors import DamagedDatabase, NotADatabase, SchemaTooNew

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "tw0010"
# in the order in which they are applied; written here so that opening a current file imports no alembic
REVISIONS = ("tw0001", "tw0002", "tw0003", HEAD)
APPLICATION_ID = 0x74776462  # `twdb`, SQLite's mark for whose file it is
_MARK = "alembic_version"
_SETTING_UP = 0x7477_0001  # PostgreSQL's advisory lock for making and changing tables


class State(Enum):
    """How far a database is from the newest schema."""

    EMPTY = "empty"
    OLDER = "older"
    CURRENT = "current"


def state(connection: Connection, shown: str) -> State:
    """Raises for a database that is foreign, newer, or lacks what its mark promises."""
    columns = {
        table: {c["name"] for c in found} for (_, table), found in inspect(connection).get_multi_columns().items()
    }
    if not columns:
        return State.EMPTY
    mark = connection.execute(text(f"SELECT version_num FROM {_MARK}")).scalar() if _MARK in columns else None
    if mark is None:
        raise NotADatabase(f"database {shown} belongs to another program and is left as it is; pass another --db")
    if mark not in REVISIONS:
        raise _unknown_mark(connection, shown, mark)
    if mark != HEAD:
        return State.OLDER
    for table in Base.metadata.sorted_tables:
        missing = [column.name for column in table.columns if column.name not in columns.get(table.name, set())]
        if missing:
            what = f"lacks {table.name}.{missing[0]}, which its schema {mark} promises, and is left as it is"
            raise DamagedDatabase(f"database {shown} {what}; restore a copy, or pass another --db")
    return State.CURRENT


def _unknown_mark(connection: Connection, shown: str, mark: str) -> Exception:
    ours = (
        connection.dialect.name != "sqlite"
        or connection.execute(text("PRAGMA application_id")).scalar() == APPLICATION_ID
    )
    if not ours:
        return NotADatabase(f"database {shown} belongs to another program and is left as it is; pass another --db")
    what = f"has schema {mark}, this version of tilewright knows up to {HEAD}"
    return SchemaTooNew(f"database {shown} {what}; it is left as it is: upgrade tilewright, or pass another --db")


def migrate(connection: Connection) -> None:
    """Creates or upgrades everything; the caller's transaction makes it all or nothing."""
    from alembic import command

    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_SETTING_UP})"))
    if connection.dialect.name == "sqlite":
        connection.execute(text(f"PRAGMA application_id = {APPLICATION_ID}"))
    command.upgrade(alembic_config(connection), HEAD)


def alembic_config(connection: Connection) -> "Config":
    """For alembic's commands, all of which then work on this connection."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
