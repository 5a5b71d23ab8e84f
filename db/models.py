"""Tables: what is queried is a column, what is only carried along is JSON, enums are text, times are UTC."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC in Python whatever the database keeps; SQLite keeps no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Text(TypeDecorator[str]):
    """A text; PostgreSQL refuses the character NUL, which a failed candidate's message may hold."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value.replace("\0", "\ufffd") if value and dialect.name == "postgresql" else value


class Base(DeclarativeBase):
    """Named constraints, because SQLite's batch migrations address them by name."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        str: Text,
        datetime: UtcDateTime,
        float: Double,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
    }


class EnvironmentTable(Base):
    """One row per digest of `db.environment.Environment`; clocks and ceilings are the latest seen."""

    __tablename__ = "environments"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    gpu_name: Mapped[str] = mapped_column(index=True)
    sm_count: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    capability: Mapped[str]
    triton: Mapped[str]
    mig: Mapped[str]
    torch: Mapped[str]
    cuda: Mapped[str]
    driver: Mapped[str]
    ptxas: Mapped[str]
    sm_clock_mhz: Mapped[int | None]
    memory_clock_mhz: Mapped[int | None]
    power_limit_w: Mapped[float | None]
    peak_flops_per_s: Mapped[float | None]
    peak_bytes_per_s: Mapped[float | None]
    created_at: Mapped[datetime]


class ProblemTable(Base):
    """A problem by name."""

    __tablename__ = "problems"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    family: Mapped[str]


class CaseTable(Base):
    """A workload case; equal key means equal work, so the first problem that names it keeps it."""

    __tablename__ = "cases"

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"), index=True)
    key: Mapped[str] = mapped_column(unique=True)
    variant_key: Mapped[str]
    name: Mapped[str]
    dtype: Mapped[str]
    weight_mode: Mapped[str]
    axes: Mapped[dict[str, Any]]  # the variable axes


class RunTable(Base):
    """One invocation of the tuner, with what is needed to tell whether its process still lives."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    command: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    effort: Mapped[str]
    tool_version: Mapped[str]
    protocol: Mapped[str]
    status: Mapped[str] = mapped_column(index=True)
    note: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int]
    job_id: Mapped[int | None] = mapped_column(BigInteger)  # of the fleet's queue
    device: Mapped[str] = mapped_column(server_default="")  # cuda:N on that host
    process_started_s: Mapped[float]  # seconds since the epoch; tells a reused pid from the old one
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class TrialTable(Base):
    """One candidate at one case, written when it ended."""

    __tablename__ = "trials"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    case_id: Mapped[int] = mapped_column(ForeignKey("cases.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    level: Mapped[str]
    template: Mapped[str]
    label: Mapped[str]
    config: Mapped[Any] = mapped_column(JSON)
    digest: Mapped[str]
    source_hash: Mapped[str]
    status: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str]
    regime: Mapped[str]
    compile_s: Mapped[float | None]
    gpu_s: Mapped[float | None]
    median_us: Mapped[float | None]
    q1_us: Mapped[float | None]
    q3_us: Mapped[float | None]
    samples: Mapped[int]
    error_ratio: Mapped[float | None]
    registers: Mapped[int | None]
    shared_memory_bytes: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    noisy: Mapped[str]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(server_default="1")

    __table_args__ = (
        Index(
            "uq_trials_identity",
            *("run_id", "case_id", "environment_id", "level", "digest", "source_hash", "regime", "attempt"),
            unique=True,
        ),
        Index("ix_trials_case", "case_id", "environment_id", "level", "template"),
    )


class RecordTable(Base):
    """Plans that were made the record; history stays, at most one per case, environment and regime is active."""

    __tablename__ = "records"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    case_id: Mapped[int] = mapped_column(ForeignKey("cases.id"), index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    plan: Mapped[list[dict[str, Any]]]
    digest: Mapped[str]
    source_hash: Mapped[str]
    verdict: Mapped[str]
    regime: Mapped[str]
    weight_mode: Mapped[str]
    median_us: Mapped[float | None]
    low_us: Mapped[float | None]
    high_us: Mapped[float | None]
    default_us: Mapped[float | None]
    baseline: Mapped[str]
    baseline_us: Mapped[float | None]
    floor_us: Mapped[float | None]
    deterministic: Mapped[bool]
    evidence: Mapped[dict[str, Any]]
    active: Mapped[bool]
    quarantine_reason: Mapped[str]
    created_at: Mapped[datetime]

    __table_args__ = (
        Index(
            "uq_records_active",
            *("case_id", "environment_id", "regime"),
            unique=True,
            sqlite_where=text("active"),
            postgresql_where=text("active"),
        ),
    )


class OutsideResultTable(Base):
    """What others report, and what their code came to here; `workload` is a case's name or the suite in words."""

    __tablename__ = "outside_results"

    id: Mapped[int] = mapped_column(primary_key=True)
    problem: Mapped[str]
    implementation: Mapped[str]
    hardware: Mapped[str]
    environment: Mapped[str]
    workload: Mapped[str]
    latency_us: Mapped[float]
    percent_sol: Mapped[float | None]
    trust: Mapped[str]
    license: Mapped[str]
    source_url: Mapped[str]
    source: Mapped[str]
    protocol: Mapped[str]
    digest: Mapped[str]  # of the sources that were measured; of what was only reported the number itself
    observed: Mapped[str]  # a date; ISO 8601
    imported_at: Mapped[datetime]

    __table_args__ = (
        UniqueConstraint(
            *("problem", "implementation", "hardware", "environment", "workload", "trust", "digest", "observed"),
            name="uq_outside_results_identity",
        ),
    )


class ReproductionTable(Base):
    """One more measurement of a record's plan; `verdict` says whether it agrees."""

    __tablename__ = "reproductions"

    id: Mapped[int] = mapped_column(primary_key=True)
    record_id: Mapped[int] = mapped_column(ForeignKey("records.id"), index=True)
    host: Mapped[str]
    verdict: Mapped[str]
    median_us: Mapped[float]
    low_us: Mapped[float]
    high_us: Mapped[float]
    measured_at: Mapped[datetime]
