"""The fleet's queue: procrastinate on PostgreSQL, with every change to a job fenced by the lease of its worker.

procrastinate alone would let a worker that was thought dead finish a job that another has since taken; and it stops
for good when the server goes away for a moment. Both are mended here, in its own manager of jobs.
"""

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import psycopg
from procrastinate import App, PsycopgConnector, exceptions, jobs, manager, retry
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL

from tilewright.db.environment import Environment
from tilewright.db.jobs import SCHEMA
from tilewright.errors import TilewrightError

TASK = "tilewright.tune_case"
MAX_ATTEMPTS = 10  # a job that took so many workers down with it is no longer given to another
PATIENCE_S = 900.0  # how long a worker waits for a server that went away
PAUSE_S = 0.5
Answer = TypeVar("Answer")

_STALLED = """
WITH stalled AS MATERIALIZED (
    SELECT job.id, job.attempts FROM procrastinate_jobs job
    LEFT JOIN procrastinate_workers worker ON worker.id = job.worker_id
    WHERE job.status = 'doing'
      AND (worker.id IS NULL OR worker.last_heartbeat < now() - make_interval(secs => %(lease_s)s))
      AND pg_postmaster_start_time() < now() - make_interval(secs => %(lease_s)s)
    FOR UPDATE OF job SKIP LOCKED
), given_up AS (
    UPDATE procrastinate_jobs SET status = 'failed' WHERE id IN (SELECT id FROM stalled WHERE attempts >= %(most)s)
)
SELECT id, procrastinate_retry_job_v2(id, NULL::timestamptz, NULL, NULL, NULL) FROM stalled WHERE attempts < %(most)s
"""
_MINE = "id = %(job_id)s AND status = 'doing' AND worker_id = %(worker_id)s AND attempts = %(attempts)s FOR UPDATE"
_FINISH = f"""
WITH mine AS MATERIALIZED (SELECT id FROM procrastinate_jobs WHERE {_MINE})
SELECT procrastinate_finish_job_v1(id, %(status)s, false) FROM mine
"""
_GIVE_BACK = f"""
WITH mine AS MATERIALIZED (SELECT id FROM procrastinate_jobs WHERE {_MINE})
SELECT procrastinate_retry_job_v2(id, %(retry_at)s, NULL, %(queue)s, NULL) FROM mine
"""
_UNSEEN = """
WITH mine AS MATERIALIZED (
    SELECT id FROM procrastinate_jobs WHERE status = 'doing' AND worker_id = %(worker_id)s FOR UPDATE
)
SELECT procrastinate_retry_job_v2(id, NULL::timestamptz, NULL, NULL, NULL) FROM mine
"""


def queue_of(environment: Environment) -> str:
    """Of the jobs that fit this device: one queue a GPU model."""
    return environment.gpu_name if environment.kind == "cuda" else environment.kind


def shared_queue(queue: str, digest: str) -> str:
    """For parts of shared cases that were begun in this environment."""
    return f"{queue}|{digest}"


def conninfo(url: URL) -> str:
    """libpq's form of an SQLAlchemy URL; what it does not name comes from the environment or from pgpass."""
    given = {name: value if isinstance(value, str) else ",".join(value) for name, value in url.query.items()}
    options = f"{given.pop('options', '')} -c search_path={SCHEMA}".strip()
    parts = {"host": url.host, "port": url.port, "user": url.username, "password": url.password, "dbname": url.database}
    named = {name: str(value) for name, value in parts.items() if value is not None}
    return make_conninfo("", **{**named, **given, "options": options})


class FencedJobs(manager.JobManager):
    """A worker's view of the queue: waits for a server that went away, and changes a job only while it holds it."""

    async def fetch_job(self, queues: Iterable[str] | None, worker_id: int) -> jobs.Job | None:
        async def fetch() -> jobs.Job | None:
            # a job whose fetch was not answered would be ours for ever without our knowing
            await self.connector.execute_query_all_async(_UNSEEN, worker_id=worker_id)
            return await super(FencedJobs, self).fetch_job(queues, worker_id)

        return await _patiently(fetch)

    async def finish_job(self, job: jobs.Job, status: jobs.Status, delete_job: bool) -> None:
        await self._change(_FINISH, job, status=status.value)

    async def retry_job(
        self,
        job: jobs.Job,
        retry_at: datetime.datetime | None = None,
        priority: int | None = None,
        queue: str | None = None,
        lock: str | None = None,
    ) -> None:
        await self._change(_GIVE_BACK, job, retry_at=retry_at, queue=queue)

    async def update_heartbeat(self, worker_id: int) -> None:
        await _patiently(lambda: super(FencedJobs, self).update_heartbeat(worker_id))

    async def unregister_worker(self, worker_id: int) -> None:
        await _patiently(lambda: super(FencedJobs, self).unregister_worker(worker_id))

    async def prune_stalled_workers(self, seconds_since_heartbeat: float) -> list[int]:
        """Gives back the jobs of workers that were not heard of for so long; ids of these jobs.

        Time in which the server was down is nobody's silence. A worker's row is left for a day: it may wake up.
        """
        rows = await self.connector.execute_query_all_async(
            _STALLED, lease_s=seconds_since_heartbeat, most=MAX_ATTEMPTS
        )
        await super().prune_stalled_workers(max(86400.0, 10 * seconds_since_heartbeat))
        return [row["id"] for row in rows]

    async def _change(self, statement: str, job: jobs.Job, **values: object) -> None:
        """Changes nothing where the job is another's by now."""
        mine = {"job_id": job.id, "worker_id": job.worker_id, "attempts": job.attempts}
        await _patiently(lambda: self.connector.execute_query_all_async(statement, **mine, **values))


async def _patiently(action: Callable[[], Awaitable[Answer]]) -> Answer:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while True:
        try:
            return await action()
        except exceptions.ConnectorException as error:
            if not is_outage(error) or loop.time() > deadline:
                raise
        await asyncio.sleep(PAUSE_S)


def is_outage(error: BaseException) -> bool:
    """Whether the server does not answer, rather than answers no."""
    cause = error.__cause__
    return isinstance(cause, psycopg.OperationalError)


class UnequalBoard(TilewrightError):
    """The part of a shared case was begun on boards of another kind: it goes to `queue`, which is theirs alone."""

    def __init__(self, message: str, queue: str) -> None:
        super().__init__(message)
        self.queue = queue


class OnlyWhenStopped(retry.BaseRetryStrategy):
    """A job that its worker leaves goes back at once; one that failed for a reason of its own stays failed."""

    def get_retry_decision(self, *, exception: BaseException, job: jobs.Job) -> retry.RetryDecision | None:
        now = datetime.datetime.now(datetime.UTC)
        if isinstance(exception, UnequalBoard):
            return retry.RetryDecision(retry_at=now, queue=exception.queue)
        return retry.RetryDecision(retry_at=now) if isinstance(exception, exceptions.JobAborted) else None


def make_app(url: URL) -> App:
    """The queue on this server; two connections at most."""
    connector = PsycopgConnector(conninfo=conninfo(url), min_size=1, max_size=2, timeout=5.0)
    app = App(connector=connector)
    app.job_manager = FencedJobs(connector)
    return app
