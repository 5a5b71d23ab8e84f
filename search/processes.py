"""Child processes that can neither outlive their parent nor disturb it."""

import ctypes
import importlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

import psutil

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def settle(hooks: Sequence[str], *, parent: int, interpret: bool) -> None:
    """First act of a child: it dies with its parent, leaves signals to it, dumps no core, and runs its hooks.

    The terminal and `kill -TERM -GROUP` reach children too; ended by them, they would look like crashed candidates. The
    core of a process that maps a GPU's memory takes minutes to write.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ.pop("TRITON_INTERPRET", None)  # the parent's may be set; what is interpreted cannot be compiled
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    for hook in hooks:
        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)()


def end_tree(process: BaseProcess) -> None:
    """Kills a child and everything that it started, and waits for it."""
    if process.pid is None:
        return
    for each in _tree(process.pid):
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.join(10)


def how_it_ended(process: BaseProcess) -> str:
    """Signal or exit code, once it has ended."""
    process.join(5)
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _tree(pid: int) -> list[psutil.Process]:
    """Children first; a process that is gone has left its own to init, which no search finds."""
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []
