"""A bounded table of answers: read without a lock, written under one, oldest answer dropped first."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# More than the 10,000 shapes of a busy server; an entry is a few hundred bytes.
CAPACITY = 16384

_tables: list["Memo[object, object]"] = []


class Memo(Generic[K, V]):
    """`get` is the bound method of a plain dict, so that a hit costs one hash and nothing else."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._answers: dict[K, V] = {}
        self._capacity = capacity
        self._lock = threading.Lock()
        self.get: Callable[[K], V | None] = self._answers.get
        _tables.append(self)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._answers)

    def keep(self, key: K, value: V) -> V:
        """Stores the answer; where two threads worked it out at once, both get the first one."""
        with self._lock:
            while len(self._answers) >= self._capacity and key not in self._answers:
                del self._answers[next(iter(self._answers))]
            return self._answers.setdefault(key, value)

    def drop(self, key: K) -> None:
        """Forgets one answer, if it is there."""
        with self._lock:
            self._answers.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._answers.clear()


def clear_all() -> None:
    """Forgets every answer in the process."""
    for table in _tables:
        table.clear()
