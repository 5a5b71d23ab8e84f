"""What others report and what is measured here, ranked: one table for each workload, card and environment.

Times never cross such a table. Across hardware only the share of the speed of light compares, and that each by its own
ceilings: a board's, or those measured on this card.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from tilewright.db.environment import normalised_gpu_name
from tilewright.db.rows import Trust
from tilewright.db.trust import OutsideResult, environment_words, suite_words
from tilewright.report.listing import Column, Listing
from tilewright.report.queries import BestRow, Group

OURS, OUTSIDE = "ours", "outside"
NAME = "tilewright"

COLUMNS = (
    Column("problem", "problem", wide=True),
    Column("workload", "workload", wide=True),
    Column("hardware", "hardware", wide=True),
    Column("environment", "environment", wide=True),
    Column("rank", "#", "{:d}"),
    Column("latency_us", "us", "{:.1f}"),
    Column("ratio", "ratio", "{:.3f}"),
    Column("percent_sol", "% SOL", "{:.0f}"),
    Column("trust", "trust"),
    Column("observed", "observed"),
    Column("implementation", "implementation", elastic=True),
    Column("origin", "origin", wide=True),
    Column("license", "license", wide=True),
    Column("source_url", "url", wide=True),
    Column("source", "source", wide=True),
    Column("protocol", "protocol", wide=True),
    Column("digest", "digest", wide=True),
)
ACROSS = (
    Column("percent_sol", "% SOL", "{:.0f}"),
    Column("hardware", "hardware"),
    Column("environment", "environment"),
    Column("trust", "trust"),
    Column("implementation", "implementation", elastic=True),
)


@dataclass(frozen=True)
class Row:
    """One place in one table; `rank` and `ratio` count within problem, workload, hardware and environment."""

    problem: str
    workload: str
    hardware: str
    environment: str
    rank: int
    latency_us: float
    ratio: float
    percent_sol: float | None
    trust: str
    observed: str | None
    implementation: str
    origin: str
    license: str | None
    source_url: str | None
    source: str
    protocol: str
    digest: str


def ranked(outside: Iterable[OutsideResult], groups: Iterable[Group], cases: Collection[str] = ()) -> list[Row]:
    """The suites, or with `cases` those cases alone; ours are there where the suite is complete."""
    rows = [_outside(row) for row in _newest(outside)] + [row for group in groups for row in _ours(group)]
    asked = [row for row in rows if (row.workload in cases if cases else row.workload.startswith("suite of "))]
    asked.sort(key=lambda row: (*_place(row), row.latency_us, row.implementation))
    found = []
    for _, table in groupby(asked, _place):
        members = list(table)
        for number, row in enumerate(members, 1):
            found.append(Row(**{**asdict(row), "rank": number, "ratio": row.latency_us / members[0].latency_us}))
    return found


def best_of_each_place(rows: Iterable[Row]) -> list[Row]:
    """Of each card, environment and workload the row with the largest share of the speed of light."""
    best: dict[tuple[str, ...], Row] = {}
    for row in rows:
        held = best.get(_place(row))
        if row.percent_sol is not None and (held is None or row.percent_sol > (held.percent_sol or 0)):
            best[_place(row)] = row
    return sorted(best.values(), key=lambda row: (row.problem, row.workload, -(row.percent_sol or 0)))


def flat_listing(rows: Sequence[Row]) -> Listing:
    """All rows under one another, each with its place: for JSON and CSV."""
    across = [_across(row) for row in best_of_each_place(rows)]
    return Listing("leaderboard", COLUMNS, [asdict(row) for row in rows], facts={"across": across})


def listings(rows: Sequence[Row]) -> list[Listing]:
    """A table for each place, then the comparison across hardware where there is more than one."""
    found = []
    for place, members in groupby(rows, _place):
        problem, workload, hardware, environment = place
        where = f"{hardware}, {environment}" if environment else hardware
        found.append(Listing("leaderboard", COLUMNS, [asdict(r) for r in members], head=(problem, workload, where)))
    for (problem, workload), members in groupby(best_of_each_place(rows), lambda r: (r.problem, r.workload)):
        across = [_across(row) for row in members]
        if len(across) > 1:
            notes = ("Times of different hardware do not compare. A share of the speed of light rests",
                     "on its own ceilings: reported, the board's; measured, those of that card.")  # fmt: skip
            found.append(
                Listing("across", ACROSS, across, head=(problem, f"{workload}, across hardware, by % SOL"), foot=notes)
            )
    return found


def _across(row: Row) -> dict[str, Any]:
    names = ("problem", "workload", "hardware", "environment", "implementation", "percent_sol", "trust")
    return {name: getattr(row, name) for name in names}


def _place(row: Row) -> tuple[str, str, str, str]:
    return row.problem, row.workload, row.hardware, row.environment


def _newest(outside: Iterable[OutsideResult]) -> list[OutsideResult]:
    """Code that was measured here on several days counts with its latest; everything reported stays."""
    kept: dict[tuple[str, ...], OutsideResult] = {}
    for row in outside:
        day = row.observed if row.trust is Trust.REPORTED else ""
        key = (row.problem, row.implementation, row.hardware, row.environment, row.workload, row.trust, row.digest, day)
        if key not in kept or row.observed >= kept[key].observed:
            kept[key] = row
    return list(kept.values())


def _outside(row: OutsideResult) -> Row:
    return Row(
        problem=row.problem, workload=row.workload, hardware=normalised_gpu_name(row.hardware),
        environment=row.environment, rank=0, latency_us=row.latency_us, ratio=1.0, percent_sol=row.percent_sol,
        trust=str(row.trust), observed=row.observed or None, implementation=row.implementation, origin=OUTSIDE,
        license=row.license or None, source_url=row.source_url or None, source=row.source, protocol=row.protocol,
        digest=row.digest,
    )  # fmt: skip


def _ours(group: Group) -> list[Row]:
    if not group.measured:
        return []
    sound = [row for row in group.rows if row.median_us is not None and not row.invalid]
    rows = [_our_row(group, row.case, row.median_us, row.percent_sol, [row]) for row in sound if row.median_us]
    total = group.aggregate
    if total.complete and total.mean_us is not None:
        rows.append(_our_row(group, suite_words(total.cases), total.mean_us, total.mean_percent_sol, sound))
    return rows


def _our_row(group: Group, workload: str, us: float, percent_sol: float | None, rows: Sequence[BestRow]) -> Row:
    """As trustworthy as its least trusted case, as old as its oldest."""
    days = [row.created_at.date().isoformat() for row in rows if row.created_at]
    again = all(row.trust == Trust.REPRODUCED for row in rows)
    weights = "" if group.weight_mode == "separate" else f", {group.weight_mode} weights"
    return Row(
        problem=group.problem, workload=workload, hardware=group.environment.gpu_name,
        environment=environment_words(group.environment, group.regime) + weights, rank=0, latency_us=us, ratio=1.0,
        percent_sol=percent_sol, trust=str(Trust.REPRODUCED if again else Trust.MEASURED),
        observed=min(days, default=None), implementation=NAME, origin=OURS, license=None, source_url=None,
        source=", ".join(sorted({row.source for row in rows})), protocol=group.regime,
        digest=rows[0].digest if len(rows) == 1 else "",
    )  # fmt: skip
