"""What a reader asks of many trials at once: counted and ranked by the database, fast for 100,000 of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session

from tilewright.db import mapping
from tilewright.db.environment import normalised_gpu_name
from tilewright.db.models import CaseTable, EnvironmentTable, ProblemTable, TrialTable
from tilewright.db.queries import environments
from tilewright.db.rows import Level, Status, StoredTrial

MEASURED = "cuda"  # the only kind of device whose times are measurements


@dataclass(frozen=True)
class Wanted:
    """Which trials: every filter given must hold; `environment` is the beginning of a digest."""

    problem: str | None = None
    cases: tuple[str, ...] = ()
    gpu: str | None = None
    environment: str | None = None
    run_id: int | None = None
    template: str | None = None
    statuses: tuple[Status, ...] = ()
    level: Level | None = None
    digests: tuple[str, ...] = ()


def fastest(session: Session, wanted: Wanted, limit: int) -> list[StoredTrial]:
    """The `limit` fastest sound trials of each case, environment and regime, fastest first."""
    place = func.row_number().over(
        partition_by=(TrialTable.case_id, TrialTable.environment_id, TrialTable.regime, TrialTable.level),
        order_by=(TrialTable.median_us, TrialTable.id),
    )
    sound = (
        TrialTable.status == str(Status.OK),
        TrialTable.median_us.is_not(None),
        EnvironmentTable.kind == MEASURED,
    )
    ranked = _joined(select(TrialTable.id, place.label("place"))).where(*_conditions(wanted), *sound).subquery()
    chosen = select(ranked.c.id).where(ranked.c.place <= limit)
    rows = _read(session, TrialTable.id.in_(chosen))
    return sorted(rows, key=lambda r: (r.problem, r.trial.case_key, r.environment.digest, r.trial.median_us or 0.0))


def matching(session: Session, wanted: Wanted) -> list[StoredTrial]:
    """Every trial, in the order in which they were stored."""
    return _read(session, *_conditions(wanted))


def _read(session: Session, *conditions: ColumnElement[bool]) -> list[StoredTrial]:
    names = (CaseTable.key.label("case_key"), CaseTable.name.label("case_name"), ProblemTable.name.label("problem"))
    statement = _joined(select(*TrialTable.__table__.columns, *names)).where(*conditions).order_by(TrialTable.id)
    known = environments(session)
    return [mapping.to_trial(row._mapping, known[row.environment_id]) for row in session.execute(statement)]


def failures(session: Session, wanted: Wanted) -> list[Mapping[str, Any]]:
    """Trials that are not OK, by status, level, template and reason: `count`, `cases`, one `label`, `last`."""
    statement = _joined(
        select(
            TrialTable.status,
            TrialTable.level,
            TrialTable.template,
            TrialTable.reason,
            func.min(TrialTable.label).label("label"),
            func.count().label("count"),
            func.count(CaseTable.name.distinct()).label("cases"),
            func.max(TrialTable.finished_at).label("last"),
        )
    )
    grouped = statement.where(*_conditions(wanted), TrialTable.status != str(Status.OK)).group_by(
        TrialTable.status, TrialTable.level, TrialTable.template, TrialTable.reason
    )
    return [dict(row._mapping) for row in session.execute(grouped)]


def covered(session: Session, wanted: Wanted) -> list[Mapping[str, Any]]:
    """Trials of each case and environment: `trials`, `ok`, `templates` that ran, `gpu_s`, `last`."""
    statement = _joined(
        select(
            ProblemTable.name.label("problem"),
            CaseTable.name.label("case"),
            CaseTable.key.label("case_key"),
            TrialTable.environment_id,
            func.count().label("trials"),
            func.count().filter(TrialTable.status == str(Status.OK)).label("ok"),
            func.count(func.nullif(TrialTable.template, "").distinct()).label("templates"),
            func.sum(TrialTable.gpu_s).label("gpu_s"),
            func.max(TrialTable.finished_at).label("last"),
        )
    )
    grouped = statement.where(*_conditions(wanted)).group_by(
        ProblemTable.name, CaseTable.name, CaseTable.key, TrialTable.environment_id
    )
    known = environments(session)
    found = [row._mapping for row in session.execute(grouped)]
    return [{**row, "environment": known[row["environment_id"]]} for row in found]


def _joined(statement: Any) -> Select[Any]:
    joined: Select[Any] = (
        statement.select_from(TrialTable)
        .join(CaseTable, CaseTable.id == TrialTable.case_id)
        .join(ProblemTable, ProblemTable.id == CaseTable.problem_id)
        .join(EnvironmentTable, EnvironmentTable.id == TrialTable.environment_id)
    )
    return joined


def _conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    gpu = None if wanted.gpu is None else normalised_gpu_name(wanted.gpu)
    found = [
        column == value
        for column, value in (
            (ProblemTable.name, wanted.problem),
            (EnvironmentTable.gpu_name, gpu),
            (TrialTable.run_id, wanted.run_id),
            (TrialTable.template, wanted.template),
            (TrialTable.level, None if wanted.level is None else str(wanted.level)),
        )
        if value is not None
    ]
    if wanted.environment:
        found.append(EnvironmentTable.digest.startswith(wanted.environment, autoescape=True))
    if wanted.cases:
        found.append(CaseTable.name.in_(wanted.cases))
    if wanted.statuses:
        found.append(TrialTable.status.in_([str(status) for status in wanted.statuses]))
    if wanted.digests:
        found.append(TrialTable.digest.in_(wanted.digests))
    return found
