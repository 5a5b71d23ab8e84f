"""Trials of a real device in a file to replay: gzip JSON lines of a head, cases with their trials, an end.

What the database keeps of a measurement is kept here: median, quartiles, number of samples, device seconds, the
compiler's facts, and the reason of every failure. Single samples are not stored anywhere.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tilewright.db.environment import Environment
from tilewright.db.records_json import trimmed
from tilewright.db.rows import Level, RecordRow, Status, TrialRow, Verdict
from tilewright.errors import ProblemError, UsageError
from tilewright.problem import Problem, WorkloadCase, load_problem

FORMAT, VERSION = "tilewright.recording", 1
_TIMES = ("case_key", "started_at", "finished_at", "created_at")  # known from elsewhere, or of no use in a replay


@dataclass(frozen=True)
class Part:
    """What a replay must know of a template, which may have changed or gone since."""

    kind: str
    covers: tuple[str, ...]
    optional: tuple[str, ...]
    source_hash: str


@dataclass(frozen=True)
class Coverage:
    """How much of a template's space was recorded; `valid` is None where the sources have changed since."""

    recorded: int
    valid: int | None
    how: str  # every valid config | space-filling sample | chosen by a search


@dataclass(frozen=True)
class RecordedCase:
    """One case: trials in the order in which they were measured, and the record with its final, if there is one."""

    case: WorkloadCase
    trials: tuple[TrialRow, ...]
    record: RecordRow | None = None
    coverage: Mapping[str, Coverage] = field(default_factory=dict)

    def stages(self, template: str) -> list[TrialRow]:
        return [row for row in self.trials if row.level is Level.STAGE and row.template == template]


@dataclass(frozen=True)
class Recording:
    """Cases of one problem on one device, measured under one protocol in one regime."""

    problem: Problem
    environment: Environment
    regime: str
    protocol: str
    parts: Mapping[str, Part]
    cases: tuple[RecordedCase, ...]
    tool_version: str = ""

    def summary(self) -> str:
        """What is in it, one line a case and template."""
        lines = [f"{self.environment.gpu_name}, {self.problem.name}, regime {self.regime}, protocol {self.protocol}"]
        for one in self.cases:
            plans = sum(row.level is Level.PLAN for row in one.trials)
            lines.append(f"{one.case.name}: {len(one.trials)} trials, {plans} of plans")
            for name, found in one.coverage.items():
                of = "an unknown number of" if found.valid is None else str(found.valid)
                lines.append(f"  {name:<20} {found.recorded:>5} of {of} valid configs: {found.how}")
        return "\n".join(lines)

    def coverage_json(self) -> dict[str, Any]:
        """What is in it, for programs."""
        cases = [
            {
                "case": one.case.name,
                "trials": len(one.trials),
                "templates": {name: asdict(found) for name, found in one.coverage.items()},
                "record": one.record is not None,
            }
            for one in self.cases
        ]
        return {"schema": "tilewright.record/1", "problem": self.problem.name, "cases": cases}


def write_recording(recording: Recording, path: Path) -> None:
    """The same recording gives the same bytes; raises UsageError where the file cannot be written."""
    lines = list(_lines(recording))
    lines.append({"end": len(lines)})
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    try:
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    except OSError as error:
        raise UsageError(f"recording {path} cannot be written: {error.strerror}") from error


def read_recording(path: Path) -> Recording:
    """Raises UsageError that names the file where it is missing, foreign, of a newer version or damaged."""
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise UsageError(f"recording {path} cannot be read: {error.strerror}") from error
    if not packed.startswith(b"\x1f\x8b"):
        raise UsageError(f"{path} is no recording of tilewright; `tilewright record` makes one")
    try:
        lines = [json.loads(line) for line in gzip.decompress(packed).decode().splitlines()]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UsageError(f"recording {path} is damaged: {error}") from error
    head = lines[0] if lines else None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise UsageError(f"{path} is no recording of tilewright; `tilewright record` makes one")
    if not isinstance(head.get("version"), int) or head["version"] > VERSION:
        known = f"this version knows up to {VERSION}; upgrade tilewright"
        raise UsageError(f"recording {path} has version {head.get('version')}, {known}")
    if lines[-1] != {"end": len(lines) - 1}:
        raise UsageError(f"recording {path} is damaged: its end is missing")
    try:
        return _from_lines(head, lines[1:-1])
    except ProblemError as error:
        raise UsageError(f"recording {path} is of another definition of its problem: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"recording {path} is damaged: {error!r}") from error


def _lines(recording: Recording) -> Iterator[dict[str, Any]]:
    yield {
        "format": FORMAT,
        "version": VERSION,
        "tool_version": recording.tool_version,
        "problem": recording.problem.name,
        "constants": dict(recording.problem.constants),
        "environment": _present(recording.environment),
        "regime": recording.regime,
        "protocol": recording.protocol,
        "parts": {name: asdict(part) for name, part in recording.parts.items()},
    }
    for one in recording.cases:
        record = None if one.record is None else trimmed(_present(one.record))
        coverage = {name: asdict(found) for name, found in one.coverage.items()}
        case = {"case": dict(one.case.shape_axes), "weights": one.case.weight_mode, "key": one.case.key}
        yield {**case, "record": record, "coverage": coverage}
        yield from ({"trial": _present(row)} for row in one.trials)


def _present(row: Any) -> dict[str, Any]:
    """The fields that say more than their default."""
    named = ((f, getattr(row, f.name)) for f in fields(row) if f.name not in _TIMES)
    return {f.name: value for f, value in named if f.default is MISSING or value != f.default}


def _from_lines(head: Mapping[str, Any], lines: list[dict[str, Any]]) -> Recording:
    problem = load_problem(head["problem"]).with_constants(**head["constants"])
    cases: list[RecordedCase] = []
    trials: dict[str, list[TrialRow]] = {}
    for line in lines:
        if "case" in line:
            cases.append(_case(problem, line))
            trials[cases[-1].case.key] = []
            continue
        values = {**line["trial"], "case_key": cases[-1].case.key}
        row = TrialRow(**{**values, "level": Level(values["level"]), "status": Status(values["status"])})
        trials[row.case_key].append(row)
    return Recording(
        problem=problem,
        environment=Environment(**head["environment"]),
        regime=head["regime"],
        protocol=head["protocol"],
        parts={name: _part(content) for name, content in head["parts"].items()},
        cases=tuple(replace(one, trials=tuple(trials[one.case.key])) for one in cases),
        tool_version=head["tool_version"],
    )


def _part(content: Mapping[str, Any]) -> Part:
    covers, optional = (tuple(map(str, content[name])) for name in ("covers", "optional"))
    return Part(content["kind"], covers, optional, content["source_hash"])


def _case(problem: Problem, line: Mapping[str, Any]) -> RecordedCase:
    case = problem.case(weight_mode=line["weights"], **line["case"])
    if case.key != line["key"]:
        raise ProblemError(f"case {case.name} was {line['key']}, here it is {case.key}")
    record = None
    if line["record"] is not None:
        record = RecordRow(**{**line["record"], "case_key": case.key, "verdict": Verdict(line["record"]["verdict"])})
    return RecordedCase(case, (), record, {name: Coverage(**found) for name, found in line["coverage"].items()})
