"""The commands of a fleet: worker."""

from typing import Any

import click

from tilewright.cli_options import device_option
from tilewright.errors import DatabaseError


@click.command()
@click.option("--db", envvar="TILEWRIGHT_DB", required=True, metavar="URL", help="postgresql+psycopg://...")
@device_option
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="A worker not heard of for so long loses its job.",
)
@click.option("--until-done", is_flag=True, help="Leave when no job for this device waits or runs.")
def worker(**options: Any) -> None:
    """Take the jobs of `tilewright tune --db URL` that fit this GPU; Ctrl-C leaves after the trial in hand.

    \b
    Example: tilewright worker --db postgresql+psycopg://tuner@db.example.org/tuning
    """
    try:
        from tilewright.search.fleet_worker import WorkerOptions, run_worker
    except ModuleNotFoundError as error:
        raise missing(error) from error
    from rich.console import Console

    from tilewright.live import LiveProgress

    with LiveProgress(Console(stderr=True), measures=options["device"] != "interpret") as progress:
        run_worker(WorkerOptions(**options), progress)


def missing(error: ModuleNotFoundError) -> DatabaseError:
    """What to install for a fleet."""
    return DatabaseError(f"a fleet needs the package {error.name}: pip install 'tilewright[postgres]'")
