"""Options and output forms that the questions of `tilewright results` share."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tilewright.cli_options import db_option, emit
from tilewright.errors import UsageError
from tilewright.problem import load_problem

Command = TypeVar("Command", bound=Callable[..., Any])
STATUSES = (
    "ok", "rejected", "compile_error", "out_of_resources", "timeout", "crashed", "wrong", "invalid_time", "error",
    "measured", "verified", "invalid",
)  # fmt: skip


@dataclass(frozen=True)
class Filters:
    """The options that every question takes."""

    problem: str | None
    cases: tuple[str, ...]
    gpu: str | None
    environment: str | None
    run_id: int | None
    template: str | None
    statuses: tuple[str, ...]
    trust: str | None
    db: str | None
    own: bool

    def wanted(self) -> Any:
        """For the database; statuses of trials alone."""
        from tilewright.db.rows import Status
        from tilewright.db.summaries import Wanted

        known = set(Status)
        return Wanted(
            problem=self.problem,
            cases=tuple(self.case_name(text) for text in self.cases),
            gpu=self.gpu,
            environment=self.environment,
            run_id=self.run_id,
            template=self.template,
            statuses=tuple(Status(name) for name in self.statuses if name in known),
        )

    def case_name(self, text: str) -> str:
        """The short form, checked where the problem is known."""
        return load_problem(self.problem).parse_case(text).name if self.problem else text

    def records(self, *, history: bool = False) -> list[Any]:
        """Sourced records, own first; the active ones, or every one that ever was."""
        from tilewright.report.sources import gather

        return self.narrowed(gather(self.db, shipped=not self.own, history=history))

    def outside(self) -> list[Any]:
        """Results of others; none where a filter asks for what only ours have."""
        from tilewright.db.environment import normalised_gpu_name
        from tilewright.report.sources import gather_outside

        if self.environment or self.run_id or self.template or self.statuses:
            return []
        gpu = normalised_gpu_name(self.gpu) if self.gpu else None
        problem = load_problem(self.problem).name if self.problem else None
        return [
            row
            for row in gather_outside(self.db, problem)
            if (gpu is None or normalised_gpu_name(row.hardware) == gpu) and self.trust in (None, str(row.trust))
        ]

    def narrowed(self, records: Sequence[Any]) -> list[Any]:
        """Records from elsewhere under the same filters."""
        from tilewright.db.environment import normalised_gpu_name
        from tilewright.db.rows import Trust
        from tilewright.report.best import asked_for

        gpu = normalised_gpu_name(self.gpu) if self.gpu else None
        here = [sourced for sourced in records if gpu is None or sourced.stored.environment.gpu_name == gpu]
        return asked_for(here, self.wanted(), Trust(self.trust) if self.trust else None, frozenset(self.statuses))


def filters(command: Command) -> Command:
    """Adds the options of Filters and hands them over as one argument, `chosen`."""
    options = (
        click.option("--problem", help="Only this problem."),
        click.option("--case", "cases", multiple=True, metavar="CASE", help="b4s512 or batch_size=4,seq_len=512."),
        click.option("--gpu", help="Only this GPU model, in any spelling."),
        click.option(
            "--env", "environment", metavar="DIGEST", help="Only this environment, by its digest's beginning."
        ),
        click.option("--run", "run_id", type=click.IntRange(min=1), help="Only this run."),
        click.option("--template", help="Only what uses this template."),
        click.option("--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Only these outcomes."),
        click.option("--trust", type=click.Choice(["reported", "measured", "reproduced"]), help="Only this trust."),
        db_option,
        click.option("--own", is_flag=True, help="Leave out what is shipped with the package."),
    )

    def gathered(**values: Any) -> Any:
        chosen = Filters(**{f.name: values.pop(f.name) for f in dataclasses.fields(Filters)})
        return command(chosen=chosen, **values)

    gathered.__name__, gathered.__doc__ = command.__name__, command.__doc__
    gathered.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in reversed(options):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]


def forms(command: Command) -> Command:
    """--json, --csv, --markdown, --wide, as one argument, `form`."""

    def gathered(**values: Any) -> Any:
        chosen = [name for name in ("json", "csv", "markdown") if values.pop(f"as_{name}")]
        if len(chosen) > 1:
            raise click.UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other")
        wide = values.pop("wide")
        return command(form=chosen[0] if chosen else "wide" if wide else "text", **values)

    gathered.__name__, gathered.__doc__ = command.__name__, command.__doc__
    gathered.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option("--wide", is_flag=True, help="Every column, as wide as they come."),
        click.option("--markdown", "as_markdown", is_flag=True, help="A Markdown table."),
        click.option("--csv", "as_csv", is_flag=True, help="One line a row."),
        click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
    ):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]


def put(content: Any, output: Path | None = None) -> None:
    """One document to stdout or to a file, whose folder must be there."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2, allow_nan=False) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from error
    click.echo(f"written to {output}", err=True)


def print_listing(listing: Any, form: str) -> None:
    from tilewright.report.listing import listing_csv, listing_json, listing_markdown, listing_text

    if form == "json":
        emit(listing_json(listing), as_json=True)
    elif form in ("csv", "markdown"):
        click.echo(listing_csv(listing) if form == "csv" else listing_markdown(listing), nl=False)
    else:
        click.echo(listing_text(listing, width=width(), wide=form == "wide"), nl=False)


def width() -> int:
    """Of the terminal; 80 where there is none."""
    return max(80, shutil.get_terminal_size((80, 24)).columns)


@contextmanager
def databases(chosen: Filters) -> Iterator[dict[str, Any]]:
    from tilewright.report.databases import opened

    with opened(chosen.db, shipped=not chosen.own) as readers:
        yield readers
