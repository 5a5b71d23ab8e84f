"""The questions that the store and the reader both ask; each is answered inside the caller's session."""

from collections.abc import Collection
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session

from tilewright.db import mapping
from tilewright.db.environment import Environment, normalised_gpu_name
from tilewright.db.models import (
    CaseTable,
    EnvironmentTable,
    ProblemTable,
    RecordTable,
    ReproductionTable,
    RunTable,
    TrialTable,
)
from tilewright.db.rows import Level, Status, StoredRecord, StoredRun, StoredTrial

AGREES = "agrees"  # a further measurement within noise, on another day or another host


class TrialFilter(TypedDict, total=False):
    """Which trials: every filter given must hold; `limit` keeps the latest ones."""

    case_key: str | None
    problem: str | None
    env: Environment | None
    level: Level | None
    template: str | None
    source_hash: str | None
    statuses: Collection[Status] | None
    run_id: int | None
    protocol: str | None
    limit: int | None


class RecordFilter(TypedDict, total=False):
    """Which records: every filter given must hold."""

    case_key: str | None
    problem: str | None
    gpu: str | None
    env: Environment | None
    regime: str | None


def trials(session: Session, **asked: Unpack[TrialFilter]) -> list[StoredTrial]:
    """In the order in which they were stored."""
    statuses = asked.get("statuses")
    conditions: list[ColumnElement[bool]] = []
    if statuses is not None:
        conditions.append(TrialTable.status.in_([str(status) for status in statuses]))
    for column, value in (
        (CaseTable.key, asked.get("case_key")),
        (ProblemTable.name, asked.get("problem")),
        (TrialTable.level, asked.get("level")),
        (TrialTable.template, asked.get("template")),
        (TrialTable.source_hash, asked.get("source_hash")),
        (TrialTable.run_id, asked.get("run_id")),
    ):
        if value is not None:
            conditions.append(column == value)
    protocol = asked.get("protocol")
    if protocol is not None:
        conditions.append(TrialTable.run_id.in_(select(RunTable.id).where(RunTable.protocol == protocol)))
    env = asked.get("env")
    if env is not None:
        conditions.append(EnvironmentTable.digest == env.digest)
    statement = _of_case(select(*_columns(TrialTable), *_case_columns()), TrialTable).where(*conditions)
    rows = session.execute(statement.order_by(TrialTable.id.desc()).limit(asked.get("limit"))).all()
    known = environments(session)
    return [mapping.to_trial(row._mapping, known[row.environment_id]) for row in reversed(rows)]


def records(session: Session, *, active: bool, **asked: Unpack[RecordFilter]) -> list[StoredRecord]:
    """Newest first; the active ones alone, or the whole history."""
    conditions: list[ColumnElement[bool]] = [RecordTable.active.is_(True)] if active else []
    gpu = asked.get("gpu")
    env = asked.get("env")
    for column, value in (
        (CaseTable.key, asked.get("case_key")),
        (ProblemTable.name, asked.get("problem")),
        (RecordTable.regime, asked.get("regime")),
        (EnvironmentTable.gpu_name, None if gpu is None else normalised_gpu_name(gpu)),
        (EnvironmentTable.digest, None if env is None else env.digest),
    ):
        if value is not None:
            conditions.append(column == value)
    again = (
        select(ReproductionTable.id)
        .where(ReproductionTable.record_id == RecordTable.id, ReproductionTable.verdict == AGREES)
        .exists()
    )
    columns = (*_columns(RecordTable), *_case_columns(), CaseTable.axes, again.label("reproduced"))
    statement = _of_case(select(*columns), RecordTable).where(*conditions)
    rows = session.execute(statement.order_by(RecordTable.id.desc())).all()
    known = environments(session)
    return [mapping.to_record(row._mapping, known[row.environment_id]) for row in rows]


def runs(session: Session) -> list[StoredRun]:
    """Newest first, each with the number of its trials."""
    count = select(func.count()).where(TrialTable.run_id == RunTable.id).scalar_subquery()
    rows = session.execute(select(*_columns(RunTable), count.label("trials")).order_by(RunTable.id.desc())).all()
    known = environments(session)
    return [mapping.to_run(row._mapping, known[row.environment_id], row.trials) for row in rows]


def environments(session: Session) -> dict[int, Environment]:
    """Every environment by its id."""
    rows = session.execute(select(*_columns(EnvironmentTable)).order_by(EnvironmentTable.id)).all()
    return {row.id: mapping.to_environment(row._mapping) for row in rows}


def counts(session: Session, case_key: str | None = None) -> dict[Status, int]:
    """Trials by status, of one case or of all."""
    statement = select(TrialTable.status, func.count()).group_by(TrialTable.status)
    if case_key is not None:
        statement = statement.join(CaseTable, CaseTable.id == TrialTable.case_id).where(CaseTable.key == case_key)
    found = {row[0]: row[1] for row in session.execute(statement)}
    return {status: found[status] for status in Status if status in found}


def _columns(table: type[Any]) -> list[Any]:
    return list(table.__table__.columns)


def _case_columns() -> tuple[Any, ...]:
    return (CaseTable.key.label("case_key"), CaseTable.name.label("case_name"), ProblemTable.name.label("problem"))


def _of_case(statement: Select[Any], table: type[TrialTable] | type[RecordTable]) -> Select[Any]:
    return (
        statement.join(CaseTable, CaseTable.id == table.case_id)
        .join(ProblemTable, ProblemTable.id == CaseTable.problem_id)
        .join(EnvironmentTable, EnvironmentTable.id == table.environment_id)
    )
