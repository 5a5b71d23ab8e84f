"""Leave-one-out of the transfer rule: what each tuned case would lose had it never been tuned.

    python benchmarks/transfer.py --db tuned.sqlite -o transfer.json

For each case with a record, the rule of runtime/serving.py is asked with the other cases' records alone, and the plan
that it gives (the default where no near shape is tuned) is looked up among the stored trials of the case. Regret is
that plan's time over the best stored time of a plan at the case. A plan that was never measured there as a whole block
is judged by the sum of its stages over the sum of the best plan's stages, and said to be `summed`; where a stage is not
stored either, it is `unknown` and counts in no figure. Records of earlier template sources are judged as they were.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from tilewright.db.environment import Environment, normalised_gpu_name
from tilewright.db.reader import Reader
from tilewright.db.rows import Level, Status, StoredRecord, TrialRow
from tilewright.errors import NothingFound
from tilewright.kernel_templates.base import Limits, Template
from tilewright.kernel_templates.device import named_limits
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Registry
from tilewright.problem import DEFAULT_PROBLEM, WorkloadCase, load_problem
from tilewright.runtime.layers import Layer, RecordSet
from tilewright.runtime.machine import Machine
from tilewright.runtime.serving import Asked

Times = Mapping[tuple[Level, str], float]  # by level and digest


@dataclass(frozen=True)
class Pinned(Template):
    """A template that answers for the sources that the records were made with."""

    pinned_hash: str = ""

    @property
    def source_hash(self) -> str:
        return self.pinned_hash


@dataclass(frozen=True)
class Left:
    """One case left out: regrets are times over the best, and None where they are not known."""

    case: str
    source: str  # the case that lends its plan; empty for the default
    how: str  # measured | summed | unknown
    regret: float | None
    over_default: float | None  # the lent plan's time over the default's


def leave_one_out(db: str, *, problem: str = DEFAULT_PROBLEM, gpu: str | None = None) -> list[Left]:
    """Every case with a record of the newest environment; raises NothingFound for fewer than two."""
    loaded = load_problem(problem)
    with Reader.open(db) as reader:
        records = reader.active_records(problem=loaded.name, gpu=gpu and normalised_gpu_name(gpu), regime="graph")
        records = [stored for stored in records if not stored.invalid and stored.record.weight_mode == "separate"]
        if records:
            environment = records[0].environment
            records = [stored for stored in records if stored.environment.digest == environment.digest]
        if len(records) < 2:
            raise NothingFound(f"{db} holds fewer than two records of {loaded.name} on one card")
        rows = [stored.trial for stored in reader.trials(problem=loaded.name, env=environment, statuses=[Status.OK])]
    registry = pinned(load_family(loaded.family).registry, rows)
    machine = Machine(environment, limits_of(environment))
    times: dict[str, dict[tuple[Level, str], float]] = {}
    for row in rows:
        if row.median_us is not None and row.regime == "graph":
            times.setdefault(row.case_key, {})[row.level, row.digest] = row.median_us
    asked = [
        loaded.case(weight_mode="separate", **stored.axes)
        for stored in sorted(records, key=lambda stored: stored.case_name)
    ]
    return [_left(case, records, times.get(case.key, {}), machine, registry) for case in asked]


def limits_of(environment: Environment) -> Limits:
    return named_limits(int(environment.capability.replace(".", "")), environment.sm_count)


def pinned(registry: Registry, rows: list[TrialRow]) -> Registry:
    """The templates under the source hashes of their latest trials."""
    hashes = {row.template: row.source_hash for row in rows if row.level is Level.STAGE}
    return Registry(
        Pinned(**{**vars(template), "pinned_hash": hashes.get(name, template.source_hash)})
        for name, template in registry.items()
    )


def _left(case: WorkloadCase, records: list[StoredRecord], times: Times, machine: Machine, registry: Registry) -> Left:
    others = RecordSet(Layer.EXPLICIT, "left out", [r for r in records if r.record.case_key != case.key])
    found = Asked(case, machine, registry).nearest(case.variant_key, (others,), ())
    default = registry.default_plan(case, machine.limits)
    plan = default if found is None else found.plan
    source = "" if found is None or found.record is None else found.record.case_name
    measured = {digest: us for (level, digest), us in times.items() if level is Level.PLAN}
    own = next(FusionPlan.from_json(r.record.plan) for r in records if r.record.case_key == case.key)
    best = min(measured.values(), default=None)
    regret, how = _ratio(plan, own, best, times)
    default_regret, _ = _ratio(default, own, best, times)
    over_default = regret / default_regret if regret and default_regret else None
    return Left(case.name, source, how, regret, over_default)


def _ratio(plan: FusionPlan, own: FusionPlan, best_us: float | None, times: Times) -> tuple[float | None, str]:
    """Time over the best: as whole blocks, else as sums of stages against the case's own record."""
    us = times.get((Level.PLAN, plan.digest))
    if us is not None and best_us is not None:
        return us / best_us, "measured"
    mine, theirs = ([times.get((Level.STAGE, stage.digest)) for stage in each.stages] for each in (plan, own))
    if all(mine) and all(theirs):
        return sum(filter(None, mine)) / sum(filter(None, theirs)), "summed"
    return None, "unknown"


def summary(found: list[Left]) -> dict[str, Any]:
    """Geometric mean and worst regret over the cases where it is known, beside how many those are."""
    known = [left.regret for left in found if left.regret is not None]
    ratios = [left.over_default for left in found if left.over_default is not None]
    return {
        "cases": len(found),
        "transferred": sum(bool(left.source) for left in found),
        "known": len(known),
        "measured": sum(left.how == "measured" for left in found),
        "geometric_mean_regret": round(exp(fmean(map(log, known))) - 1, 4) if known else None,
        "worst_regret": round(max(known) - 1, 4) if known else None,
        "worst_over_default": round(max(ratios) - 1, 4) if ratios else None,
    }


def table(found: list[Left]) -> str:
    lines = [f"{'case':<10}{'plan of':<10}{'regret':>8}{'to default':>12}  how"]
    for left in found:
        cells = ["" if x is None else f"{x - 1:+.1%}" for x in (left.regret, left.over_default)]
        lines.append(f"{left.case:<10}{left.source or 'default':<10}{cells[0]:>8}{cells[1]:>12}  {left.how}")
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in summary(found).items())])


@click.command()
@click.option("--db", required=True, metavar="PATH|URL")
@click.option("--problem", default=DEFAULT_PROBLEM, show_default=True)
@click.option("--gpu")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON.")
def main(db: str, problem: str, gpu: str | None, output: Path | None) -> None:
    """Leaves each tuned case out once."""
    found = leave_one_out(db, problem=problem, gpu=gpu)
    click.echo(table(found))
    if output is not None:
        content = {
            "schema": "tilewright.transfer/1",
            "summary": summary(found),
            "cases": [vars(left) for left in found],
        }
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
