"""A noisy trial is measured once more, so trials count their attempts; views for people with other tools.

SQLite refuses to rebuild a table under a view: a later revision that does so drops the views first.
"""

import sqlalchemy as sa
from alembic import op

revision = "tw0002"
down_revision = "tw0001"
branch_labels = None
depends_on = None

IDENTITY = ["run_id", "case_id", "environment_id", "level", "digest", "source_hash", "regime"]

V_BEST = """
CREATE VIEW v_best AS
SELECT problems.name AS problem, cases.name AS case_name, cases.weight_mode, records.regime, environments.gpu_name,
       environments.kind, environments.triton, environments.torch, records.median_us, records.low_us, records.high_us,
       records.default_us, records.baseline, records.baseline_us, records.floor_us, records.verdict, records.plan,
       records.created_at, records.id AS record_id, records.run_id, cases.key AS case_key
FROM records
JOIN cases ON cases.id = records.case_id
JOIN problems ON problems.id = cases.problem_id
JOIN environments ON environments.id = records.environment_id
WHERE records.active
"""

V_TRIALS = """
CREATE VIEW v_trials AS
SELECT problems.name AS problem, cases.name AS case_name, environments.gpu_name, environments.kind, trials.level,
       trials.label, trials.status, trials.reason, trials.median_us, trials.q1_us, trials.q3_us, trials.samples,
       trials.noisy, trials.error_ratio, trials.registers, trials.shared_memory_bytes, trials.spill_bytes,
       trials.compile_s, trials.regime, trials.attempt, trials.config, trials.finished_at, trials.id AS trial_id,
       trials.run_id, cases.key AS case_key
FROM trials
JOIN cases ON cases.id = trials.case_id
JOIN problems ON problems.id = cases.problem_id
JOIN environments ON environments.id = trials.environment_id
"""


def upgrade() -> None:
    known = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("trials")}
    if "attempt" not in known:  # a mark set back by hand leaves the column there
        with op.batch_alter_table("trials") as batch:
            batch.add_column(sa.Column("attempt", sa.Integer, nullable=False, server_default="1"))
    op.drop_index("uq_trials_identity", "trials")
    op.create_index("uq_trials_identity", "trials", [*IDENTITY, "attempt"], unique=True)
    _drop_views()
    op.execute(V_BEST)
    op.execute(V_TRIALS)


def downgrade() -> None:
    """Second attempts have no place in the older table and go."""
    _drop_views()
    op.execute("DELETE FROM trials WHERE attempt > 1")
    op.drop_index("uq_trials_identity", "trials")
    with op.batch_alter_table("trials") as batch:
        batch.drop_column("attempt")
    op.create_index("uq_trials_identity", "trials", IDENTITY, unique=True)


def _drop_views() -> None:
    op.execute("DROP VIEW IF EXISTS v_best")
    op.execute("DROP VIEW IF EXISTS v_trials")
