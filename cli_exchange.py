"""`tilewright export solution|dataset|tiles`: what was tuned, in the forms that others read."""

import json
from pathlib import Path
from typing import Any

import click

from tilewright import cli_queries
from tilewright.cli_options import db_option, emit, json_option, problem_option
from tilewright.errors import NothingFound, UsageError
from tilewright.problem import load_problem

gpu_option = click.option("--gpu", help="Only records of this GPU model.")
author_option = click.option("--author", default="tilewright", show_default=True, help="As the file names it.")
definition_option = click.option(
    "--definition-name", metavar="NAME", help="Where the board calls the problem otherwise."
)
dialect_option = click.option(
    "--dialect", type=click.Choice(["sol", "flashinfer"]), default="sol", show_default=True, help="Whose files."
)


def _records(problem: str, db: str | None, gpu: str | None) -> list[Any]:
    """One record of each case, of one device and compiler; the measured ones where there are any."""
    from tilewright.report.queries import chosen_records
    from tilewright.report.sources import gather

    found = [s.stored for s in chosen_records(gather(db, problem=load_problem(problem).name, gpu=gpu))]
    measured = [stored for stored in found if stored.environment.kind == "cuda"]
    found = [stored for stored in measured or found if stored.record.weight_mode == "separate"]
    if not found:
        raise NothingFound("no record matches; `tilewright tune` makes some")
    places = sorted({(s.environment.gpu_name, s.environment.triton, s.record.regime) for s in found})
    if len({place[:2] for place in places}) > 1:
        raise UsageError(
            f"records of several places match: {'; '.join(', '.join(p) for p in places)}; choose with --gpu"
        )
    regime = "graph" if any(place[2] == "graph" for place in places) else places[0][2]
    return [stored for stored in found if stored.record.regime == regime]


@cli_queries.export.command("solution")
@problem_option
@db_option
@gpu_option
@author_option
@definition_option
@dialect_option
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--check", is_flag=True, help="Run it alone, in a fresh process, against the reference.")
@click.option("--device", type=click.Choice(["auto", "cuda", "interpret"]), default="auto", show_default=True)
@json_option
def export_solution(
    problem: str,
    db: str | None,
    gpu: str | None,
    author: str,
    definition_name: str | None,
    dialect: Any,
    output: Path,
    check: bool,
    device: str,
    as_json: bool,
) -> None:
    """The tuned plans as one solution file: sources inline, torch and Triton alone, dispatch by shape.

    \b
    Example: tilewright export solution --check -o solution.json
    """
    from tilewright.report.exchange import solution

    loaded = load_problem(problem)
    made = solution.export_solution(
        loaded,
        _records(problem, db, gpu),
        author=author,
        definition_name=definition_name,
        dialect=dialect,
    )
    for reason in made.left_out:
        click.echo(f"left out {reason}", err=True)
    try:
        output.write_text(json.dumps(made.content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from error
    click.echo(f"{len(made.tuned)} tuned shapes written to {output}", err=True)
    checked = _checked(loaded, made, output, device) if check else []
    if as_json:
        name = made.content["name"]
        answer = {"schema": 1, "kind": "solution", "name": name, "shapes": len(made.tuned), "left_out": made.left_out}
        emit({**answer, "checks": [vars(each) for each in checked]}, as_json=True)
    if any(not each.ok and not each.skipped for each in checked):
        raise SystemExit(1)


def _checked(problem: Any, made: Any, output: Path, device: str) -> list[Any]:
    """What was written is what is read again and run."""
    from tilewright.report.exchange.checking import check
    from tilewright.report.exchange.schema import read_solution

    where = device if device != "auto" else _best_device()
    written = read_solution(output.read_text(encoding="utf-8"), str(output))
    return check(written, problem, made.tuned, device=where, says=lambda line: click.echo(line, err=True))


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "interpret"


@cli_queries.export.command("dataset")
@problem_option
@db_option
@gpu_option
@author_option
@definition_option
@click.option(
    "--dialect", type=click.Choice(["sol", "flashinfer"]), default="flashinfer", show_default=True, help="Whose files."
)
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True)
def export_dataset(
    problem: str,
    db: str | None,
    gpu: str | None,
    author: str,
    definition_name: str | None,
    dialect: Any,
    output: Path,
) -> None:
    """Definition, workloads, solution and traces as a folder; one GPU model to a folder.

    \b
    Example: tilewright export dataset --gpu "NVIDIA H200" -o h200_dataset
    """
    from tilewright.report.exchange import dataset, folder, solution

    loaded, records = load_problem(problem), _records(problem, db, gpu)
    made = solution.export_solution(
        loaded, records, author=author, definition_name=definition_name, dialect=dialect
    ).content
    document = {**solution.definition_document(problem), "name": made["definition"]}
    definition = dataset.definition_file(loaded, document, dialect)
    out = folder.OutputFolder(output)
    name, who, kind = (folder.safe(text) for text in (made["definition"], author, definition.get("op_type", "")))
    inside = [kind] if dialect == "flashinfer" else []
    published = dataset.workloads(loaded)
    every = [dataset.workload_of(loaded, stored.axes, published) for stored in records]
    known = {one["uuid"] for one in published}
    lines = dataset.workload_lines(
        made["definition"], [*published, *(o for o in every if o["uuid"] not in known)], dialect
    )
    out.write_json("/".join(["definitions", *inside, f"{name}.json"]), definition)
    out.write_lines("/".join(["workloads", *inside, f"{name}.jsonl"]), lines)
    out.write_json("/".join(["solutions", who, *inside, name, f"{folder.safe(made['name'])}.json"]), made)
    traces = dataset.trace_lines(loaded, made["definition"], made["name"], records)
    out.write_lines("/".join(["traces", who, *inside, f"{name}.jsonl"]), traces)
    click.echo(f"{len(out.written)} files, {len(traces)} traces written to {output}", err=True)


@cli_queries.export.command("tiles")
@problem_option
@db_option
@gpu_option
@click.option("--csv", "as_csv", is_flag=True, help="One line for each stage of each case, on stdout.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="A folder for the JSON files.")
def export_tiles(problem: str, db: str | None, gpu: str | None, as_csv: bool, output: Path | None) -> None:
    """Tiles alone: shape to config, as vLLM keeps its tuned files, or as CSV.

    \b
    Example: tilewright export tiles -o configs
    """
    from tilewright.report.exchange.folder import OutputFolder
    from tilewright.report.exchange.tiles import tile_files, tiles_listing
    from tilewright.report.listing import listing_csv

    if as_csv == (output is not None):
        raise click.UsageError("pass either --csv or --output FOLDER")
    records = _records(problem, db, gpu)
    if as_csv:
        click.echo(listing_csv(tiles_listing(records)), nl=False)
        return
    assert output is not None
    out = OutputFolder(output)
    for name, content in tile_files(records, _sizes(problem)).items():
        out.write_json(name, content)
    click.echo(f"{len(out.written)} files written to {output}", err=True)


def _sizes(problem: str) -> dict[str, tuple[str, ...]]:
    """The constant axes that decide a template's tiles: all of the problem's, in its order."""
    from tilewright.kernel_templates.families import load_family

    loaded = load_problem(problem)
    return {name: tuple(loaded.constants) for name in load_family(loaded.family).registry}


COMMANDS: tuple[click.Command, ...] = ()
