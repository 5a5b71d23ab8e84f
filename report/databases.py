"""The databases that a question about trials goes to: the named or the user's own, and the one that is shipped."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tilewright.db.paths import locate
from tilewright.db.reader import Reader
from tilewright.db.shipped import SHIPPED_DIR
from tilewright.errors import UsageError
from tilewright.report.sources import DATABASE, SHIPPED


@contextmanager
def opened(db: str | Path | None, *, shipped: bool = True) -> Iterator[dict[str, Reader]]:
    """Readers by source, own first. `db` None is TILEWRIGHT_DB, then the user's own, which may not exist yet.

    A named database that is missing or broken raises a DatabaseError.
    """
    named = db if db is not None else os.environ.get("TILEWRIGHT_DB") or None
    if named is not None and Path(named).suffix == ".json":
        raise UsageError(f"{named} holds records without their trials; pass a database with --db")
    with ExitStack() as stack:
        readers: dict[str, Reader] = {}
        location = locate(named)
        if named is not None or location.path is None or location.path.exists():
            readers[DATABASE] = stack.enter_context(Reader.open(named))
        files = sorted(SHIPPED_DIR.glob("*.sqlite")) if shipped else []
        for position, file in enumerate(files):
            name = SHIPPED if position == 0 else f"{SHIPPED} {file.stem}"
            readers[name] = stack.enter_context(Reader.open(file))
        yield readers
