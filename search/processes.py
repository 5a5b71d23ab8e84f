"""Child processes that can neither outlive their parent nor disturb it."""

import contextlib
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
INTERPRET = "TRITON_INTERPRET"


def start(process: BaseProcess, *, interpret: bool) -> None:
    """Starts a child in which Triton interprets its kernels or compiles them, whatever this process does.

    The child imports the program's main module before anything of ours runs, and Triton decides on import.
    """
    before = os.environ.pop(INTERPRET, None)
    if interpret:
        os.environ[INTERPRET] = "1"
    try:
        process.start()
    finally:
        os.environ.pop(INTERPRET, None)
        if before is not None:
            os.environ[INTERPRET] = before


def settle(hooks: Sequence[str], *, parent: int) -> None:
    """First act of a child: it dies with its parent, leaves signals and stdout to it, dumps no core, runs its hooks.

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
    # The descriptor itself: kernels and compilers print from C too, and `--json` promises one document on stdout.
    with contextlib.suppress(OSError):  # a program without stderr
        os.dup2(2, 1)
    for hook in hooks:
        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)()


def end_tree(process: BaseProcess) -> None:
    """Kills a child and everything that it started, and waits for it."""
    if process.pid is None or process.exitcode is not None:
        return  # once it is reaped, its number may be another's
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
