"""One case on several equal boards: their studies live in Optuna's storage on the fleet's server.

No board's time is compared with another's: what is told is the ratio to the default plan on the same board. Trials stay
the truth; the studies only say which points are taken, and can be dropped when no job is open.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import optuna
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tilewright.db.faults import explained
from tilewright.db.jobs import turn
from tilewright.db.paths import shown_url
from tilewright.db.rows import Level, TrialRow
from tilewright.db.store import Store
from tilewright.errors import Unreachable
from tilewright.problem import WorkloadCase
from tilewright.search.fleet_job import Part
from tilewright.search.fleet_records import FleetRecords, patiently
from tilewright.search.outcome import PROTOCOL
from tilewright.search.study import Point, PointStudy, key_of, make_sampler, quiet

SCHEMA = "tilewright_studies"  # of its own: Optuna has a table `trials` too
_LEFT = "left"  # mark of a trial that its board will not measure
Answer = TypeVar("Answer")


def create_studies(store: Store) -> None:
    """Makes Optuna's tables where they are not there, so that workers need no right to."""
    with turn(store, SCHEMA):
        with explained(store.location.shown), store.engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        _storage(store, lease_s=60.0, makes_tables=True).engine.dispose()


@contextmanager
def shared_studies(store: Store, lease_s: float) -> Iterator[RDBStorage]:
    storage = _answered(store.location.shown, lambda: _storage(store, lease_s=lease_s, makes_tables=False))
    try:
        yield storage
    finally:
        storage.engine.dispose()


def _storage(store: Store, *, lease_s: float, makes_tables: bool) -> RDBStorage:
    url = store.location.url
    assert url is not None
    given = url.query.get("options", "")
    options = [given if isinstance(given, str) else " ".join(given), f"-csearch_path={SCHEMA}"]
    options.append(f"-cidle_in_transaction_session_timeout={round(1000 * lease_s)}")  # as Store.limit_transactions
    settings = {"connect_args": {"options": " ".join(options).strip()}, "pool_pre_ping": True, "pool_size": 1}
    with quiet():
        return RDBStorage(
            url.render_as_string(hide_password=False), engine_kwargs=settings, skip_table_creation=not makes_tables
        )


def _answered(shown: str, action: Callable[[], Answer]) -> Answer:
    """Asks again while the server is away; Optuna's word for what went wrong becomes ours."""

    def once() -> Answer:
        with explained(shown):
            try:
                return action()
            except optuna.exceptions.StorageInternalError as error:
                if isinstance(error.__cause__, DBAPIError):
                    raise error.__cause__ from error
                raise Unreachable(f"shared studies in {shown} do not answer: {error.__cause__ or error}") from error

    return patiently(once)


@dataclass
class FleetShare:
    """This board's part; a point that was asked `abandoned_s` ago and not told is free again."""

    storage: RDBStorage
    records: FleetRecords
    part: Part
    job_id: int
    abandoned_s: float
    ended: bool = False  # with or without the final: what comes now is no reason to give the part back

    def known(self, case: WorkloadCase, default: str, yardstick_us: float) -> list[TrialRow]:
        """Trials of a run that has no time of the default plan cannot be compared, and are left out."""
        stored = self.records.stored_trials(case)
        yardsticks = {
            (found.run_id, found.trial.regime): found.trial.median_us
            for found in stored
            if found.trial.level is Level.PLAN and found.trial.digest == default and found.trial.median_us is not None
        }
        rows = []
        for found in stored:
            theirs = yardsticks.get((found.run_id, found.trial.regime))
            if theirs is not None:
                time_us = found.trial.median_us
                rows.append(
                    replace(found.trial, median_us=None if time_us is None else time_us * (yardstick_us / theirs))
                )
        return [row for row in rows if (row.level, row.digest) != (Level.PLAN, default)]

    def study(
        self, points: Sequence[Point], *, budget: int, sampler: str, seed: int, name: Sequence[str]
    ) -> "SharedPointStudy":
        digest = hashlib.sha256("|".join((PROTOCOL, *name)).encode()).hexdigest()[:32]
        full_name = f"{self.part.group}|{name[0]}|{digest}"
        sampler_seed = seed + self.part.number  # boards that draw alike would only get into each other's way

        def opened() -> optuna.Study:
            with self.records.turn(full_name), quiet():
                return optuna.create_study(
                    storage=self.storage,
                    study_name=full_name,
                    sampler=make_sampler(sampler, sampler_seed),
                    load_if_exists=True,
                )

        study = self.answered(opened)
        return SharedPointStudy(points, self, study, budget=budget, sampler=sampler, seed=sampler_seed)

    def is_last(self) -> bool:
        last = self.records.ends_last(self.part.group, self.job_id)
        self.ended = True
        return last

    def answered(self, action: Callable[[], Answer]) -> Answer:
        return _answered(shown_url(self.storage.engine.url), action)


class SharedPointStudy(PointStudy):
    """What any board asked or told counts as seen, and towards the budget; boards ask one after the other."""

    def __init__(
        self, points: Sequence[Point], share: FleetShare, study: optuna.Study, *, budget: int, sampler: str, seed: int
    ) -> None:
        super().__init__(points, budget=budget, sampler=sampler, seed=seed, study=study)
        self._share = share
        self._stored: set[str] = set()
        self._met_s: dict[int, float] = {}
        share.answered(self._refresh)

    def add_known(self, point: Point, value: float | None) -> None:
        self._share.answered(lambda: super(SharedPointStudy, self).add_known(point, value))
        self._stored.add(key_of(point))

    def ask(self) -> Point | None:
        def asked() -> Point | None:
            with self._turn():
                self._refresh()
                self._drop_unasked()
                return super(SharedPointStudy, self).ask()

        return self._share.answered(asked)

    def tell(self, point: Point, value: float | None) -> None:
        """After the trial is stored: whoever hears of the point can read it."""
        self._share.records.flush()
        trial = self._open[key_of(point)]
        state = TrialState.FAIL if value is None else TrialState.COMPLETE

        def told() -> None:
            with quiet():
                self._study.tell(trial, value, state=state, skip_if_finished=True)

        self._share.answered(told)
        del self._open[key_of(point)]

    def leave(self) -> None:
        def left() -> None:
            for trial in self._open.values():
                trial.set_user_attr(_LEFT, True)
                with quiet():
                    self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)

        self._share.answered(left)
        self._open.clear()

    def waits(self) -> bool:
        return bool(self._share.answered(self._refresh) - set(self._open))

    def _drop_unasked(self) -> None:
        """Optuna hands out what is enqueued first: left by an attempt that failed, it would pass for another point."""
        with quiet():
            for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                self._study.tell(self._study.ask(), state=TrialState.FAIL)

    def _turn(self) -> AbstractContextManager[None]:
        return self._share.records.turn(self._study.study_name)

    def _refresh(self) -> set[str]:
        """Points that are being measured."""
        now_s = time.monotonic()  # hosts need not agree on the time of day
        seen, running = set(), set()
        for trial in self._study.get_trials(deepcopy=False):
            key = key_of(trial.params)
            if key not in self._points or _LEFT in trial.user_attrs:
                continue
            if trial.state.is_finished():
                seen.add(key)
            elif now_s - self._met_s.setdefault(trial.number, now_s) < self._share.abandoned_s:
                running.add(key)
        self._seen = seen | running | self._stored | set(self._open)
        self._asked = len(self._seen)
        return running - seen
