"""`tilewright verify`: are the records still right and fast on this machine?"""

from typing import Any

import click

from tilewright.cli_options import (
    case_option,
    db_option,
    device_option,
    emit,
    json_option,
    problem_option,
    say,
    suite_option,
)


@click.command()
@problem_option
@case_option
@suite_option
@device_option
@db_option
@click.option("--allow-stale", is_flag=True, envvar="TILEWRIGHT_ALLOW_STALE", help="Verify stale records too.")
@click.option("--baseline", "baselines", multiple=True, help="Default: the composed libraries.")
@click.option("--rounds", type=click.IntRange(min=6), default=12, show_default=True)
@click.option(
    "--min-gain", type=click.FloatRange(0, 0.5), default=0.01, show_default=True, help="Smallest loss that counts."
)
@click.option(
    "--budget", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, metavar="SECONDS",
    help="When it runs short, baselines are left out.",
)  # fmt: skip
@click.option(
    "--record", is_flag=True, help="Store the times; a record that holds on another day or host is reproduced."
)
@json_option
def verify(as_json: bool, db: str | None, allow_stale: bool, record: bool, **options: Any) -> None:
    """Check and time the active records again, and say which to keep and which to tune again; exit 1 for the latter.

    \b
    Example: tilewright verify --json
    """
    from tilewright.report.verified import verified_text
    from tilewright.search.recheck_run import VerifyRequest, run_verify
    from tilewright.search.reproduce import record_again

    request = VerifyRequest(**options)
    report = run_verify(request, _subjects(request.problem, db, allow_stale), say)
    again = [one.to_json() for one in record_again(report, db)] if record else None
    content = {**report.to_json(), "reproductions": again}
    emit(content if as_json else verified_text(content), as_json)
    if not report.all_kept:
        raise SystemExit(1)


def _subjects(problem: str, db: str | None, allow_stale: bool) -> Any:
    """For the device described: what the runtime serves there, case by case, or what keeps it from it."""
    from tilewright.problem import load_problem
    from tilewright.runtime.active import lookups_of_records, objection
    from tilewright.runtime.machine import Machine
    from tilewright.runtime.serving import Grade
    from tilewright.search.recheck import Subject

    def subjects(environment: Any, limits: Any) -> list[Subject]:
        machine = Machine(environment, limits)
        found = lookups_of_records(load_problem(problem), machine, db=db, allow_stale=allow_stale)
        return [Subject(one.case, one.plan, one.record, objection(one), one.grade is Grade.STALE) for one in found]

    return subjects
