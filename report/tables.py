"""The groups of `results` as tables for 80 columns, as CSV, and as JSON of a stated schema."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.report.queries import Aggregate, BestRow, Group
from tilewright.report.text import clean, defused

JSON_SCHEMA = 1
WIDTH = 80
CSV_COLUMNS = (
    "problem", "gpu", "triton", "regime", "weight_mode", "case", "plan", "status", "median_us", "low_us", "high_us",
    "default_us", "speedup_default", "baseline", "baseline_us", "speedup_baseline", "floor_us", "percent_sol",
    "verdict", "deterministic", "source", "created_at", "digest",
)  # fmt: skip


Facts = Callable[[BestRow, Group], Mapping[str, Any]]  # what is known of a row beside its columns


def no_facts(row: BestRow, group: Group) -> Mapping[str, Any]:
    return {}


def results_text(
    groups: Iterable[Group],
    *,
    width: int = WIDTH,
    terminal: bool = False,
    notes: Callable[[Group], Iterable[str]] = lambda group: (),
) -> str:
    """Tables with lines of aggregates and notes under each; colours and rules only on a terminal."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, no_color=not terminal, highlight=False)
    for position, group in enumerate(groups):
        if position:
            console.print()
        for line in heading(group):
            console.print(Text(line, style="bold"), soft_wrap=False)
        console.print(_table(group, width, terminal))
        for line in (*summary(group), *map(clean, notes(group))):
            console.print(Text(line))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n" if out.getvalue() else ""


def heading(group: Group) -> tuple[str, str]:
    """Problem, then the place where these numbers hold."""
    env = group.environment
    mig = f" MIG {env.mig}" if env.mig else ""
    regime = f", {group.regime}" if group.measured else ", times are no measurements"
    return clean(group.problem), clean(f"{env.gpu_name}{mig}, Triton {env.triton}{regime}, {group.weight_mode} weights")


def _table(group: Group, width: int, terminal: bool) -> Table:
    """Only the plan gives way when the line is too short: numbers are never cut."""
    rows = [_cells(row, group.measured) for row in group.rows]
    headers = (
        ("case", "median us", "+-", "default", "baseline", "% SOL", "ties") if group.measured else ("case", "state")
    )
    table = Table(box=box.SIMPLE_HEAD if terminal else None, padding=(0, 1, 0, 0), pad_edge=False)
    room = width - (len(headers) + 2) * terminal  # the box draws a blank between columns and at both ends
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column and group.measured else "left", no_wrap=True)
        room -= max(len(header), *(len(row[column]) for row in rows)) + 1
    table.add_column("plan", no_wrap=True, overflow="ellipsis", max_width=max(room, len("plan")))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _cells(row: BestRow, measured: bool) -> tuple[str, ...]:
    """A broken row says so where its numbers would stand."""
    if not measured:
        return clean(row.case), status(row), clean(row.invalid or row.label)
    if row.invalid:
        return clean(row.case), "invalid", "", "", "", "", "", clean(row.invalid)
    return (
        clean(row.case),
        _number(row.median_us, "{:.1f}"),
        f"{_number(row.half_width_percent, '{:.1f}%')} {row.noise}".rstrip(),
        _number(row.speedup_default, "{:.2f}x"),
        _number(row.speedup_baseline, "{:.2f}x"),
        _number(row.percent_sol, "{:.0f}"),
        "-" if row.ties is None else str(len(row.ties)),
        clean(row.label),
    )


def status(row: BestRow) -> str:
    """measured, verified (correct, no time), or invalid."""
    if row.invalid:
        return "invalid"
    return "measured" if row.median_us is not None else "verified"


def summary(group: Group) -> tuple[str, ...]:
    """What the group amounts to; an incomplete suite says so before anything else."""
    total = group.aggregate
    of_suite = f"of the {total.suite} suite's {total.cases} cases" if total.suite else f"of {total.cases} cases"
    if not group.measured:
        return (f"{total.verified} {of_suite} verified",)
    lines = []
    if total.missing:
        names = ", ".join(total.missing[:4]) + (", ..." if len(total.missing) > 4 else "")
        lines.append(f"incomplete: {len(total.missing)} {of_suite} missing ({names})")
    means = f"mean {_number(total.mean_us, '{:.1f} us')}{'' if total.complete else ' (incomplete)'}"
    lines.append(f"{means}, {_number(total.mean_percent_sol, '{:.0f} %')} of speed of light")
    against_default = _number(total.geomean_speedup_default, "{:.2f}x")
    against_baseline = _number(total.geomean_speedup_baseline, "{:.2f}x")
    lines.append(f"geometric mean of speed-ups: {against_default} the default, {against_baseline} the best baseline")
    return tuple(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def results_csv(groups: Iterable[Group], facts: Facts = no_facts) -> str:
    """One line per row; numbers bare, everything else defused; the facts' columns come last."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rows = [(flat(group, row), facts(row, group)) for group in groups for row in group.rows]
    more = tuple(name for name in (rows[0][1] if rows else ()))
    writer.writerow((*CSV_COLUMNS, *more))
    for plain, extra in rows:
        writer.writerow([_csv_cell({**plain, **extra}[name]) for name in (*CSV_COLUMNS, *more)])
    return out.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return defused(clean(value)) if isinstance(value, str) else str(value)


def results_json(groups: Iterable[Group], facts: Facts = no_facts) -> dict[str, Any]:
    """Schema 1: groups with environment, aggregate and rows; times in microseconds, null where not measured."""
    return {
        "schema": JSON_SCHEMA,
        "kind": "best",
        "groups": [
            {
                "problem": group.problem,
                "measured": group.measured,
                "regime": group.regime,
                "weight_mode": group.weight_mode,
                "environment": asdict(group.environment),
                "aggregate": _aggregate_json(group.aggregate),
                "rows": [
                    {**flat(group, row), **facts(row, group), "axes": dict(row.axes), "case_key": row.case_key}
                    for row in group.rows
                ],
            }
            for group in groups
        ],
    }


def _aggregate_json(total: Aggregate) -> dict[str, Any]:
    return {**asdict(total), "missing": list(total.missing), "complete": total.complete}


def flat(group: Group, row: BestRow) -> dict[str, Any]:
    """One row with the group that it belongs to."""
    return {
        "problem": group.problem,
        "gpu": group.environment.gpu_name,
        "triton": group.environment.triton,
        "regime": group.regime,
        "weight_mode": row.weight_mode,
        "case": row.case,
        "plan": row.label,
        "status": status(row),
        "invalid": row.invalid,
        "median_us": row.median_us,
        "low_us": row.low_us,
        "high_us": row.high_us,
        "default_us": row.default_us,
        "speedup_default": row.speedup_default,
        "baseline": row.baseline,
        "baseline_us": row.baseline_us,
        "speedup_baseline": row.speedup_baseline,
        "floor_us": row.floor_us,
        "percent_sol": row.percent_sol,
        "verdict": row.verdict.value,
        "deterministic": row.deterministic,
        "source": row.source,
        "created_at": row.created_at.isoformat() if row.created_at else None,
        "digest": row.digest,
    }
