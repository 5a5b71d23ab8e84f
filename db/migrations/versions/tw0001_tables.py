"""The tables."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "tw0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = ("environments", "problems", "cases", "runs", "trials", "records")


def upgrade() -> None:
    _environments()
    _problems_and_cases()
    _runs()
    _trials()
    _records()


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)


def _text(*names: str) -> list[Column[Any]]:
    return [Column(name, sa.String, nullable=False) for name in names]


def _numbers(*names: str) -> list[Column[Any]]:
    return [Column(name, sa.Double) for name in names]


def _integers(*names: str) -> list[Column[Any]]:
    return [Column(name, sa.Integer) for name in names]


def _time(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _key(table: str, owner: str) -> Column[Any]:
    constraint = f"fk_{owner}_{table.removesuffix('s')}_id_{table}"
    return Column(
        f"{table.removesuffix('s')}_id", sa.Integer, sa.ForeignKey(f"{table}.id", name=constraint), nullable=False
    )


def _create(table: str, *columns: Column[Any] | sa.UniqueConstraint) -> None:
    identity = Column("id", sa.Integer, nullable=False)
    op.create_table(table, identity, *columns, sa.PrimaryKeyConstraint("id", name=f"pk_{table}"))


def _environments() -> None:
    _create(
        "environments",
        *_text("digest", "kind", "gpu_name"),
        Column("sm_count", sa.Integer, nullable=False),
        Column("memory_bytes", sa.BigInteger, nullable=False),
        *_text("capability", "triton", "mig", "torch", "cuda", "driver", "ptxas"),
        *_integers("sm_clock_mhz", "memory_clock_mhz"),
        *_numbers("power_limit_w", "peak_flops_per_s", "peak_bytes_per_s"),
        _time("created_at"),
        sa.UniqueConstraint("digest", name="uq_environments_digest"),
    )
    op.create_index("ix_environments_gpu_name", "environments", ["gpu_name"])


def _problems_and_cases() -> None:
    _create("problems", *_text("name", "family"), sa.UniqueConstraint("name", name="uq_problems_name"))
    _create(
        "cases",
        _key("problems", "cases"),
        *_text("key", "variant_key", "name", "dtype", "weight_mode"),
        Column("axes", sa.JSON, nullable=False),
        sa.UniqueConstraint("key", name="uq_cases_key"),
    )
    op.create_index("ix_cases_problem_id", "cases", ["problem_id"])


def _runs() -> None:
    _create(
        "runs",
        _key("environments", "runs"),
        *_text("command"),
        Column("seed", sa.BigInteger, nullable=False),
        *_text("effort", "tool_version", "protocol", "status", "note", "host"),
        Column("pid", sa.Integer, nullable=False),
        Column("process_started_s", sa.Double, nullable=False),
        _time("started_at"),
        _time("finished_at", nullable=True),
    )
    op.create_index("ix_runs_status", "runs", ["status"])


def _trials() -> None:
    _create(
        "trials",
        *(_key(table, "trials") for table in ("runs", "cases", "environments")),
        *_text("level", "template", "label"),
        Column("config", sa.JSON, nullable=False),
        *_text("digest", "source_hash", "status", "reason", "regime"),
        *_numbers("compile_s", "gpu_s", "median_us", "q1_us", "q3_us"),
        Column("samples", sa.Integer, nullable=False),
        *_numbers("error_ratio"),
        *_integers("registers", "shared_memory_bytes", "spill_bytes"),
        *_text("noisy"),
        _time("started_at", nullable=True),
        _time("finished_at", nullable=True),
    )
    identity = ["run_id", "case_id", "environment_id", "level", "digest", "source_hash", "regime"]
    op.create_index("uq_trials_identity", "trials", identity, unique=True)
    op.create_index("ix_trials_case", "trials", ["case_id", "environment_id", "level", "template"])
    op.create_index("ix_trials_status", "trials", ["status"])


def _records() -> None:
    _create(
        "records",
        *(_key(table, "records") for table in ("runs", "cases", "environments")),
        Column("plan", sa.JSON, nullable=False),
        *_text("digest", "source_hash", "verdict", "regime", "weight_mode"),
        *_numbers("median_us", "low_us", "high_us", "default_us"),
        *_text("baseline"),
        *_numbers("baseline_us", "floor_us"),
        Column("deterministic", sa.Boolean, nullable=False),
        Column("evidence", sa.JSON, nullable=False),
        Column("active", sa.Boolean, nullable=False),
        *_text("quarantine_reason"),
        _time("created_at"),
    )
    op.create_index("ix_records_case_id", "records", ["case_id"])
    op.create_index(
        "uq_records_active",
        "records",
        ["case_id", "environment_id", "regime"],
        unique=True,
        sqlite_where=sa.text("active"),
        postgresql_where=sa.text("active"),
    )
