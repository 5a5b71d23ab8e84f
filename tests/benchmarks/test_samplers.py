"""The comparison of samplers, in a short form on a recording that a cost model makes."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from recorded import model_recording

from tilewright.benchmarks import samplers
from tilewright.errors import NothingFound
from tilewright.search.recording import write_recording


def test_command_prints_a_table_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    file, output, svg = (tmp_path / name for name in ("x.rec.gz", "out.json", "out.svg"))
    write_recording(model_recording(), file)
    names = ("tpe", "qmc", "cmaes", "random", "brute")
    chosen = [word for name in names for word in ("--sampler", name)]
    answer = CliRunner().invoke(
        samplers.main, [str(file), "--seeds", "2", *chosen, "-o", str(output), "--plot", str(svg)]
    )
    assert answer.exit_code == 0, answer.output
    assert "b4s512 attention" in answer.output
    result = json.loads(output.read_text())
    [space] = result["spaces"]
    assert (space["points"], set(space["samplers"])) == (240, set(names))
    lines = ElementTree.fromstring(svg.read_text()).iter("{http://www.w3.org/2000/svg}polyline")
    assert len(list(lines)) == 2 * len(names)


def test_default_sampler_is_near_the_optimum_and_ahead_of_chance() -> None:
    result = samplers.compare(samplers.spaces_of([model_recording()]), ("tpe", "random"), seeds=3)
    summary = result["summary"]["tpe"]
    assert summary["worst_regret"] <= 0.03
    assert summary["behind_random"] == 0


def test_regret_only_falls_and_is_zero_at_the_optimum() -> None:
    [space] = samplers.spaces_of([model_recording()])
    curve = samplers.search(space, "random", 0)
    for regrets in (curve.by_points, curve.by_seconds):
        assert list(regrets) == sorted(regrets, reverse=True)
    best = min(space.rows, key=lambda row: row.median_us or float("inf"))
    first = samplers.Space(space.name, (best, *(row for row in space.rows if row is not best)))
    assert samplers.search(first, "random", 0).by_points[0] == 0


def test_recording_with_too_few_points_is_told(tmp_path: Path) -> None:
    recording = model_recording()
    few = type(recording.cases[0])(recording.cases[0].case, recording.cases[0].trials[:5])
    with pytest.raises(NothingFound, match="record --space"):
        samplers.spaces_of(
            [type(recording)(recording.problem, recording.environment, "graph", "2", recording.parts, (few,))]
        )
