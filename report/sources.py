"""The records that `results` speaks of: one database, and those shipped with the package."""

import os
from pathlib import Path

from tilewright.db.environment import normalised_gpu_name
from tilewright.db.paths import locate
from tilewright.db.queries import records
from tilewright.db.reader import Reader
from tilewright.db.records_json import read_records
from tilewright.db.rows import StoredRecord
from tilewright.db.shipped import SHIPPED_DIR
from tilewright.db.trust import OutsideResult, outside_results
from tilewright.report.queries import Sourced

DATABASE = "database"
SHIPPED = "shipped"


def gather(
    db: str | Path | None = None,
    *,
    problem: str | None = None,
    case_key: str | None = None,
    gpu: str | None = None,
    shipped: bool = True,
    history: bool = False,
) -> list[Sourced]:
    """Own records first. `db` is a database or a JSON file of records; None is TILEWRIGHT_DB, then the user's own.

    With `history` the former and quarantined records of the own database too. A named database that is missing or
    broken raises a DatabaseError; the user's own may not exist yet.
    """
    named = db if db is not None else os.environ.get("TILEWRIGHT_DB") or None
    found = [Sourced(DATABASE, stored) for stored in _own(named, history)]
    if shipped:
        files = sorted(SHIPPED_DIR.glob("*.json"))
        found += [Sourced(SHIPPED, stored) for file in files for stored in read_records(file)]
    return [sourced for sourced in found if _asked_for(sourced.stored, problem, case_key, gpu)]


def gather_outside(db: str | Path | None = None, problem: str | None = None) -> list[OutsideResult]:
    """What others report or wrote, from the same database as `gather`; a JSON file of records holds none."""
    named = db if db is not None else os.environ.get("TILEWRIGHT_DB") or None
    if named is not None and Path(named).suffix == ".json":
        return []
    location = locate(named)
    if named is None and location.path is not None and not location.path.exists():
        return []
    with Reader.open(named) as reader:
        return reader.ask(lambda session: outside_results(session, problem))


def _own(named: str | Path | None, history: bool) -> list[StoredRecord]:
    if named is not None and Path(named).suffix == ".json":
        return read_records(Path(named))
    location = locate(named)
    if named is None and location.path is not None and not location.path.exists():
        return []
    with Reader.open(named) as reader:
        return reader.ask(lambda session: records(session, active=not history))


def _asked_for(stored: StoredRecord, problem: str | None, case_key: str | None, gpu: str | None) -> bool:
    return (
        (problem is None or stored.problem == problem)
        and (case_key is None or stored.record.case_key == case_key)
        and (gpu is None or stored.environment.gpu_name == normalised_gpu_name(gpu))
    )
