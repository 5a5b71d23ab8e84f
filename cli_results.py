"""`tilewright results` and its questions: what was found, why, how it compares, and what is missing."""

import dataclasses
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tilewright.cli_filters import Filters, databases, filters, forms, print_listing, put, width
from tilewright.cli_options import emit
from tilewright.errors import NothingFound
from tilewright.report.text import clean


@click.group(invoke_without_command=True)
@filters
@forms
@click.pass_context
def results(context: click.Context, chosen: Filters, form: str) -> None:
    """The best plan of each case, how sure we are, and how far from the roofline; or one of the questions below.

    \b
    Example: tilewright results --problem gqa_attention_with_qk_norm --csv
    """
    if context.invoked_subcommand is None:
        (_print_leaderboard if chosen.trust == "reported" else _print_best)(chosen, form)
        return
    given = [
        parameter
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        name = context.invoked_subcommand
        raise click.UsageError(
            f"{given[0].opts[0]} belongs after the question: tilewright results {name} {given[0].opts[0]}"
        )


def _print_best(chosen: Filters, form: str, output: Path | None = None) -> None:
    from tilewright.report.best import Viewer, best_listing, row_facts, standing
    from tilewright.report.here import this_machine
    from tilewright.report.listing import listing_markdown, listing_text
    from tilewright.report.queries import best_per_case
    from tilewright.report.tables import results_csv, results_json, results_text

    groups = best_per_case(chosen.records())
    if not groups:
        raise NothingFound("no record matches; `tilewright tune` makes some")
    viewer = Viewer(this_machine(), datetime.now(UTC))

    def facts(row: Any, group: Any) -> Any:
        return row_facts(row, group, viewer)

    if form == "json":
        put(results_json(groups, facts), output)
    elif form == "csv":
        put(results_csv(groups, facts), output)
    elif form in ("wide", "markdown"):
        write = listing_markdown if form == "markdown" else lambda listing: listing_text(listing, wide=True)
        put("\n".join(write(listing) for listing in best_listing(groups, viewer)), output)
    else:
        terminal = output is None and sys.stdout.isatty()
        put(results_text(groups, width=width(), terminal=terminal, notes=lambda g: standing(g, viewer)), output)


@results.command()
@filters
@forms
@click.option("-n", "count", type=click.IntRange(min=1), default=5, show_default=True, help="Of each case.")
@click.option("--level", type=click.Choice(["plan", "stage"]), help="Default: stage with --template, else plan.")
def top(chosen: Filters, form: str, count: int, level: str | None) -> None:
    """The fastest trials of each case.

    \b
    Example: tilewright results top -n 3 --case b4s512 --template flash_attention
    """
    from tilewright.db.rows import Level
    from tilewright.report.trials import top as answer

    if chosen.trust == "reported":  # others report no trials; their results are ranked as they are
        _print_leaderboard(chosen, form, count)
        return
    wanted = dataclasses.replace(chosen.wanted(), level=Level(level) if level else None)
    with databases(chosen) as readers:
        listing = answer(readers, wanted, count)
    if not listing.rows:
        raise NothingFound("no trial with a measured time matches")
    print_listing(listing, form)


@results.command()
@filters
@forms
@click.option("-n", "count", type=click.IntRange(min=1), help="Of each card and environment.")
def leaderboard(chosen: Filters, form: str, count: int | None) -> None:
    """What others report and what is measured here, ranked by card and environment; with --case, that case alone.

    \b
    Example: tilewright results leaderboard --trust reported
    """
    _print_leaderboard(chosen, form, count)


def _print_leaderboard(chosen: Filters, form: str, count: int | None = None) -> None:
    from tilewright.report.leaderboard import flat_listing, listings, ranked
    from tilewright.report.listing import listing_markdown, listing_text
    from tilewright.report.queries import best_per_case

    outside, cases = chosen.outside(), [chosen.case_name(text) for text in chosen.cases]
    rows = [
        row for row in ranked(outside, best_per_case(chosen.records()), cases) if count is None or row.rank <= count
    ]
    if not rows:
        raise NothingFound("no result matches; `tilewright db import-reported FILE` brings in what others report")
    if form in ("json", "csv"):
        print_listing(flat_listing(rows), form)
        return
    tables = (
        listing_markdown(each) if form == "markdown" else listing_text(each, width=width(), wide=form == "wide")
        for each in listings(rows)
    )
    click.echo("\n".join(tables), nl=False)


@results.command()
@filters
@forms
def failures(chosen: Filters, form: str) -> None:
    """Trials that did not succeed, by reason.

    \b
    Example: tilewright results failures --template flash_attention --wide
    """
    from tilewright.report.trials import failing

    with databases(chosen) as readers:
        listing = failing(readers, chosen.wanted())
    if not listing.rows:
        raise NothingFound("no failed trial matches")
    print_listing(listing, form)


@results.command()
@filters
@forms
def coverage(chosen: Filters, form: str) -> None:
    """What was tried where, and which cases of the suites have no record.

    \b
    Example: tilewright results coverage --problem gqa_attention_with_qk_norm
    """
    from tilewright.report.trials import coverage as answer

    with databases(chosen) as readers:
        listing = answer(readers, chosen.records(), chosen.wanted())
    if not listing.rows and not listing.foot:
        raise NothingFound("nothing was tried and nothing is recorded")
    print_listing(listing, form)


@results.command()
@click.argument("case")
@filters
@forms
def history(chosen: Filters, form: str, case: str) -> None:
    """The records that a case has had over time.

    \b
    Example: tilewright results history b4s512
    """
    from tilewright.report.history import history as answer

    name = chosen.case_name(case)
    records = [sourced for sourced in chosen.records(history=True) if sourced.stored.case_name == name]
    if not records:
        raise NothingFound(f"no record of case {name} matches; `tilewright tune --case {name}` makes one")
    print_listing(answer(name, records), form)


@results.command()
@click.argument("case")
@filters
@click.option("--wide", is_flag=True, help="Every column, as wide as they come.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def explain(chosen: Filters, case: str, wide: bool, as_json: bool) -> None:
    """Why a case's plan won: the final, its ties, neighbours, parameter importance, and each stage's roofline.

    \b
    Example: tilewright results explain b4s512
    """
    from tilewright.report.explain import explain as answer
    from tilewright.report.listing import listing_text
    from tilewright.report.queries import chosen_records
    from tilewright.search.importance import parameter_importance

    name = chosen.case_name(case)
    found = chosen_records(sourced for sourced in chosen.records() if sourced.stored.case_name == name)
    if not found:
        raise NothingFound(f"no record of case {name} matches; `tilewright tune --case {name}` makes one")
    with databases(chosen) as readers:
        answers = [answer(s.stored, s.source, readers.get(s.source), parameter_importance) for s in found]
    if as_json:
        emit({"schema": 1, "kind": "explain", "records": [each.to_json() for each in answers]}, as_json=True)
        return
    for each in answers:
        click.echo("\n".join(map(clean, each.head)) + "\n")
        for table in each.tables:
            if table.rows:
                click.echo(listing_text(table, width=width(), wide=wide))


@results.command()
@click.argument("a")
@click.argument("b")
@filters
@forms
def compare(chosen: Filters, form: str, a: str, b: str) -> None:
    """Two runs (run:3), environments (a GPU, or a digest's beginning) or database files side by side.

    \b
    Example: tilewright results compare run:1 run:2
    """
    from tilewright.report.compare import compare as answer
    from tilewright.report.sides import side

    records = chosen.records(history=True)
    print_listing(answer(*(side(text, records, chosen.narrowed) for text in (a, b))), form)


@results.command()
@click.argument("form", type=click.Choice(["json", "csv", "markdown"]))
@filters
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: stdout.")
def export(chosen: Filters, form: str, output: Path | None) -> None:
    """The best rows with every column, for other programs and for people.

    \b
    Example: tilewright results export markdown -o results.md
    """
    _print_best(chosen, form, output)
