"""Between the plain rows and the tables' columns; content that cannot be read is said to be so, not raised."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import RowMapping

from tilewright.db.environment import Environment
from tilewright.db.rows import (
    Level,
    RecordRow,
    RunRow,
    RunStatus,
    Status,
    StoredRecord,
    StoredRun,
    StoredTrial,
    TrialRow,
    Trust,
    Verdict,
)

ENVIRONMENT_FIELDS = tuple(f.name for f in fields(Environment))
MOVING_FIELDS = ("sm_clock_mhz", "memory_clock_mhz", "peak_flops_per_s", "peak_bytes_per_s")
RUN_FIELDS = tuple(f.name for f in fields(RunRow))
TRIAL_FIELDS = tuple(f.name for f in fields(TrialRow) if f.name != "case_key")
RECORD_FIELDS = tuple(f.name for f in fields(RecordRow) if f.name != "case_key")


@dataclass(frozen=True)
class Malformed:
    """JSON text in the database that is no JSON."""

    text: str


def to_json_text(content: Any) -> str:
    """Plain JSON with sorted keys; numbers that JSON has no word for become null."""
    return json.dumps(_plain(content), sort_keys=True, allow_nan=False)


def from_json_text(text: str | bytes) -> Any:
    """What the text says, or Malformed: one bad row must not hide the others."""
    try:
        return json.loads(text)
    except ValueError:
        return Malformed(str(text))


def _plain(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    return _finite(content)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def trial_columns(trial: TrialRow) -> dict[str, Any]:
    return {name: _finite(getattr(trial, name)) for name in TRIAL_FIELDS}


def record_columns(record: RecordRow) -> dict[str, Any]:
    return {name: _finite(getattr(record, name)) for name in RECORD_FIELDS}


def environment_columns(environment: Environment) -> dict[str, Any]:
    return {name: getattr(environment, name) for name in ENVIRONMENT_FIELDS}


def to_environment(found: RowMapping) -> Environment:
    return Environment(**{name: found[name] for name in ENVIRONMENT_FIELDS})


def to_trial(found: RowMapping, environment: Environment) -> StoredTrial:
    """The first broken field is named in `invalid`, and the trial then counts as an error."""
    values = {name: found[name] for name in TRIAL_FIELDS}
    invalid = ""
    if isinstance(values["config"], Malformed):
        values["config"], invalid = None, "config is not JSON"
    try:
        values["status"], values["level"] = Status(values["status"]), Level(values["level"])
    except ValueError as error:
        values["status"], values["level"], invalid = Status.ERROR, Level.PLAN, str(error)
    return StoredTrial(
        id=found["id"],
        run_id=found["run_id"],
        trial=TrialRow(case_key=found["case_key"], **values),
        environment=environment,
        problem=found["problem"],
        case_name=found["case_name"],
        invalid=invalid,
    )


def to_record(found: RowMapping, environment: Environment) -> StoredRecord:
    values = {name: found[name] for name in RECORD_FIELDS}
    axes = found["axes"]
    invalid = _record_fault(values, axes)
    if not isinstance(values["plan"], list):
        values["plan"] = []
    if not isinstance(values["evidence"], dict):
        values["evidence"] = {}
    known = set(Verdict)
    values["verdict"] = Verdict(values["verdict"]) if values["verdict"] in known else Verdict.UNMEASURED
    return StoredRecord(
        record=RecordRow(case_key=found["case_key"], **values),
        environment=environment,
        problem=found["problem"],
        case_name=found["case_name"],
        axes=axes if isinstance(axes, dict) else {},
        id=found["id"],
        run_id=found["run_id"],
        active=found["active"],
        quarantine_reason=found["quarantine_reason"],
        invalid=invalid,
        trust=Trust.REPRODUCED if found["reproduced"] else Trust.MEASURED,
    )


def _record_fault(values: Mapping[str, Any], axes: Any) -> str:
    """What makes the content unusable; empty for a sound record."""
    if not isinstance(values["plan"], list) or not all(isinstance(stage, dict) for stage in values["plan"]):
        return "plan is not a JSON list of stages"
    if not isinstance(values["evidence"], dict):
        return "evidence is not a JSON object"
    if not isinstance(axes, dict):
        return "axes are not a JSON object"
    if values["verdict"] not in set(Verdict):
        return f"verdict {values['verdict']!r} is unknown"
    return ""


def to_run(found: RowMapping, environment: Environment, trials: int) -> StoredRun:
    return StoredRun(
        id=found["id"],
        run=RunRow(**{name: found[name] for name in RUN_FIELDS}),
        environment=environment,
        status=RunStatus(found["status"]),
        note=found["note"],
        pid=found["pid"],
        host=found["host"],
        started_at=found["started_at"],
        finished_at=found["finished_at"],
        trials=trials,
    )
