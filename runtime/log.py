"""Warnings that are said once: a server that falls back ten thousand times a second must not fill its log."""

import logging
import threading
from collections.abc import Hashable

logger = logging.getLogger("tilewright")

# Beyond this many different warnings nobody reads them, and the set that remembers them must not grow for ever.
MOST_WARNINGS = 1000

_said: set[Hashable] = set()
_lock = threading.Lock()


def warn_once(key: Hashable, message: str, *args: object) -> bool:
    """Logs the warning unless `key` was warned of before in this process; True when it was logged."""
    with _lock:
        if key in _said or len(_said) >= MOST_WARNINGS:
            return False
        _said.add(key)
    logger.warning(message, *args)
    return True


def forget_warnings() -> None:
    """Every warning may be said again."""
    with _lock:
        _said.clear()
