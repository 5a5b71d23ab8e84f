"""The commands that only read: lookup, doctor, export."""

from pathlib import Path
from typing import Any

import click

from tilewright.cli_options import (
    db_option,
    device_option,
    emit,
    json_option,
    problem_option,
    suite_option,
)
from tilewright.errors import NothingFound
from tilewright.problem import load_problem


@click.command()
@problem_option
@click.option("--case", "case_text", required=True, metavar="CASE", help="b4s512 or batch_size=4,seq_len=512.")
@suite_option
@device_option
@click.option("--weights", type=click.Choice(["separate", "packed"]), default="separate", show_default=True)
@db_option
@click.option("--allow-stale", is_flag=True, envvar="TILEWRIGHT_ALLOW_STALE", help="As if stale records could serve.")
@click.option("--explain", is_flag=True, help="Say why, and what every record that could serve differs in.")
@json_option
def lookup(
    problem: str,
    case_text: str,
    suite: str | None,
    device: str,
    weights: Any,
    db: str | None,
    allow_stale: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """What the runtime would run for a case here, and from which layer.

    \b
    Example: tilewright lookup --case b4s512 --explain
    """
    from tilewright.runtime.explain import candidates
    from tilewright.runtime.serving import lookup as find

    case = load_problem(problem).at_suite(suite or "full").parse_case(case_text, weight_mode=weights)
    found = find(case, device, db=db, allow_stale=allow_stale)
    content = found.to_json()
    if explain:
        content["candidates"] = [candidate.to_json() for candidate in candidates(found, device, db=db)]
    if as_json:
        emit(content, as_json=True)
        return
    from tilewright.report.lookups import lookup_text

    emit(lookup_text(content, explain=explain), as_json=False)


@click.command()
@db_option
@json_option
def doctor(db: str | None, as_json: bool) -> None:
    """Is this machine fit: GPU, driver, Triton, torch, timer, clocks, database, folders.

    \b
    Example: tilewright doctor --json
    """
    from tilewright.runtime.doctor import State, examine, worst

    checks = examine(db)
    if as_json:
        content = {"schema": "tilewright.doctor/1", "worst": worst(checks).value}
        emit({**content, "checks": [check.to_json() for check in checks]}, as_json=True)
    else:
        emit("\n".join(f"{check.state.value:<5}{check.name:<12} {check.detail}" for check in checks), as_json=False)
    if worst(checks) is State.FAIL:
        raise SystemExit(4)


@click.group()
def export() -> None:
    """Write what was found in another form."""


@export.command("records")
@db_option
@click.option("--problem", help="Only this problem.")
@click.option("--gpu", help="Only this GPU model.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def export_records(db: str | None, problem: str | None, gpu: str | None, output: Path) -> None:
    """The active records as one JSON file that the runtime can serve from without SQLAlchemy.

    \b
    Example: tilewright export records --gpu "NVIDIA H200" -o nvidia_h200.json
    """
    from tilewright.db.records_json import write_records
    from tilewright.report.sources import gather

    found = gather(db, problem=problem, gpu=gpu, shipped=False)
    if not found:
        raise NothingFound("no record matches; `tilewright tune` makes some")
    write_records(output, [sourced.stored for sourced in found])
    click.echo(f"{len(found)} records written to {output}", err=True)
