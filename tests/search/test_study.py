"""Point studies: no point twice, seeds first, deterministic, whole spaces enumerated."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tilewright.errors import UsageError
from tilewright.search.study import SAMPLERS, PointStudy, key_of

GRID = [
    {"block_m": m, "block_n": n, "warps": w}
    for m, n, w in itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (4, 8))
    if m * n <= 16384
]


def cost(point: Mapping[str, Any]) -> float:
    return float(abs(point["block_m"] - 64) + abs(point["block_n"] - 128) / 2 + point["warps"])


def play(study: PointStudy, value: Callable[[Mapping[str, Any]], float | None] = cost) -> list[str]:
    asked = []
    while (point := study.ask()) is not None:
        asked.append(key_of(point))
        study.tell(point, value(point))
    return asked


def test_small_space_is_covered_once_and_then_ends() -> None:
    asked = play(PointStudy(GRID[:8], budget=40))
    assert sorted(asked) == sorted(key_of(point) for point in GRID[:8])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_proposes_valid_points_once(sampler: str) -> None:
    asked = play(PointStudy(GRID, budget=12, sampler=sampler, seed=1))
    assert len(asked) == len(set(asked)) >= 12
    assert set(asked) <= {key_of(point) for point in GRID}


def test_same_seed_gives_the_same_sequence() -> None:
    first, second = (play(PointStudy(GRID, budget=16, seed=5)) for _ in range(2))
    assert first == second
    assert first != play(PointStudy(GRID, budget=16, seed=6))


def test_seeds_come_first_in_their_order() -> None:
    study = PointStudy(GRID, budget=6)
    study.enqueue([GRID[7], GRID[2]])
    assert play(study)[:2] == [key_of(GRID[7]), key_of(GRID[2])]


def test_seed_outside_the_space_is_refused_by_name() -> None:
    study = PointStudy(GRID, budget=6)
    with pytest.raises(UsageError, match='"warps": 3'):
        study.enqueue([{"block_m": 16, "block_n": 32, "warps": 3}])
    with pytest.raises(UsageError, match="blok_m"):
        study.enqueue([{"blok_m": 16, "block_n": 32, "warps": 4}])


def test_known_points_count_and_are_not_asked_again() -> None:
    study = PointStudy(GRID, budget=6)
    for point in GRID[:4]:
        study.add_known(point, cost(point))
    asked = play(study)
    assert len(asked) == 2
    assert not set(asked) & {key_of(point) for point in GRID[:4]}


def test_failures_do_not_stop_the_search() -> None:
    asked = play(PointStudy(GRID, budget=10, seed=2), lambda point: None)
    assert len(asked) == 10


@pytest.mark.parametrize("sampler", ["cmaes", "qmc"])
def test_samplers_of_numbers_do_not_fall_back_to_chance(sampler: str) -> None:
    wide = [{"a": a, "b": b} for a in range(40) for b in (True, False)]
    named, chance = (
        play(PointStudy(wide, budget=20, sampler=name, seed=1), lambda p: p["a"]) for name in (sampler, "random")
    )
    assert named != chance


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_sampler_finds_better_points_than_chance(sampler: str) -> None:
    wide = [{"a": a, "b": b} for a in range(40) for b in range(40)]

    def best(name: str, seed: int) -> float:
        seen: list[float] = []

        def note(point: Mapping[str, Any]) -> float:
            seen.append(float((point["a"] - 31) ** 2 + (point["b"] - 7) ** 2))
            return seen[-1]

        play(PointStudy(wide, budget=60, sampler=name, seed=seed), note)
        return min(seen)

    seeds = range(5)
    assert sum(best(sampler, seed) for seed in seeds) < sum(best("random", seed) for seed in seeds)


def test_conditional_points_are_proposed_whole() -> None:
    points = [{"plan": "x", "one": i} for i in range(20)] + [{"plan": "y", "two": i} for i in range(20)]
    asked = play(PointStudy(points, budget=15, seed=3), lambda p: float(p.get("one", 50) + p.get("two", 0)))
    assert len(set(asked)) == 15
