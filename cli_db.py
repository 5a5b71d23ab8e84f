"""`tilewright db`: what goes into the database beside what the tuner puts there."""

from pathlib import Path

import click

from tilewright.cli_options import db_option, emit, json_option
from tilewright.errors import UsageError


@click.group()
def db() -> None:
    """Put into the database what was not found by tuning here."""


@db.command("import-reported")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--problem", help="File the rows under this problem: name, or a folder. Default: as the file says.")
@db_option
@json_option
def import_reported(file: Path, problem: str | None, db: str | None, as_json: bool) -> None:
    """Results that others report, as trust level `reported`; importing a file again changes nothing.

    \b
    Example: tilewright db import-reported reported.json
    """
    from tilewright.db.store import Store
    from tilewright.db.trust import add_outside_results
    from tilewright.report.exchange.reported import read_reported

    rows = read_reported(read_text(file), str(file), problem=problem)
    with Store.open(db) as store:
        added = add_outside_results(store, rows)
    click.echo(f"{len(rows)} results read, {added} of them new", err=True)
    if as_json:
        content = {"schema": 1, "kind": "import-reported", "problem": rows[0].problem}
        emit({**content, "read": len(rows), "new": added}, as_json=True)


def read_text(file: Path) -> str:
    """UsageError for a file that is too large, cannot be read, or is no UTF-8 text."""
    from tilewright.report.exchange.reported import MOST_BYTES

    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{file} is larger than {MOST_BYTES >> 20} MiB, which no such file needs to be")
        return content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no UTF-8 text: {error.reason} at byte {error.start}") from error
