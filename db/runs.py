"""Whose run is it: the process behind a run, and whether it still lives."""

import os
import socket
from dataclasses import dataclass

import psutil

_CLOCK_TOLERANCE_S = 30.0  # start times are derived from the boot time, which the clock's corrections move


@dataclass(frozen=True)
class Owner:
    """A process on a host; the start time tells it from a later one with the same pid."""

    host: str
    pid: int
    started_s: float

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def is_dead(self) -> bool:
        """True only where it can be told, which it cannot for another host."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            return bool(abs(process.create_time() - self.started_s) > _CLOCK_TOLERANCE_S)
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False
