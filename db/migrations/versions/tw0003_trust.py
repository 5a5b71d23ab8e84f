"""Results of others beside ours, and how often a record of ours was measured again."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "tw0003"
down_revision = "tw0002"
branch_labels = None
depends_on = None

TEXTS = (
    "problem", "implementation", "hardware", "environment", "workload", "trust", "license", "source_url", "source",
    "protocol", "digest", "observed",
)  # fmt: skip


def upgrade() -> None:
    known = set(sa.inspect(op.get_bind()).get_table_names())
    if "outside_results" not in known:  # a mark set back by hand leaves the tables there
        op.create_table(
            "outside_results",
            Column("id", sa.Integer, nullable=False),
            *(Column(name, sa.String, nullable=False) for name in TEXTS),
            Column("latency_us", sa.Double, nullable=False),
            Column("percent_sol", sa.Double),
            Column("imported_at", sa.DateTime(timezone=True), nullable=False),
            sa.PrimaryKeyConstraint("id", name="pk_outside_results"),
            sa.UniqueConstraint(
                "problem", "implementation", "hardware", "environment", "workload", "trust", "digest", "observed",
                name="uq_outside_results_identity",
            ),
        )  # fmt: skip
    if "reproductions" not in known:
        op.create_table(
            "reproductions",
            Column("id", sa.Integer, nullable=False),
            Column(
                "record_id",
                sa.Integer,
                sa.ForeignKey("records.id", name="fk_reproductions_record_id_records"),
                nullable=False,
            ),
            *(Column(name, sa.String, nullable=False) for name in ("host", "verdict")),
            *(Column(name, sa.Double, nullable=False) for name in ("median_us", "low_us", "high_us")),
            Column("measured_at", sa.DateTime(timezone=True), nullable=False),
            sa.PrimaryKeyConstraint("id", name="pk_reproductions"),
        )
        op.create_index("ix_reproductions_record_id", "reproductions", ["record_id"])


def downgrade() -> None:
    """What others said and what was measured again have no place in the older schema and go."""
    op.drop_table("reproductions")
    op.drop_table("outside_results")
