"""The commands of a fleet: worker, and merge for hosts that never meet."""

from pathlib import Path
from typing import Any

import click

from tilewright.cli_options import device_option, emit, json_option
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


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="PATH|URL", help="Made where it is not there; else it takes part."
)
@json_option
def merge(sources: tuple[Path, ...], output: str, as_json: bool) -> None:
    """Join results of machines that never met; records are elected anew, and the changes printed.

    \b
    Example: tilewright merge host-a.sqlite host-b.sqlite -o all.sqlite
    """
    from tilewright.db.merge import merge as join
    from tilewright.search.stale import has_current_sources

    report = join(sources, output, has_current_sources)
    if as_json:
        emit(report.to_json(), as_json=True)
        return
    counts = [
        f"{name} {report.new[name]:,} new, {report.known[name]:,} known" for name in ("trials", "runs", "records")
    ]
    changed = len({(change.case, change.gpu, change.regime) for change in report.changes})
    emit(" | ".join([*counts, f"served: {changed} changed, {report.kept} kept"]), as_json=False)
    for change in report.changes:
        names = f"{change.case} on {change.gpu} ({change.regime})"
        emit(
            f"{names}: {_timed(change.before, change.before_us)} -> {_timed(change.after, change.after_us)}",
            as_json=False,
        )


def _timed(label: str, median_us: float | None) -> str:
    return label if median_us is None else f"{label}, {median_us:.1f} us"


def missing(error: ModuleNotFoundError) -> DatabaseError:
    """What to install for a fleet."""
    return DatabaseError(f"a fleet needs the package {error.name}: pip install 'tilewright[postgres]'")
