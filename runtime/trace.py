"""Counts the calls of shapes that have no record of their own, for `tilewright tune --wanted`.

On only where TILEWRIGHT_TRACE names a file. A call pays one addition; a thread of its own and the end of the process
add the counts to the file, under a lock, so that many processes may share it.
"""

import atexit
import os
import threading
from pathlib import Path

from tilewright.problem import WorkloadCase
from tilewright.runtime import shared_file
from tilewright.runtime.log import warn_once
from tilewright.wanted import SCHEMA, entry_of, merged

FILE_VARIABLE = "TILEWRIGHT_TRACE"
FLUSH_EVERY_S = 30.0
MOST_SHAPES = 65536  # shapes beyond are not counted: what a process remembers must not grow for ever


class Counter:
    """Calls of one shape; adding to it from several threads needs no lock, because nothing runs in between."""

    __slots__ = ("calls", "case", "grade", "written")

    def __init__(self, case: WorkloadCase, grade: str) -> None:
        self.case = case
        self.grade = grade
        self.calls = 0
        self.written = 0


class Trace:
    """The counters of this process, and their way into the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counters: dict[str, Counter] = {}
        self._lock = threading.Lock()
        self._flushing = threading.Lock()  # apart, because a new shape must not wait for a file

    def counter(self, case: WorkloadCase, grade: str) -> Counter | None:
        """The counter of this shape; None where there are too many."""
        with self._lock:
            if case.key not in self._counters and len(self._counters) >= MOST_SHAPES:
                warn_once(("trace", "full"), "%d shapes are counted, further ones are not", MOST_SHAPES)
                return None
            return self._counters.setdefault(case.key, Counter(case, grade))

    def flush(self) -> None:
        """Adds what was counted since the last time; a file that cannot be written is warned of, and tried again."""
        with self._flushing:
            with self._lock:
                news = {c: c.calls for c in self._counters.values() if c.calls > c.written}
            entries = [entry_of(c.case, c.grade, calls - c.written) for c, calls in news.items()]
            if not entries:
                return
            try:
                shared_file.change(self.path, SCHEMA, lambda content: merged(content, entries))
            except (OSError, ValueError, TypeError, KeyError) as error:
                warn_once(("trace", self.path), "counts of untuned shapes cannot be added to %s: %r", self.path, error)
                return
            for counter, calls in news.items():
                counter.written = calls

    def start_anew(self) -> None:
        """In a forked child: what the parent counted is the parent's to write."""
        self._lock, self._flushing = threading.Lock(), threading.Lock()
        for counter in self._counters.values():
            counter.written = counter.calls
        self.run()

    def run(self) -> None:
        """Flushes now and then, on a thread that keeps no process alive."""
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(FLUSH_EVERY_S):
                self.flush()

        threading.Thread(target=work, name="tilewright-trace", daemon=True).start()


_traces: dict[Path, Trace] = {}
_lock = threading.Lock()


def counter_for(case: WorkloadCase, grade: str) -> Counter | None:
    """Where to count calls of this shape; None while nothing is traced."""
    named = os.environ.get(FILE_VARIABLE)
    if not named:
        return None
    path = Path(named)
    with _lock:
        if not _traces:
            atexit.register(flush)
            os.register_at_fork(after_in_child=_start_anew)
        if path not in _traces:
            _traces[path] = Trace(path)
            _traces[path].run()
    return _traces[path].counter(case, grade)


def flush() -> None:
    """Writes now what the process has counted."""
    for trace in tuple(_traces.values()):
        trace.flush()


def _start_anew() -> None:
    for trace in _traces.values():
        trace.start_anew()
