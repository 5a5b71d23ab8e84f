"""Records from another compiler or template source: whether they may serve, and which of them first."""

import os

from packaging.version import Version

from tilewright.db.rows import StoredRecord
from tilewright.runtime.differences import version
from tilewright.runtime.log import warn_once

ALLOW_VARIABLE = "TILEWRIGHT_ALLOW_STALE"


def stale_allowed(asked: bool | None) -> bool:
    """What the call says, else the environment variable; a word that is neither yes nor no is warned of, and no."""
    if asked is not None:
        return asked
    word = os.environ.get(ALLOW_VARIABLE, "").strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word not in ("", "0", "false", "no", "off"):
        warn_once(("stale", word), "%s must be 1 or 0, got %r: stale records stay unused", ALLOW_VARIABLE, word)
    return False


def compiler_of(record: StoredRecord) -> Version:
    """Orders records by their Triton; what is no version comes before every version."""
    return version(record.environment.triton) or Version("0.dev0")
