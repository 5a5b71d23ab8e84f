"""A fleet worker's way to the store: trials are written behind the device's back, and an outage is waited for.

A thread stores what has ended as soon as it has ended; what ends while it stores goes into the next transaction
together, so that a slow server costs the device nothing. A worker that is killed loses at most those.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from tilewright.db import jobs
from tilewright.db.environment import Environment
from tilewright.db.rows import RecordRow, Status, StoredTrial, TrialRow
from tilewright.db.store import Store
from tilewright.errors import Unreachable
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.outcome import PROTOCOL
from tilewright.search.run_records import RunRecords

MOST_WAITING = 64  # trials; then the device waits
PATIENCE_S = 900.0
PAUSE_S = 0.5
Answer = TypeVar("Answer")


def patiently(action: Callable[[], Answer], says: Callable[[str], None] = lambda text: None) -> Answer:
    """Asks again until a server that went away is back; what was stored without our hearing of it is stored once."""
    deadline = time.monotonic() + PATIENCE_S
    told = False
    while True:
        try:
            return action()
        except Unreachable as error:
            if time.monotonic() > deadline:
                raise
            if not told:
                says(f"waiting: {error}")
                told = True
        time.sleep(PAUSE_S)


class FleetRecords(RunRecords):
    """The store as one job sees it; `close` ends the thread. `waited_s` is what the database cost the device."""

    def __init__(
        self, store: Store, run_id: int, environment: Environment, regime: str, says: Callable[[str], None]
    ) -> None:
        super().__init__(store, run_id, environment, regime)
        self.waited_s = 0.0
        self._says = says
        self._waiting: deque[tuple[WorkloadCase, TrialRow]] = deque()
        self._writing = 0
        self._closing = False
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._write_behind, name="trials")
        self._thread.start()

    def __enter__(self) -> "FleetRecords":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lost(self) -> bool:
        """Whether nothing more can be stored; the next call that stores says why."""
        return self._error is not None

    def record_trial(self, case: WorkloadCase, row: TrialRow) -> None:
        begun = time.monotonic()
        with self._change:
            self._change.wait_for(lambda: len(self._waiting) < MOST_WAITING or self._error)
            self._raise_error()
            self._waiting.append((case, row))
            self._change.notify_all()
        self.gpu_seconds += row.gpu_s or 0.0
        self.waited_s += time.monotonic() - begun

    def known_trials(self, case: WorkloadCase) -> list[TrialRow]:
        return self._now(lambda: super(FleetRecords, self).known_trials(case))

    def stored_trials(self, case: WorkloadCase) -> list[StoredTrial]:
        """As `known_trials`, each with its run."""
        asked = lambda: self._store.stored_trials(case_key=case.key, env=self._environment, protocol=PROTOCOL)  # noqa: E731
        return [stored for stored in self._now(asked) if stored.trial.status is not Status.ERROR]

    def ends_last(self, group: str, job_id: int) -> bool:
        """Whether the other boards of a shared case are done; see `jobs.ends_last`."""
        return self._now(lambda: jobs.ends_last(self._store, group, job_id, self.run_id))

    def turn(self, name: str) -> AbstractContextManager[None]:
        return jobs.turn(self._store, name)

    def activate(self, case: WorkloadCase, record: RecordRow) -> None:
        self._now(lambda: super(FleetRecords, self).activate(case, record))

    def active(self, case: WorkloadCase) -> RecordRow | None:
        return self._now(lambda: super(FleetRecords, self).active(case))

    def winners(self, case: WorkloadCase) -> list[tuple[WorkloadCase, FusionPlan]]:
        return self._now(lambda: super(FleetRecords, self).winners(case))

    def flush(self) -> None:
        """Returns when everything that ended is stored; raises what kept it from being stored."""
        with self._change:
            self._change.wait_for(lambda: self._error or not (self._waiting or self._writing))
            self._raise_error()

    def close(self) -> None:
        """Stores what is left, if it can be stored."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()

    def _now(self, action: Callable[[], Answer]) -> Answer:
        begun = time.monotonic()
        try:
            self.flush()
            return patiently(action, self._says)
        finally:
            self.waited_s += time.monotonic() - begun

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_behind(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                batch = list(self._waiting)
                self._waiting.clear()
                self._writing = len(batch)
                self._change.notify_all()
            error: BaseException | None = None
            try:
                patiently(lambda rows=batch: self._store.add_trials(self.run_id, self._environment, rows), self._says)  # type: ignore[misc]
            except BaseException as raised:
                error = raised
            with self._change:
                self._writing = 0
                self._error = error
                self._change.notify_all()
                if error is not None:
                    return
