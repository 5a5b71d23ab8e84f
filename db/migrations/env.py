"""Alembic's entry: runs the revisions on the connection that `db.schema` hands over, inside its transaction."""

from alembic import context

from tilewright.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite changes most things of a table only by making it anew
)
with context.begin_transaction():
    context.run_migrations()
