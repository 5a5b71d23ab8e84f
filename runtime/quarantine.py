"""Plans that failed here: remembered in a small file of the user's, because reading a database writes nothing.

An entry speaks of one plan of one case, of the template sources and of the environment in which it failed: another
Triton, card or template source gives the plan another chance, and so does deleting the file.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs

from tilewright.db.environment import Environment
from tilewright.kernel_templates.plan import FusionPlan, Registry
from tilewright.problem import WorkloadCase
from tilewright.runtime import shared_file
from tilewright.runtime.log import warn_once
from tilewright.runtime.memo import Memo

PATH_VARIABLE = "TILEWRIGHT_QUARANTINE"
SCHEMA = "tilewright.quarantine/1"


@dataclass(frozen=True)
class Failed:
    """What failed: a plan of a case, under these sources, in this environment."""

    case_key: str
    plan: str
    source_hash: str
    environment: tuple[str, ...]

    @classmethod
    def of(cls, case: WorkloadCase, plan: FusionPlan, registry: Registry, environment: Environment) -> "Failed":
        return cls(case.key, plan.digest, registry.source_hash(plan), environment.identity)


Reasons = dict[Failed, str]
_known: Memo[Path, Reasons] = Memo()


def quarantine_file() -> Path:
    """What TILEWRIGHT_QUARANTINE names, else a file in the user's state folder."""
    named = os.environ.get(PATH_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_state_dir("tilewright")) / "quarantine.json"


def reason_against(failed: Failed) -> str:
    """Why this plan is in quarantine; empty when it is not. The file is read once a process, until `forget()`."""
    return _reasons(quarantine_file()).get(failed, "")


def hold(failed: Failed, reason: str) -> None:
    """Keeps the plan out of this process."""
    _reasons(quarantine_file())[failed] = reason


def put(failed: Failed, reason: str) -> None:
    """Keeps the plan out of this process and of every later one; a file that cannot be written is warned of and no
    reason to fail."""
    hold(failed, reason)
    path = quarantine_file()
    try:
        shared_file.change(path, SCHEMA, lambda content: _with(content, failed, reason))
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn_once(("quarantine", path), "%s cannot be written, so that this process alone knows: %r", path, error)


def _reasons(path: Path) -> Reasons:
    known = _known.get(path)
    return _known.keep(path, _load(path)) if known is None else known


def _load(path: Path) -> Reasons:
    try:
        content = shared_file.read(path, SCHEMA)
        return {} if content is None else dict(_entry(entry) for entry in content["entries"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn_once(("quarantine", path), "the quarantine in %s is not used: %r", path, error)
        return {}


def _entry(entry: dict[str, Any]) -> tuple[Failed, str]:
    environment = tuple(str(field) for field in entry["environment"])
    return Failed(entry["case"], entry["plan"], entry["source_hash"], environment), str(entry["reason"])


def _with(content: dict[str, Any] | None, failed: Failed, reason: str) -> dict[str, Any]:
    entries = [] if content is None else [entry for entry in content["entries"] if _entry(entry)[0] != failed]
    entry = {
        "case": failed.case_key,
        "plan": failed.plan,
        "source_hash": failed.source_hash,
        "environment": list(failed.environment),
        "reason": reason,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {"entries": [*entries, entry]}
