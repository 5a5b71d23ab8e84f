"""Records as plain JSON, so that a serving process can read them with the standard library alone."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tilewright.db.environment import Environment
from tilewright.db.rows import RecordRow, StoredRecord, Verdict
from tilewright.errors import DamagedDatabase, MissingDatabase, NotWritable, SchemaTooNew

SCHEMA = 1
LONGEST_LIST = 16  # evidence keeps summaries; lists of single rounds are longer and stay in the database

_RECORD_FIELDS = {f.name: f for f in dataclasses.fields(RecordRow)}
_ENVIRONMENT_FIELDS = {f.name: f for f in dataclasses.fields(Environment)}


def write_records(path: Path, records: Iterable[StoredRecord]) -> None:
    """The file is replaced as a whole; records that cannot be used are left out."""
    text = dumps(record for record in records if not record.invalid)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise NotWritable(f"{path} cannot be written ({error.strerror})") from error


def read_records(path: Path) -> list[StoredRecord]:
    """In the order of the file; anything but what write_records writes raises a DatabaseError that names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingDatabase(f"there are no records at {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedDatabase(f"{path} cannot be read: {error}") from error
    return loads(text, str(path))


def dumps(records: Iterable[StoredRecord]) -> str:
    """One record after the other, keys sorted, so that two versions of a file can be compared by eye."""
    content = {"schema": SCHEMA, "records": [_to_json(record) for record in records]}
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def loads(text: str, shown: str = "records") -> list[StoredRecord]:
    """`shown` names the source in errors."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedDatabase(f"{shown} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("schema"), int):
        raise DamagedDatabase(f"{shown} is no file of records: it has no schema number")
    if content["schema"] > SCHEMA:
        raise SchemaTooNew(
            f"{shown} has schema {content['schema']}, this version knows up to {SCHEMA}; upgrade tilewright"
        )
    entries = content.get("records")
    if not isinstance(entries, list):
        raise DamagedDatabase(f"{shown} is no file of records: it has no list of them")
    records = []
    for position, entry in enumerate(entries):
        try:
            records.append(_from_json(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedDatabase(f"{shown}: record {position} is malformed: {error!r}") from error
    return records


def trimmed(evidence: Any) -> Any:
    """The evidence without its long lists, and without numbers that JSON has no word for."""
    if isinstance(evidence, Mapping):
        kept = {str(key): trimmed(value) for key, value in evidence.items()}
        return {
            key: value for key, value in kept.items() if not (isinstance(value, list) and len(value) > LONGEST_LIST)
        }
    if isinstance(evidence, (list, tuple)):
        return [trimmed(value) for value in evidence]
    return None if isinstance(evidence, float) and not math.isfinite(evidence) else evidence


def _to_json(stored: StoredRecord) -> dict[str, Any]:
    record = {name: getattr(stored.record, name) for name in _RECORD_FIELDS}
    created_at = stored.record.created_at
    record["created_at"] = None if created_at is None else created_at.isoformat()
    record["evidence"] = trimmed(stored.record.evidence)
    return {
        **record,
        "problem": stored.problem,
        "case": stored.case_name,
        "axes": dict(stored.axes),
        "environment": {name: getattr(stored.environment, name) for name in _ENVIRONMENT_FIELDS},
    }


def _from_json(entry: Mapping[str, Any]) -> StoredRecord:
    values = _present(entry, _RECORD_FIELDS)
    values["verdict"] = Verdict(values["verdict"])
    if values.get("created_at") is not None:
        values["created_at"] = datetime.fromisoformat(values["created_at"])
    if not isinstance(values["plan"], list) or not all(isinstance(stage, dict) for stage in values["plan"]):
        raise TypeError("plan must be a list of stages")
    if not isinstance(entry["axes"], dict) or not all(isinstance(size, int) for size in entry["axes"].values()):
        raise TypeError("axes must be whole numbers by name")
    return StoredRecord(
        record=RecordRow(**values),
        environment=Environment(**_present(entry["environment"], _ENVIRONMENT_FIELDS)),
        problem=entry["problem"],
        case_name=entry["case"],
        axes=entry["axes"],
    )


def _present(entry: Mapping[str, Any], known: Mapping[str, "dataclasses.Field[Any]"]) -> dict[str, Any]:
    """The known fields; those without a default must be there."""
    needed = {
        name
        for name, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(needed - set(entry))
    if missing:
        raise KeyError(missing[0])
    return {name: entry[name] for name in known if name in entry}
