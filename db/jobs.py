"""The tables of the fleet's queue as the store sees them: are they there, how far is a job, whose is it.

procrastinate makes them and changes them, in a schema of their own; this module only reads and locks.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from tilewright.db.faults import explained
from tilewright.db.store import Store
from tilewright.errors import LeaseLost, MissingDatabase

SCHEMA = "tilewright_jobs"
_JOBS = f"{SCHEMA}.procrastinate_jobs"
_SETTING_UP = 0x7477_0002  # advisory lock
OPEN = ("todo", "doing")


@dataclass(frozen=True)
class Lease:
    """A worker's hold on a job. As a store's guard it makes every transaction fail once the job is another's.

    The job's row stays locked to the transaction's end, so that the job cannot change hands between check and write.
    """

    job_id: int
    worker_id: int
    attempts: int

    def __call__(self, session: Session) -> None:
        held = session.execute(_HELD, vars(self)).first()
        if held is None:
            raise LeaseLost(f"job {self.job_id} was given to another worker: this one was not heard of for too long")


_HELD = text(
    f"SELECT 1 FROM {_JOBS} WHERE id = :job_id AND status = 'doing' AND worker_id = :worker_id "
    "AND attempts = :attempts FOR SHARE"
)


@dataclass(frozen=True)
class JobState:
    """A job as a person follows it; `note` says why it failed."""

    id: int
    status: str  # todo | doing | succeeded | failed | cancelled | aborted
    case: str
    trials: int
    note: str

    @property
    def open(self) -> bool:
        return self.status in OPEN


def create_tables(store: Store, statements: str) -> None:
    """Makes the queue's tables if they are not there; `statements` is procrastinate's schema."""
    with explained(store.location.shown), store.engine.begin() as connection:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_SETTING_UP})"))
        if connection.scalar(text(f"SELECT to_regclass('{_JOBS}')")) is None:
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
            connection.execute(text(f"SET LOCAL search_path TO {SCHEMA}"))
            connection.exec_driver_sql(statements.replace("%", "%%"))


def require_tables(store: Store) -> None:
    """Raises MissingDatabase where nothing was ever enqueued."""
    with explained(store.location.shown), store.engine.connect() as connection:
        if connection.scalar(text(f"SELECT to_regclass('{_JOBS}')")) is None:
            shown = store.location.shown
            raise MissingDatabase(f"database {shown} has no queue yet; `tilewright tune --db {shown}` makes it")


def open_jobs(store: Store, keys: Collection[str]) -> dict[str, int]:
    """Ids of the jobs that wait or run, by their queueing lock."""
    statement = text(
        f"SELECT queueing_lock, max(id) FROM {_JOBS} WHERE queueing_lock = ANY(:keys) AND status IN ('todo', 'doing') "
        "GROUP BY queueing_lock"
    )
    with explained(store.location.shown), store.engine.connect() as connection:
        return {row[0]: row[1] for row in connection.execute(statement, {"keys": list(keys)})}


def states(store: Store, ids: Sequence[int]) -> list[JobState]:
    """How far these jobs are, in the order of their ids."""
    statement = text(
        f"SELECT j.id, j.status, j.args ->> 'case' AS case_name, coalesce(sum(r.trials), 0) AS trials, "
        "coalesce((array_agg(r.note ORDER BY r.id DESC))[1], '') AS note "
        f"FROM {_JOBS} j LEFT JOIN (SELECT runs.id, runs.job_id, runs.note, "
        "(SELECT count(*) FROM trials WHERE trials.run_id = runs.id) AS trials FROM runs WHERE job_id = ANY(:ids)) r "
        "ON r.job_id = j.id WHERE j.id = ANY(:ids) GROUP BY j.id ORDER BY j.id"
    )
    with explained(store.location.shown), store.engine.connect() as connection:
        rows = connection.execute(statement, {"ids": list(ids)}).all()
    return [JobState(row.id, row.status, row.case_name, int(row.trials), row.note) for row in rows]


@contextmanager
def turn(store: Store, name: str) -> Iterator[None]:
    """One process at a time, on any host; a process that dies, or sleeps past its lease, loses its turn."""
    with explained(store.location.shown), store.engine.begin() as connection:
        connection.execute(_TURN, {"name": name})
        yield


def first_environment(store: Store, group: str) -> str | None:
    """Digest of the environment in which the first part of a shared case was begun."""
    statement = text(
        f"SELECT e.digest FROM runs r JOIN environments e ON e.id = r.environment_id JOIN {_JOBS} j ON j.id = r.job_id "
        "WHERE j.args -> 'part' ->> 'group' = :group ORDER BY r.id LIMIT 1"
    )
    with explained(store.location.shown), store.engine.connect() as connection:
        found = connection.scalar(statement, {"group": group})
    return None if found is None else str(found)


def ends_last(store: Store, group: str, job_id: int, run_id: int) -> bool:
    """Whether all other parts are done; if not, this one is done with the same transaction, and another is the last.

    A part that was done before, and came back because its worker died as it said so, is not the last.
    """

    def action(session: Session) -> bool:
        session.execute(_TURN, {"name": group})
        done = "EXISTS (SELECT 1 FROM runs r WHERE r.job_id = j.id AND r.status = 'done')"
        parts = f"SELECT 1 FROM {_JOBS} j WHERE j.args -> 'part' ->> 'group' = :group"
        mine = text(f"{parts} AND j.id = :job_id AND {done}")
        others = text(f"{parts} AND j.id <> :job_id AND j.status IN ('todo', 'doing') AND NOT {done}")
        asked = {"group": group, "job_id": job_id}
        if session.execute(mine, asked).first() is not None:
            return False
        if session.execute(others, asked).first() is None:
            return True
        session.execute(text("UPDATE runs SET status = 'done' WHERE id = :run_id"), {"run_id": run_id})
        return False

    return store.change(action)


_TURN = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")


def open_in(store: Store, queues: Sequence[str]) -> Counter[str]:
    """Jobs that wait or run in these queues, by status."""
    statement = text(
        f"SELECT status, count(*) FROM {_JOBS} WHERE queue_name = ANY(:queues) AND status IN ('todo', 'doing') "
        "GROUP BY status"
    )
    with explained(store.location.shown), store.engine.connect() as connection:
        return Counter({row[0]: row[1] for row in connection.execute(statement, {"queues": list(queues)})})
