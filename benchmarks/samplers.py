"""Samplers against each other on recorded spaces, without a GPU: how far from the recorded optimum after how much work.

    python benchmarks/samplers.py h200.rec.gz --seeds 20 -o samplers.json --plot samplers.svg

Each template of each recorded case is one space. Every sampler begins with the config that was recorded first, as a
search does, and is asked through the same study as in a search: no point twice, failures cost their device seconds.
Regret is best time so far over the recorded optimum, minus one. `brute` takes the points in shuffled order: what it
costs to the end is what a sampler saves.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from tilewright.benchmarks.svg import line_plot
from tilewright.db.rows import Status, TrialRow
from tilewright.errors import NothingFound
from tilewright.search.recording import Recording, read_recording
from tilewright.search.study import SAMPLERS, PointStudy, key_of

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4)
JUDGED_AT = 0.2  # share of the points or of the device seconds
LEAST_POINTS = 20
COMPARED = tuple(name for name in SAMPLERS if name != "auto")


@dataclass(frozen=True)
class Space:
    """What was recorded of one template at one case."""

    name: str
    rows: tuple[TrialRow, ...]

    @property
    def optimum_us(self) -> float:
        return min(row.median_us for row in self.rows if row.status is Status.OK and row.median_us is not None)

    @property
    def gpu_s(self) -> float:
        return sum(row.gpu_s or 0.0 for row in self.rows)


@dataclass(frozen=True)
class Curve:
    """Regrets of one search at SHARES of the points and of the device seconds; infinite before anything was valid."""

    by_points: tuple[float, ...]
    by_seconds: tuple[float, ...]


def spaces_of(recordings: Sequence[Recording]) -> list[Space]:
    """Spaces with enough points to tell samplers apart; raises NothingFound where there is none."""
    found = []
    for recording in recordings:
        for one in recording.cases:
            for template in recording.parts:
                rows = tuple(one.stages(template))
                if len(rows) >= LEAST_POINTS and any(row.status is Status.OK for row in rows):
                    found.append(Space(f"{one.case.name} {template}", rows))
    if not found:
        raise NothingFound(f"no template has {LEAST_POINTS} recorded points; `tilewright record --space` takes them")
    return found


def search(space: Space, sampler: str, seed: int) -> Curve:
    """One search up to the largest share."""
    rows = {key_of(row.config): row for row in space.rows}
    budget = min(len(rows) - 1, round(SHARES[-1] * len(rows)))
    study = PointStudy([row.config for row in space.rows], budget=budget, sampler=sampler, seed=seed)
    study.enqueue([space.rows[0].config])
    best, spent = float("inf"), 0.0
    steps: list[tuple[float, float, float]] = []  # points, device seconds, regret
    while len(steps) < budget and (point := study.ask()) is not None:
        row = rows[key_of(point)]
        value = row.median_us if row.status is Status.OK else None
        study.tell(point, value)
        best, spent = min(best, float("inf") if value is None else value), spent + (row.gpu_s or 0.0)
        steps.append((len(steps) + 1, spent, best / space.optimum_us - 1))
    by_points = tuple(_at(steps, 0, share * len(rows)) for share in SHARES)
    return Curve(by_points, tuple(_at(steps, 1, share * space.gpu_s) for share in SHARES))


def _at(steps: Sequence[tuple[float, float, float]], axis: int, limit: float) -> float:
    """Regret once no more than `limit` was spent; the first step is always taken."""
    within = [regret for *spent, regret in steps if spent[axis] <= limit + 1e-9]
    return within[-1] if within else steps[0][2]


def compare(spaces: Sequence[Space], samplers: Sequence[str], seeds: int) -> dict[str, Any]:
    """Median regrets of each sampler on each space, and what they come to."""
    entries = []
    for space in spaces:
        curves = {name: [search(space, name, seed) for seed in range(seeds)] for name in samplers}
        entries.append(
            {
                "space": space.name,
                "points": len(space.rows),
                "failed": sum(row.status is not Status.OK for row in space.rows),
                "optimum_us": round(space.optimum_us, 3),
                "brute_force_gpu_s": round(space.gpu_s, 3),
                "samplers": {
                    name: {
                        "by_points": _medians([curve.by_points for curve in found]),
                        "by_seconds": _medians([curve.by_seconds for curve in found]),
                    }
                    for name, found in curves.items()
                },
            }
        )
    result = {"schema": "tilewright.samplers/1", "seeds": seeds, "shares": list(SHARES), "spaces": entries}
    return {**result, "summary": _summary(entries, samplers)}


def _medians(curves: Sequence[tuple[float, ...]]) -> list[float | None]:
    """By share; None where the median search had nothing valid yet."""
    found = [median(column) for column in zip(*curves, strict=True)]
    return [None if value == float("inf") else round(value, 5) for value in found]


def _summary(entries: Sequence[dict[str, Any]], samplers: Sequence[str]) -> dict[str, Any]:
    """At JUDGED_AT: mean and worst of the median regrets, and on how many spaces no worse than random."""
    index = SHARES.index(JUDGED_AT)
    summary = {}
    for name in samplers:
        regrets = [_or_inf(entry["samplers"][name]["by_points"][index]) for entry in entries]
        chance = [_or_inf(entry["samplers"].get("random", {}).get("by_points", [None] * 9)[index]) for entry in entries]
        finite = all(value < float("inf") for value in regrets)
        summary[name] = {
            "mean_regret": round(fmean(regrets), 5) if finite else None,
            "worst_regret": round(max(regrets), 5) if finite else None,
            "within_3_percent": sum(value <= 0.03 for value in regrets),
            "ahead_of_random": sum(a < b for a, b in zip(regrets, chance, strict=True)),
            "behind_random": sum(a > b for a, b in zip(regrets, chance, strict=True)),
        }
    return summary


def _or_inf(value: float | None) -> float:
    return float("inf") if value is None else value


def table(result: dict[str, Any]) -> str:
    """Median regret in percent at JUDGED_AT of the points, then of the device seconds."""
    index = result["shares"].index(JUDGED_AT)
    names = list(result["summary"])
    lines = [f"median regret over {result['seeds']} seeds at {JUDGED_AT:.0%} of the points | of the GPU seconds"]
    lines.append(f"{'space':<28}{'points':>7}  " + "".join(f"{name:>15}" for name in names))
    for entry in result["spaces"]:
        cells = []
        for name in names:
            pair = [entry["samplers"][name][axis][index] for axis in ("by_points", "by_seconds")]
            cells.append(" | ".join("none" if value is None else f"{value:.1%}" for value in pair))
        lines.append(f"{entry['space']:<28}{entry['points']:>7}  " + "".join(f"{cell:>15}" for cell in cells))
    for name, found in result["summary"].items():
        lines.append(f"{name}: {', '.join(f'{key} {value}' for key, value in found.items())}")
    total = sum(entry["brute_force_gpu_s"] for entry in result["spaces"])
    lines.append(
        f"brute force takes {total:.1f} GPU seconds for all; {JUDGED_AT:.0%} saves {total * (1 - JUDGED_AT):.1f}"
    )
    return "\n".join(lines)


def plot(result: dict[str, Any]) -> str:
    """Mean over the spaces of the median regrets, percent."""
    panels = {}
    for axis, title in (("by_points", "share of the points"), ("by_seconds", "share of the GPU seconds")):
        panels[title] = {
            name: [
                (100 * share, 100 * fmean(known))
                for i, share in enumerate(result["shares"])
                if (known := [v for e in result["spaces"] if (v := e["samplers"][name][axis][i]) is not None])
            ]
            for name in result["summary"]
        }
    return line_plot(panels, y_title="mean of median regrets, %")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--seeds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--sampler", "samplers", multiple=True, type=click.Choice(COMPARED), help="Default: all.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON.")
@click.option("--plot", "svg", type=click.Path(dir_okay=False, path_type=Path), help="SVG.")
def main(files: tuple[Path, ...], seeds: int, samplers: tuple[str, ...], output: Path | None, svg: Path | None) -> None:
    """Compares samplers on recordings."""
    result = compare(spaces_of([read_recording(file) for file in files]), samplers or COMPARED, seeds)
    click.echo(table(result))
    if output is not None:
        output.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if svg is not None:
        svg.write_text(plot(result), encoding="utf-8")


if __name__ == "__main__":
    main()
