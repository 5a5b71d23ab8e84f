"""`tilewright worker`: takes the jobs that fit its device, from any host, until it is told to leave."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from procrastinate import App, JobContext, exceptions
from procrastinate.worker import Worker

from tilewright.db import jobs
from tilewright.db.rows import RunStatus
from tilewright.db.store import Store
from tilewright.errors import LeaseLost, TilewrightError, UsageError
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.fleet_job import FleetJob
from tilewright.search.fleet_queue import (
    PAUSE_S,
    TASK,
    FencedJobs,
    OnlyWhenStopped,
    UnequalBoard,
    is_outage,
    make_app,
    queue_of,
    shared_queue,
)
from tilewright.search.fleet_records import FleetRecords, patiently
from tilewright.search.fleet_share import FleetShare, shared_studies
from tilewright.search.progress import Progress
from tilewright.search.request import resolve_device
from tilewright.search.run import Parts, compiler_for, context_for, run_row
from tilewright.search.session import DeviceSession
from tilewright.search.tune import Tuner

if TYPE_CHECKING:
    from tilewright.search.describe import Described


@dataclass(frozen=True)
class WorkerOptions:
    """The options of `tilewright worker`; a worker not heard of for `lease_s` loses its job to another."""

    db: str
    device: str = "auto"
    lease_s: float = 60.0
    until_done: bool = False

    def __post_init__(self) -> None:
        if self.lease_s <= 0:
            raise UsageError(f"lease must be a positive number of seconds, got {self.lease_s}")


def run_worker(
    options: WorkerOptions, progress: Progress, session_for: Callable[[str], DeviceSession] = DeviceSession
) -> int:
    """Jobs done. Returns when told to leave by a signal, or when nothing is left and `until_done` says so."""
    for name in ("procrastinate", "psycopg.pool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters is said in our words
    with Store.open(options.db) as store, session_for(resolve_device(options.device)) as session:
        if store.location.url is None:
            raise UsageError(f"a worker's database is a PostgreSQL server, got the file {store.location.shown}")
        store.limit_transactions(options.lease_s)
        jobs.require_tables(store)
        described = session.describe()
        desk = Desk(store, session, described, progress, options.lease_s)
        app = make_app(store.location.url)
        app.task(name=TASK, pass_context=True, retry=OnlyWhenStopped())(desk.tune_case)
        queue = queue_of(described.environment)
        progress.says(f"worker for {queue} jobs on {session.device}, database {store.location.shown}")
        queues = [queue, shared_queue(queue, described.environment.digest)]
        asyncio.run(_Shift(app, queues, options, store, progress.says).work())
        return desk.done


class Desk:
    """Where a job is done: one at a time, in a thread of procrastinate's."""

    def __init__(
        self, store: Store, session: DeviceSession, described: "Described", progress: Progress, lease_s: float
    ) -> None:
        self.done = 0
        self._lease_s = lease_s
        self._store, self._session, self._described, self._progress = store, session, described, progress

    def tune_case(self, context: JobContext, /, **arguments: Any) -> None:
        """Raises JobAborted when it is left unfinished; one that became another's ends without a word to the queue."""
        job = context.job
        assert job.id is not None
        assert job.worker_id is not None
        self._store.guard = jobs.Lease(job.id, job.worker_id, job.attempts)
        try:
            self._run(FleetJob.from_json(arguments), job.id, context.should_abort)
        except LeaseLost as lost:
            self._progress.says(f"{arguments.get('case')}: {lost}")
        except exceptions.JobAborted:
            raise
        except UnequalBoard as error:
            self._progress.says(f"{arguments.get('case')} is left to others: {error}")
            raise
        except BaseException as error:
            self._progress.says(f"{arguments.get('case')}: {type(error).__name__}: {error}")
            raise

    def _run(self, job: FleetJob, job_id: int, should_abort: Callable[[], bool]) -> None:
        """The run's row ends as the job does; another worker that takes the job over closes what is left open."""
        store, says = self._store, self._progress.says
        run_id = patiently(lambda: self._begin(job, job_id), says)
        status, note = RunStatus.DONE, ""
        try:
            self._tune(job, job_id, run_id, should_abort)
        except LeaseLost:
            raise
        except exceptions.JobAborted:
            status, note = RunStatus.INTERRUPTED, "its worker was told to leave"
            raise
        except BaseException as error:
            status, note = RunStatus.FAILED, f"{type(error).__name__}: {error}"[:500]
            raise
        finally:
            with suppress(LeaseLost):
                patiently(lambda: store.finish_run(run_id, status, note), says)
        self.done += 1

    def _begin(self, job: FleetJob, job_id: int) -> int:
        """Id of the run; a board that is unlike the one that began a shared case takes no part in it."""
        store, environment = self._store, self._described.environment
        run = replace(run_row(job.request), command=f"tilewright worker, job {job_id}")
        begin = partial(store.begin_run, run, environment, device=self._session.device, job_id=job_id)
        if job.part is None:
            return begin()
        with jobs.turn(store, job.part.group):
            first = jobs.first_environment(store, job.part.group)
            if first in (None, environment.digest):
                return begin()
        what = f"this board's environment is {environment.digest}, that of the first board {first}"
        hint = "they differ in model, power limit, driver or packages"
        raise UnequalBoard(f"{what}: {hint}", shared_queue(queue_of(environment), first))

    def _tune(self, job: FleetJob, job_id: int, run_id: int, should_abort: Callable[[], bool]) -> None:
        case, request = job.resolve(), job.request
        regime = request.resolved_effort.measure.regime_name
        records = FleetRecords(self._store, run_id, self._described.environment, regime, self._progress.says)
        compiler = compiler_for(self._described.limits, case.problem.family)
        with records, compiler as compile_ahead, self._shared(job, job_id, records) as share:
            stopping = lambda: records.lost or should_abort()  # noqa: E731
            parts = Parts(self._session, self._described, compile_ahead, records, self._progress, stopping)
            context = replace(context_for(request, case.problem.family, parts), share=share)
            tuner = Tuner(context, records, refinal=request.refinal, learned=self._learned(case, regime))
            seconds = float("inf") if request.budget is None else request.budget
            tuner.tune_case(case, deadline_s=context.now_s() + seconds, trial_limit=request.trials)
            records.flush()
        if should_abort() and not (share and share.ended):
            raise exceptions.JobAborted

    @contextmanager
    def _shared(self, job: FleetJob, job_id: int, records: FleetRecords) -> Iterator[FleetShare | None]:
        if job.part is None:
            yield None
            return
        with shared_studies(self._store, self._lease_s) as storage:
            yield FleetShare(storage, records, job.part, job_id, abandoned_s=5 * self._lease_s)

    def _learned(self, case: WorkloadCase, regime: str) -> list[tuple[WorkloadCase, FusionPlan]]:
        """Winners of other cases on this kind of device, whoever tuned them: the first to be tried here."""
        environment = self._described.environment
        found = patiently(lambda: self._store.active_records(case.problem.name, environment, regime))
        learned = []
        for stored in found:
            with suppress(TilewrightError, KeyError, TypeError, ValueError):
                other = case.problem.case(weight_mode=case.weight_mode, **stored.axes)
                if not stored.invalid and other.key == stored.record.case_key != case.key:
                    learned.append((other, FusionPlan.from_json(stored.record.plan)))
        return learned


