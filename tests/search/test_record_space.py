"""Measuring a whole space, or an even sample of it, in one command."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import TimedDevice, use_toys
from toys import EFFORT, ENVIRONMENT, LIMITS, FormulaDevice, MemoryStore, a_case, a_context, template

from tilewright import cli
from tilewright.db.rows import Level
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import Ceilings
from tilewright.search import run
from tilewright.search.context import NoCompiler
from tilewright.search.describe import Described
from tilewright.search.effort import SPACE
from tilewright.search.recording import read_recording
from tilewright.search.space import space_filling, stage_space
from tilewright.search.tune import Budget, Tuner

WIDE = template("attention", "attention", tiles=tuple(range(16, 1616, 16)))


class Session(TimedDevice):
    """The toy device where a worker's session would be."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def describe(self) -> Described:
        return Described(ENVIRONMENT, LIMITS, Ceilings(790e12, 4.3e12))


@contextmanager
def no_compiler(*_: object) -> Any:
    yield NoCompiler()


@pytest.mark.parametrize("points", [2000, 5])
def test_one_command_measures_the_space_and_writes_the_recording(
    points: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_toys(monkeypatch)
    monkeypatch.setattr(run, "open_device", lambda device: Session())
    monkeypatch.setattr(run, "compiler_for", no_compiler)
    for module in ("effort", "record_run"):
        monkeypatch.setattr(f"tilewright.search.{module}.SPACE", replace(SPACE, stage_trials=points))
    file, database = tmp_path / "whole.rec.gz", tmp_path / "db.sqlite"
    command = ["record", "--case", "b4s512", "--space", "--device", "cuda:0", "-o", str(file), "--db", str(database)]
    assert cli.run(command) == 0
    [one] = read_recording(file).cases
    wanted = (11, "every valid config") if points == 2000 else (5, "space-filling sample")
    assert {name: (found.recorded, found.how) for name, found in one.coverage.items()} == dict.fromkeys(
        ("split_projection", "norm_rope", "fused_projection", "attention", "library_output", "output"), wanted
    )
    assert one.record is not None
    assert any(row.level is Level.PLAN for row in one.trials)


def test_small_space_is_taken_whole() -> None:
    space = stage_space(WIDE, a_case(), LIMITS)
    assert space_filling(space, a_case(), LIMITS, count=len(space.valid)) is space


def test_sample_is_of_its_size_valid_with_the_default_and_reproducible() -> None:
    space = stage_space(WIDE, a_case(), LIMITS)
    first, second = (space_filling(space, a_case(), LIMITS, count=40, seed=3).valid for _ in range(2))
    assert first == second
    assert len({Stage("attention", values).digest for values in first}) == 40
    assert all(values in space.valid for values in first)
    assert WIDE.default(a_case(), LIMITS) in first


def test_sample_leaves_no_wide_gap() -> None:
    """Of 100 tile sizes, 40 points at random leave a gap of about 12; an even sample does not."""
    space = stage_space(WIDE, a_case(), LIMITS)
    for seed in range(5):
        tiles = sorted(int(v["TILE"]) // 16 for v in space_filling(space, a_case(), LIMITS, count=40, seed=seed).valid)
        assert max(b - a for a, b in itertools.pairwise(tiles)) <= 8


def test_time_is_kept_for_whole_blocks() -> None:
    device, store = FormulaDevice(), MemoryStore()
    context = a_context(device, store, effort=replace(EFFORT, stage_trials=100), now_s=lambda: float(len(store.trials)))
    Tuner(context, store).run([a_case()], Budget(seconds=40))
    assert sum(row.level is Level.STAGE for row in store.trials) <= 33
    assert sum(row.level is Level.PLAN for row in store.trials) >= 6
