"""Rows that several processes store or change at the same moment, each inside the caller's transaction."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from tilewright.db import mapping
from tilewright.db.environment import Environment
from tilewright.db.models import Base, CaseTable, EnvironmentTable, ProblemTable, RunTable
from tilewright.db.rows import RunStatus
from tilewright.db.runs import Owner
from tilewright.problem import WorkloadCase


def now() -> datetime:
    return datetime.now(UTC)


def environment_id(session: Session, env: Environment) -> int:
    """Clocks and ceilings, which are no part of the identity, are kept at the latest values seen."""
    values = {"digest": env.digest, "created_at": now(), **mapping.environment_columns(env)}
    insert_absent(session, EnvironmentTable, [values])
    row = session.scalars(select(EnvironmentTable).filter_by(digest=env.digest)).one()
    for name in mapping.MOVING_FIELDS:
        if getattr(env, name) is not None:
            setattr(row, name, getattr(env, name))
    return row.id


def case_id(session: Session, case: WorkloadCase) -> int:
    known = select(CaseTable.id).filter_by(key=case.key)
    found = session.scalar(known)
    if found is not None:
        return found
    insert_absent(session, ProblemTable, [{"name": case.problem.name, "family": case.problem.family}])
    problem_id = session.scalars(select(ProblemTable.id).filter_by(name=case.problem.name)).one()
    values = {
        "problem_id": problem_id,
        "key": case.key,
        "variant_key": case.variant_key,
        "name": case.name,
        "dtype": case.problem.dtype,
        "weight_mode": case.weight_mode,
        "axes": dict(case.shape_axes),
    }
    insert_absent(session, CaseTable, [values])
    return session.scalars(known).one()


def insert_absent(session: Session, table: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Another process may store the same row at the same moment; waits for it where the server has row locks."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(postgresql.insert(table).on_conflict_do_nothing(), rows)
    else:
        session.execute(sqlite.insert(table).on_conflict_do_nothing(), rows)


def locked_environment(environment_id: int) -> Select[Any]:
    """A row that every worker may update; trials, which only refer to it, go on. SQLite locks the file anyhow."""
    return select(EnvironmentTable.id).filter_by(id=environment_id).with_for_update(key_share=True)


def close_runs_of_job(session: Session, job_id: int) -> None:
    former = update(RunTable).filter_by(status=RunStatus.RUNNING, job_id=job_id)
    note = "another worker took over its job"
    session.execute(former.values(status=RunStatus.INTERRUPTED, note=note, finished_at=now()))


def close_dead_runs(session: Session) -> None:
    """Of this host, and for no job: whoever takes over a job closes the runs for it."""
    running = select(RunTable).filter_by(status=RunStatus.RUNNING, host=Owner.this_process().host, job_id=None)
    for row in session.scalars(running):
        if Owner(row.host, row.pid, row.process_started_s).is_dead():
            row.status, row.note, row.finished_at = RunStatus.INTERRUPTED, "its process ended without a word", now()
