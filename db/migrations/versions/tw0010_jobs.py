"""A run says on which device it was, and for which job of a fleet."""

import sqlalchemy as sa
from alembic import op

revision = "tw0010"
down_revision = "tw0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    known = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("runs")}
    if "job_id" not in known:  # a mark set back by hand leaves the columns there
        op.add_column("runs", sa.Column("job_id", sa.BigInteger))
        op.add_column("runs", sa.Column("device", sa.String, nullable=False, server_default=""))


def downgrade() -> None:
    for name in ("device", "job_id"):
        op.drop_column("runs", name)
