"""`tilewright record` and `compress`: what stored measurements are good for beyond records."""

from pathlib import Path
from typing import Any

import click

from tilewright.cli_options import case_option, db_option, device_option, emit, json_option, problem_option, say
from tilewright.problem import SUITES


@click.command()
@problem_option
@case_option
@click.option("--suite", type=click.Choice(SUITES), default="full", show_default=True, help="Whose sizes.")
@click.option("--space", "whole_space", is_flag=True, help="First measure the space of each template, on --device.")
@device_option
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=1200,
    show_default=True,
    help="With --space: time for all cases.",
)
@db_option
@click.option("--gpu", help="Only trials of this GPU model. Default: of the newest environment.")
@click.option("--regime", type=click.Choice(["graph", "eager", "graph-warm", "eager-warm"]), default="graph")
@click.option("--weights", type=click.Choice(["separate", "packed"]), default="separate", show_default=True)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Compact file to write."
)
@json_option
def record(
    cases: tuple[str, ...],
    output: Path,
    whole_space: bool,
    device: str,
    budget: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Export the trials of cases from the database; `tune --device replay:FILE` answers from the file.

    With --space every valid config of each template is measured first where there are up to 2,000, a space-filling
    sample of 2,000 otherwise.

    \b
    Example: tilewright record --case b4s512 -o b4s512.rec.gz
    Example: tilewright record --case b4s512 --space --budget 900 -o b4s512.rec.gz
    """
    from rich.console import Console

    from tilewright.live import LiveProgress
    from tilewright.search.effort import SPACE
    from tilewright.search.record_run import RecordRequest, export_recording, measure_space
    from tilewright.search.recording import write_recording

    if not cases:
        raise click.UsageError("pass --case at least once")
    request = RecordRequest(cases=cases, points=SPACE.stage_trials if whole_space else None, **options)
    if whole_space:
        console = Console(stderr=True)
        measure_space(request, device, budget, lambda measures: LiveProgress(console, measures=measures))
    exported = export_recording(request)
    for note in exported.notes:
        say(f"left out: {note}")
    write_recording(exported.recording, output)
    if as_json:
        emit(exported.recording.coverage_json(), as_json=True)
    else:
        say(exported.recording.summary())
        say(f"written to {output}, {output.stat().st_size / 1024:.0f} KiB")


@click.command()
@problem_option
@db_option
@click.option("--gpu", help="Only trials of this GPU model. Default: of the newest environment.")
@click.option("--regime", type=click.Choice(["graph", "eager", "graph-warm", "eager-warm"]), default="graph")
@click.option("--max-slowdown", type=float, default=1.05, show_default=True, help="Against the best measured plan.")
@json_option
def compress(problem: str, as_json: bool, **options: Any) -> None:
    """The fewest plans that serve all tuned cases within a slowdown, from the measurements in the database.

    \b
    Example: tilewright compress --max-slowdown 1.05
    """
    from tilewright.report.compress import compress as found_fewest

    found = found_fewest(problem, **options)
    emit(found.to_json() if as_json else found.text(), as_json)
