"""What tests ask about processes that they or the code under test started."""

import os
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def environment(**changes: str) -> dict[str, str]:
    """For a Python process of its own that imports the package and these tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT / "tests")]), **changes}


def children() -> set[int]:
    """Live children of this process, without multiprocessing's tracker and the database server that tests share."""
    return {child.pid for child in psutil.Process().children(recursive=True) if _counts(child)}


def _counts(child: psutil.Process) -> bool:
    try:
        if child.status() == psutil.STATUS_ZOMBIE or child.name() == "postgres":
            return False
        return "resource_tracker" not in " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        return False  # ended between the listing and the question


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