class _Shift:
    """A worker's time at the queue: fetches, tells that it lives, gives back the jobs of those that do not."""

    def __init__(
        self, app: App, queues: list[str], options: WorkerOptions, store: Store, says: Callable[[str], None]
    ) -> None:
        self._app, self._queues, self._options, self._store, self._says = app, queues, options, store, says
        self._left = asyncio.Event()
        self._worker: Worker | None = None

    async def work(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._leave)
        async with self._app.open_async():
            watch = asyncio.create_task(self._watch())
            try:
                while not self._left.is_set():
                    await self._serve()
                    if self._options.until_done and not await asyncio.to_thread(self._remaining):
                        return
                    await self._pause(PAUSE_S)
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    def _leave(self) -> None:
        self._left.set()
        if self._worker is not None:
            self._worker.stop()  # type: ignore[no-untyped-call]

    async def _serve(self) -> None:
        """Until told to leave, until nothing waits, or until the queue no longer knows this worker."""
        lease_s = self._options.lease_s
        self._worker = Worker(
            app=self._app,
            queues=self._queues,
            wait=not self._options.until_done,
            fetch_job_polling_interval=min(2.0, lease_s / 4),
            abort_job_polling_interval=min(5.0, lease_s / 4),
            shutdown_graceful_timeout=0.0,  # the job is told at once, ends after its trial, and goes back
            listen_notify=False,
            install_signal_handlers=False,
            update_heartbeat_interval=min(10.0, lease_s / 5),
            stalled_worker_timeout=lease_s,
        )
        try:
            await self._worker.run()  # type: ignore[no-untyped-call]
        except exceptions.ConnectorException as error:
            self._says(f"the queue is asked again: {error.__cause__ or error}")

    async def _watch(self) -> None:
        """Gives back the jobs of dead workers."""
        manager = self._app.job_manager
        assert isinstance(manager, FencedJobs)
        while True:
            await asyncio.sleep(self._options.lease_s / 3)
            try:
                for job_id in await manager.prune_stalled_workers(self._options.lease_s):
                    self._says(f"job {job_id} goes back: its worker was not heard of")
            except exceptions.ConnectorException as error:
                if not is_outage(error):
                    raise

    def _remaining(self) -> int:
        return patiently(lambda: jobs.open_in(self._store, self._queues)).total()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), seconds)
