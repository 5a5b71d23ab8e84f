"""Ctrl-C once finishes the current trial and saves; twice stops at once. SIGTERM is the same."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and did; `exit_code` is 128 plus the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}; everything finished is stored")
        self.exit_code = 128 + signal_number


class Interrupt:
    """Catches both signals within a `with` block, in the main thread."""

    def __init__(self, says: Callable[[str], None]) -> None:
        self._says = says
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        return self._signal is not None

    def raise_if_requested(self) -> None:
        if self._signal is not None:
            raise Interrupted(self._signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise Interrupted(number)
        self._signal = number
        self._says("stopping after this trial; again to stop at once")
