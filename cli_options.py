"""Options that several commands share, and the two ways to print."""

import json
from typing import Any

import click

from tilewright.problem import DEFAULT_PROBLEM, SUITES
from tilewright.report.text import clean_lines

problem_option = click.option("--problem", default=DEFAULT_PROBLEM, show_default=True, help="Name, or a folder.")
case_option = click.option("--case", "cases", multiple=True, metavar="CASE", help="b4s512 or batch_size=4,seq_len=512.")
db_option = click.option("--db", envvar="TILEWRIGHT_DB", metavar="PATH|URL", help="Default: the user's data folder.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cuda|cuda:N|interpret",
    help="Where candidates run; tune also takes replay:FILE.",
)
suite_option = click.option(
    "--suite", type=click.Choice(SUITES), help="Default: full on a GPU, smoke in the interpreter."
)


def say(text: str) -> None:
    """Talk goes to stderr; what it quotes steers no terminal."""
    click.echo(clean_lines(text), err=True)


def emit(content: Any, as_json: bool) -> None:
    """Prints one document."""
    click.echo(json.dumps(content, indent=2, allow_nan=False) if as_json else content)
