"""`tilewright import solution`: code from elsewhere, measured here and ranked beside ours."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli_options import case_option, db_option, device_option, emit, json_option, say, suite_option
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.search.outside import OutsideReport


@click.group("import")
def import_() -> None:
    """Take in what others wrote, and measure it."""


@import_.command("solution")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--problem", help="Name, or a folder. Default: the one that the solution's definition names.")
@case_option
@suite_option
@device_option
@click.option("--regime", type=click.Choice(["graph", "eager"]), default="graph", show_default=True)
@db_option
@json_option
def import_solution(
    file: Path,
    problem: str | None,
    cases: tuple[str, ...],
    suite: str | None,
    device: str,
    regime: str,
    db: str | None,
    as_json: bool,
) -> None:
    """Verify and time a solution file of SOL-ExecBench or FlashInfer-Bench; exit 1 when it is wrong somewhere.

    It runs in a process of its own, with your rights: read it first.

    \b
    Example: tilewright import solution solution.json --case b4s512
    """
    from tilewright.cli_db import read_text
    from tilewright.report.exchange import incoming
    from tilewright.report.exchange.checking import write_sources
    from tilewright.report.exchange.schema import read_solution
    from tilewright.search.outside import HOOKS, CaseAnswer, OutsideCode, measure_code
    from tilewright.search.request import resolve
    from tilewright.search.session import DeviceSession

    solution = read_solution(read_text(file), str(file))
    incoming.refuse(solution, str(file))
    named = problem or incoming.problem_of(solution.definition)
    selection = resolve(named, cases=cases, suite=suite, device=device)
    if not selection.cases:
        raise UsageError(f"problem {selection.problem.name} has no cases to measure; pass --case")

    def says(answer: CaseAnswer) -> None:
        time = f"{answer.median_us:.1f} us" if answer.median_us is not None else "right"
        say(f"{answer.case}: {answer.status.value}, {answer.reason}" if answer.reason else f"{answer.case}: {time}")

    with (
        tempfile.TemporaryDirectory(prefix="tilewright-import-") as folder,
        DeviceSession(selection.device, hooks=HOOKS) as session,
    ):
        write_sources(solution, Path(folder))
        code = OutsideCode(
            solution.name, solution.author, Path(folder), solution.entry_file, solution.entry_function,
            solution.spec.destination_passing_style, incoming.digest_of(solution),
        )  # fmt: skip
        report = measure_code(code, selection, session, regime=regime, says=says)
    _keep(report, db)
    if as_json:
        emit(report.to_json(), as_json=True)
    if not report.right:
        raise SystemExit(1)


def _keep(report: "OutsideReport", db: str | None) -> None:
    """Into the database, or why not."""
    from tilewright.db.store import Store
    from tilewright.db.trust import add_outside_results

    if not report.right:
        say("rejected: nothing is stored")
    elif not report.rows:
        say("right; nothing is stored, because the interpreter's times are no measurements")
    else:
        with Store.open(db) as store:
            add_outside_results(store, report.rows)
        say(f"{len(report.rows)} results stored; `tilewright results leaderboard` ranks them")
