"""The rules of measuring, on a timer that answers from a list."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import Stage
from tilewright.problem import load_problem
from tilewright.search import measure
from tilewright.search.case_state import CaseState
from tilewright.search.measure import InvalidTime, interleaved
from tilewright.search.outcome import MeasureOptions


class ListTimer:
    """Gives the next of `times` for each sample, and notes what was sampled."""

    def __init__(self, times: Iterator[float]) -> None:
        self._times = times
        self.sampled: list[Any] = []

    def prepare(self, runnable: Any) -> Callable[[], None]:
        return lambda: None

    def sample(self, batch: Sequence[tuple[Any, Callable[[], None]]]) -> list[float]:
        self.sampled += [runnable for runnable, _ in batch]
        return [next(self._times) for _ in batch]


def endless(value: float) -> Iterator[float]:
    while True:
        yield value


def measured(options: MeasureOptions, timer: ListTimer) -> list[float]:
    """Of a stage on a state that believes to be on a GPU."""
    case = load_problem().at_suite("smoke").parse_case("b1s7")
    state = CaseState(case, load_family("gqa_attention"), torch.device("cpu"))

    class OnCuda:
        def __getattr__(self, name: str) -> Any:
            return torch.device("cuda") if name == "device" else getattr(state, name)

    original = measure.Bound
    measure.Bound = lambda _, candidate, inputs: original(state, candidate, inputs)  # type: ignore[assignment,misc]
    try:
        return measure.measure(OnCuda(), Stage("cublas_output", {}), options, timer)  # type: ignore[arg-type]
    finally:
        measure.Bound = original  # type: ignore[misc]


def test_sampling_ends_at_the_most_samples() -> None:
    options = MeasureOptions(min_samples=8, max_samples=24, budget_ms=1e9)
    assert len(measured(options, ListTimer(endless(10.0)))) == 24


def test_budget_ends_it_once_the_fewest_samples_are_there() -> None:
    options = MeasureOptions(min_samples=16, max_samples=400, budget_ms=0.05)
    assert len(measured(options, ListTimer(endless(100.0)))) == 16


def test_slow_candidate_is_cut_after_its_first_samples() -> None:
    options = MeasureOptions(min_samples=8, max_samples=80, budget_ms=1e9, cut_above_us=30.0)
    assert len(measured(options, ListTimer(endless(31.0)))) == 8
    assert len(measured(options, ListTimer(endless(29.0)))) == 80


def test_input_sets_take_turns() -> None:
    timer = ListTimer(endless(10.0))
    measured(MeasureOptions(min_samples=8, max_samples=16, input_sets=4, warmup_ms=0.0), timer)
    last = timer.sampled[-16:]
    assert len({id(held) for held in last}) == 4
    assert [id(held) for held in last[:4]] == [id(held) for held in last[4:8]]


def test_warm_up_is_bounded_and_dropped() -> None:
    timer = ListTimer(iter([*[999.0] * 21, *[10.0] * 80]))
    assert set(measured(MeasureOptions(min_samples=8, max_samples=16, warmup_ms=250.0), timer)) == {10.0}


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf"), None])
def test_what_is_no_time_raises(value: Any) -> None:
    with pytest.raises(InvalidTime, match="the timer gave"):
        measured(MeasureOptions(), ListTimer(endless(value)))


def test_rounds_hold_every_contestant_once_in_an_order_that_the_seed_fixes() -> None:
    def play(seed: int) -> tuple[dict[str, list[float]], list[str]]:
        contestants = {name: [(name, lambda: None)] for name in "abc"}
        timer = ListTimer(endless(1.0))
        times = interleaved(contestants, timer, rounds=9, least=6, time_budget_s=60, seed=seed)  # type: ignore[arg-type]
        return times, timer.sampled

    times, order = play(1)
    assert {len(values) for values in times.values()} == {9}
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert order == play(1)[1] != play(2)[1]


def test_out_of_time_a_final_still_has_its_fewest_rounds() -> None:
    contestants = {"a": [("a", lambda: None)]}
    times = interleaved(contestants, ListTimer(endless(1.0)), rounds=99, least=6, time_budget_s=0.0, seed=0)  # type: ignore[arg-type]
    assert len(times["a"]) == 6
