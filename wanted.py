"""Files of wanted shapes: what a serving process counted, and what a tuning run makes of it. Most used first."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import UsageError
from tilewright.problem import Problem, WorkloadCase, case_of_key, problems_like

SCHEMA = "tilewright.wanted/1"


def entry_of(case: WorkloadCase, grade: str, calls: int) -> dict[str, Any]:
    """One shape as the file has it; `grade` is what served it."""
    problem = case.problem
    return {
        "case": case.name,
        "calls": calls,
        "grade": grade,
        "problem": problem.name,
        "dtype": problem.dtype,
        "weights": case.weight_mode,
        "key": case.key,
    }


def merged(content: Mapping[str, Any] | None, entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The file's content with these calls added, most used first."""
    known = {entry["key"]: dict(entry) for entry in content["shapes"]} if content else {}
    for entry in entries:
        before = known.get(entry["key"], {"calls": 0})["calls"]
        known[entry["key"]] = {**entry, "calls": before + entry["calls"]}
    return {"shapes": sorted(known.values(), key=lambda entry: (-entry["calls"], entry["key"]))}


@dataclass(frozen=True)
class Wanted:
    """Cases to tune, most used first, and the shapes that no problem at hand describes."""

    cases: tuple[WorkloadCase, ...]
    skipped: tuple[str, ...]


def read_wanted(path: str | Path, problem: Problem) -> Wanted:
    """UsageError names the file and what is wrong with it. A shape of another variant (no norm, other sizes) is looked
    for among the shipped problems too."""
    shapes = _shapes(Path(path))
    problems = problems_like(problem)
    cases, skipped = [], []
    for position, entry in enumerate(shapes):
        try:
            _check(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"wanted {path}: shape {position} is malformed: {error!r}") from error
        case = case_of_key(entry["key"], problems)
        if case is None:
            skipped.append(f"{entry['case']} ({entry['dtype']}, {entry['calls']} calls)")
        else:
            cases.append((entry["calls"], case))
    ordered = sorted(cases, key=lambda found: (-found[0], found[1].key))
    return Wanted(tuple(case for _, case in ordered), tuple(skipped))


def _shapes(path: Path) -> Sequence[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"wanted {path} cannot be read: {error}; TILEWRIGHT_TRACE={path} makes one") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("shapes"), list):
        raise UsageError(f"wanted {path} is no file of wanted shapes (schema {SCHEMA}); TILEWRIGHT_TRACE makes one")
    shapes: list[Any] = content["shapes"]
    if not shapes:
        raise UsageError(f"wanted {path} names no shape: every call had a record of its own")
    return shapes


def _check(entry: Any) -> None:
    for name, kind in (("case", str), ("calls", int), ("dtype", str), ("key", str)):
        if not isinstance(entry[name], kind):
            raise TypeError(f"{name} must be {kind.__name__}, got {entry[name]!r}")
