"""Where records come from, in order: an explicit database, the user's, the records shipped with the package.

A layer that cannot be read is an empty one and a single warning: serving never fails for want of a record. SQLAlchemy
is imported only when a database file is really there to be read; JSON files need nothing.
"""

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import platformdirs

from tilewright.db.records_json import read_records
from tilewright.db.rows import StoredRecord
from tilewright.db.shipped import SHIPPED_DIR
from tilewright.errors import TilewrightError
from tilewright.runtime.log import warn_once
from tilewright.runtime.memo import Memo

DATABASE_VARIABLE = "TILEWRIGHT_DB"
BUSY_TIMEOUT_S = 2.0  # a model must not wait for a tuner: rather serve the next layer


class Layer(StrEnum):
    EXPLICIT = "explicit"
    USER = "user"
    SHIPPED = "shipped"
    DEFAULT = "default"


class RecordSet:
    """The records of one layer, found by case or by variant without a scan."""

    def __init__(self, layer: Layer, source: str, records: Iterable[StoredRecord] = ()) -> None:
        self.layer = layer
        self.source = source
        self.of_case: dict[str, list[StoredRecord]] = {}
        self.of_variant: dict[str, list[StoredRecord]] = {}
        for record in records:
            case_key = record.record.case_key
            self.of_case.setdefault(case_key, []).append(record)
            self.of_variant.setdefault(case_key.rpartition("|")[0], []).append(record)


_sets: Memo[tuple[Layer, str], RecordSet] = Memo()


def record_sets(db: str | Path | None = None) -> tuple[RecordSet, ...]:
    """Every layer for this explicit database, most specific first; read once per process, until `forget()`."""
    explicit = str(db) if db is not None else os.environ.get(DATABASE_VARIABLE, "")
    targets = [(Layer.EXPLICIT, explicit)] if explicit else []
    targets += [(Layer.USER, str(user_database())), (Layer.SHIPPED, str(SHIPPED_DIR))]
    return tuple(_sets.get(target) or _sets.keep(target, _load(*target)) for target in targets)


def user_database() -> Path:
    """As `db.paths.default_database`, whose module needs SQLAlchemy."""
    return Path(platformdirs.user_data_dir("tilewright")) / "tilewright.sqlite"


def _load(layer: Layer, target: str) -> RecordSet:
    if layer is Layer.SHIPPED:
        files = sorted(Path(target).glob("*.json"))
        return RecordSet(layer, target, [record for file in files for record in _readable(layer, str(file))])
    return RecordSet(layer, target, _readable(layer, target))


def _readable(layer: Layer, target: str) -> list[StoredRecord]:
    try:
        return _read(layer, target)
    except (TilewrightError, OSError, ValueError, ImportError) as error:
        warn_once(("layer", target), "%s records in %s are not used: %s", layer, target, error)
        return []


def _read(layer: Layer, target: str) -> list[StoredRecord]:
    path = Path(target)
    if "://" not in target and not path.exists():
        if layer is Layer.USER:  # nothing was tuned here yet: no fault, and the untuned shape is warned of anyway
            return []
        raise FileNotFoundError("there is no such file")
    return read_records(path) if path.suffix == ".json" else _read_database(target)


def _read_database(target: str) -> list[StoredRecord]:
    from tilewright.db.reader import Reader

    with Reader.open(target, busy_timeout_s=BUSY_TIMEOUT_S) as reader:
        return reader.active_records()
