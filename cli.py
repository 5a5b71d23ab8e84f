"""The command line: parses, calls, prints. Data goes to stdout, everything else to stderr."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from tilewright import (
    cli_db,
    cli_exchange,
    cli_fleet,
    cli_import,
    cli_queries,
    cli_record,
    cli_results,
    cli_verify,
)
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
from tilewright.errors import TilewrightError

CONTEXT = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TILEWRIGHT"}


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="tilewright")
def cli() -> None:
    """Finds the fastest way to run a fused block on the GPU in front of it, remembers it, and serves it."""


@cli.command()
@problem_option
@case_option
@suite_option
@device_option
@click.option("--devices", metavar="all|0,1,..", help="Several equal GPUs of this host, one case at a time on each.")
@click.option("--gpu", help="With a PostgreSQL --db: the model that the fleet tunes for. Default: the one found here.")
@click.option("--detach", is_flag=True, help="With a PostgreSQL --db: enqueue the cases and return at once.")
@click.option(
    "--share-case",
    type=click.IntRange(min=2),
    metavar="BOARDS",
    help="With a PostgreSQL --db: spread each case over so many equal boards.",
)
@click.option("--shard", metavar="I/N", help="Only this part of the cases, for hosts that share nothing.")
@click.option("--effort", type=click.Choice(["quick", "standard", "full"]), default="standard", show_default=True)
@click.option("--trials", type=click.IntRange(min=1), help="At most this many new trials over all cases.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Time for all cases.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--sampler", default="auto", show_default=True, help="auto, tpe, gp, cmaes, qmc, random, brute.")
@click.option(
    "--min-gain", type=click.FloatRange(0, 1), default=0.01, show_default=True, help="Smallest gain that counts."
)
@click.option("--regime", type=click.Choice(["graph", "eager"]), default="graph", show_default=True)
@click.option("--warm-l2", is_flag=True, help="Do not flush the L2 between samples.")
@click.option("--weights", type=click.Choice(["separate", "packed"]), default="separate", show_default=True)
@click.option("--triton-only", is_flag=True, help="Leave library templates out.")
@click.option("--refinal", is_flag=True, help="Time the finalists again even where nothing new is tried.")
@click.option("--wanted", metavar="FILE", help="The shapes that TILEWRIGHT_TRACE counted, most used first.")
@db_option
@click.option(
    "--journal-mode",
    type=click.Choice(["wal", "delete", "truncate"]),
    help="Of an SQLite file. Default: its own; a new one gets wal on a local disk, delete on a network share.",
)
@click.option("--dry-run", is_flag=True, help="Print cases, spaces and what would be written; touch nothing.")
@json_option
def tune(as_json: bool, dry_run: bool, gpu: str | None, detach: bool, share_case: int | None, **options: Any) -> None:
    """Search the best plan for each case and store it; with a PostgreSQL --db, by the fleet's workers.

    \b
    Example: tilewright tune --case b4s512 --effort quick
    Example: tilewright tune --device replay:b4s512.rec.gz --db replayed.sqlite
    """
    from tilewright.search.run import TuneRequest, run_tune

    request = TuneRequest(**options)
    served = "://" in (request.db or "") and not str(request.db).startswith("sqlite")
    if (gpu or detach or share_case) and not served:
        raise click.UsageError("--gpu, --share-case and --detach are for a fleet: pass --db postgresql+psycopg://...")
    if dry_run:
        from tilewright.search.dry_run import plan_run

        plan = plan_run(request)
        emit(plan.to_json() if as_json else plan.text(), as_json)
        return
    from rich.console import Console

    from tilewright.live import LiveProgress

    if served:
        tune_by_fleet(request, gpu=gpu, detach=detach, share_case=share_case, as_json=as_json)
        return
    console = Console(stderr=True)

    def watch(measures: bool) -> LiveProgress:
        return LiveProgress(console, measures=measures)

    if request.devices is None:
        report = run_tune(request, watch)
    else:
        from tilewright.search.devices import resolve_devices, run_devices

        report = run_devices(request, resolve_devices(request.devices), watch)
    if as_json:
        emit(report.to_json(), as_json=True)
    if not report.all_found:
        raise SystemExit(1)


def tune_by_fleet(request: Any, *, gpu: str | None, detach: bool, share_case: int | None, as_json: bool) -> None:
    """Exit code 1 when a job did not succeed."""
    if request.devices is not None:
        raise click.UsageError("--devices is for one host; with a PostgreSQL --db run one worker for each GPU")
    try:
        from tilewright.search.fleet import run_fleet
    except ModuleNotFoundError as error:
        raise cli_fleet.missing(error) from error
    report = run_fleet(request, gpu=gpu, detach=detach, share_case=share_case, says=say)
    if as_json:
        emit(report.to_json(), as_json=True)
    if not detach and not report.all_done:
        raise SystemExit(1)


@cli.command()
@problem_option
@case_option
@suite_option
@device_option
@db_option
@click.option("--baseline", "baselines", multiple=True, help="Default: eager, torch_compile, cublas_cudnn.")
@click.option("--rounds", type=click.IntRange(min=6), default=50, show_default=True)
@click.option("--fail-if-slower", type=float, metavar="RATIO", help="Exit 1 when a case is above this ratio.")
@json_option
def bench(as_json: bool, fail_if_slower: float | None, **options: Any) -> None:
    """Time the records against eager, torch.compile and the composed libraries, interleaved in one run.

    \b
    Example: tilewright bench --suite full --json
    """
    from tilewright.search.bench_run import BenchRequest, run_bench

    report = run_bench(BenchRequest(**options), plan_server(options["db"]), say)
    emit(report.to_json() if as_json else report.text(), as_json)
    if fail_if_slower is not None and report.worst_ratio > fail_if_slower:
        raise SystemExit(1)


def plan_server(db: str | None) -> Any:
    """For the device described: what the runtime would serve for a case, as the plan and its grade."""
    from tilewright.runtime import lookup
    from tilewright.runtime.machine import Machine

    def server(environment: Any, limits: Any) -> Any:
        machine = Machine(environment, limits)

        def plan_for(case: Any) -> tuple[Any, str]:
            found = lookup(case, machine, db=db)
            return found.plan, found.grade.value

        return plan_for

    return server


@cli.command()
@problem_option
@case_option
@suite_option
@device_option
@click.option("--capability", type=int, help="A card that is not here: 80, 86, 89, 90, 100, 120.")
@click.option("--sms", type=click.IntRange(min=1), default=132, show_default=True, help="Its number of SMs.")
@click.option("--triton-only", is_flag=True, help="Leave library templates out.")
@click.option("--enumerate", "enumerate_configs", is_flag=True, help="With --json: every valid config.")
@json_option
def space(
    problem: str,
    cases: tuple[str, ...],
    suite: str | None,
    device: str,
    capability: int | None,
    sms: int,
    triton_only: bool,
    enumerate_configs: bool,
    as_json: bool,
) -> None:
    """Size of the search space, its plans, and why configs are rejected before compiling.

    \b
    Example: tilewright space --case b4s512 --capability 90
    """
    from tilewright.search.request import limits_of, resolve
    from tilewright.search.space_report import report_space

    selection = resolve(
        problem, cases=cases, suite=suite or ("full" if capability else None), device=device, sizes_only=True
    )
    limits = limits_of(selection.device, capability, sms)
    reports = [report_space(case, limits, triton_only=triton_only) for case in selection.cases]
    if as_json:
        emit([report.to_json(enumerate_configs=enumerate_configs) for report in reports], as_json=True)
    else:
        emit("\n\n".join(report.text() for report in reports), as_json=False)


@cli.command()
@device_option
@json_option
def selftest(device: str, as_json: bool) -> None:
    """Show that wrong kernels are caught, faults cost only themselves and, on a GPU, that times repeat.

    \b
    Example: tilewright selftest --device interpret
    """
    from tilewright.search.selftest import run_selftest

    found = run_selftest(device, say if as_json else click.echo)
    if as_json:
        emit(found, as_json=True)
    if not found["passed"]:
        raise SystemExit(1)


for command in (
    cli_queries.lookup,
    cli_results.results,
    cli_queries.doctor,
    cli_queries.export,
    cli_verify.verify,
    cli_fleet.worker,
    cli_fleet.merge,
    cli_db.db,
    cli_import.import_,
    cli_record.record,
    cli_record.compress,
    *cli_exchange.COMMANDS,
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point: every expected failure is one line on stderr and its exit code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    try:
        result = cli.main(arguments, prog_name="tilewright", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error  # click turns an interrupt into an Abort
        click.echo(str(cause) or "interrupted", err=True)
        return int(getattr(cause, "exit_code", 130))
    except TilewrightError as error:
        say(f"error: {error}")
        return error.exit_code
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except BrokenPipeError:
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    main()
