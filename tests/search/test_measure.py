"""When measuring begins, ends and refuses, with a timer that says what it is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tilewright.search.measure import BATCH, InvalidTime, Prepared, Runnable, interleaved, measure, measure_once
from tilewright.search.outcome import MeasureOptions


class Fake:
    """Something to time, by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def restore(self) -> None:
        pass

    def run(self) -> None:
        pass


@dataclass
class FakeTimer:
    """Answers `time_us` for each sample and keeps who was asked for, call by call."""

    time_us: Callable[[str, int], float] = lambda name, number: 100.0
    batches: list[list[str]] = field(default_factory=list)

    def prepare(self, runnable: Runnable) -> Callable[[], None]:
        return runnable.run

    def sample(self, batch: Sequence[Prepared]) -> list[float]:
        names = [runnable.name for runnable, _ in batch]  # type: ignore[attr-defined]
        first = len(self.sampled)
        self.batches.append(names)
        return [self.time_us(name, first + i) for i, name in enumerate(names)]

    @property
    def sampled(self) -> list[str]:
        return [name for batch in self.batches for name in batch]


def ready(*names: str) -> list[Prepared]:
    made = [Fake(name) for name in names]
    return [(fake, fake.run) for fake in made]


SETS = ("0", "1", "2", "3")


def test_measuring_ends_at_the_most_samples() -> None:
    options = MeasureOptions(min_samples=10, max_samples=30, budget_ms=1e9)
    assert len(measure(ready(*SETS), options, FakeTimer())) == 30


def test_slow_candidate_ends_at_the_fewest_samples() -> None:
    """The budget is used up before, so the batch that reaches the fewest is the last."""
    options = MeasureOptions(min_samples=10, max_samples=30, budget_ms=1)
    samples = measure(ready(*SETS), options, FakeTimer(lambda name, number: 5e3))
    assert 10 <= len(samples) < 10 + BATCH


def test_budget_is_device_time() -> None:
    options = MeasureOptions(min_samples=4, max_samples=1000, budget_ms=10)
    samples = measure(ready(*SETS), options, FakeTimer(lambda name, number: 100.0))
    assert 100 <= len(samples) < 100 + BATCH


def test_candidate_above_the_cut_ends_after_half_of_the_fewest() -> None:
    options = MeasureOptions(min_samples=10, max_samples=30, cut_above_us=99.0)
    assert len(measure(ready(*SETS), options, FakeTimer())) == 5


def test_candidate_at_the_cut_is_measured_to_the_end() -> None:
    options = MeasureOptions(min_samples=10, max_samples=30, cut_above_us=100.0, budget_ms=1e9)
    assert len(measure(ready(*SETS), options, FakeTimer())) == 30


def test_input_sets_take_turns() -> None:
    timer = FakeTimer()
    measure(ready(*SETS), MeasureOptions(min_samples=10, max_samples=30, warmup_ms=0, budget_ms=1e9), timer)
    timed = timer.sampled[1:]
    assert timed == [str(i % 4) for i in range(30)]


@pytest.mark.parametrize(("time_us", "count"), [(1.0, 20), (1000.0, 5), (1e6, 1)])
def test_warm_up_is_bounded_by_time_and_count(time_us: float, count: int) -> None:
    timer = FakeTimer(lambda name, number: time_us)
    measure(ready(*SETS), MeasureOptions(warmup_ms=5, min_samples=2, max_samples=2), timer)
    assert [len(batch) for batch in timer.batches] == [1, count, 1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0, None, "fast"])
@pytest.mark.parametrize("number", [0, 25])
def test_time_that_is_none_is_refused(bad: float, number: int) -> None:
    """The first sample warms up, the 26th counts."""
    timer = FakeTimer(lambda name, i: bad if i == number else 100.0)
    with pytest.raises(InvalidTime, match="the timer gave"):
        measure(ready(*SETS), MeasureOptions(warmup_ms=5, max_samples=20, budget_ms=1e9), timer)


def test_where_times_are_no_measurements_each_input_set_runs_once() -> None:
    timer = FakeTimer()
    assert len(measure_once(ready("0", "1"), timer)) == 2
    assert timer.sampled == ["0", "1"]
    with pytest.raises(InvalidTime):
        measure_once(ready("0"), FakeTimer(lambda name, number: float("nan")))


def contestants(*names: str) -> dict[str, list[Prepared]]:
    return {name: ready(f"{name}0", f"{name}1") for name in names}


def finals(
    timer: FakeTimer, *, rounds: int = 12, budget_s: float = 1e9, seed: int = 0, least: int = 6
) -> dict[str, int]:
    times, _ = interleaved(
        contestants("a", "b", "c"), timer, rounds=rounds, least=least, time_budget_s=budget_s, seed=seed
    )
    return {name: len(values) for name, values in times.items()}


def test_every_contestant_runs_once_a_round_on_the_rounds_input_set() -> None:
    timer = FakeTimer()
    assert finals(timer) == {"a": 12, "b": 12, "c": 12}
    assert len(timer.batches) == 13  # one round warms up
    for number, batch in enumerate(timer.batches[1:]):
        assert sorted(batch) == [f"{name}{number % 2}" for name in "abc"]


def test_order_is_shuffled_by_the_seed() -> None:
    first, again, other = FakeTimer(), FakeTimer(), FakeTimer()
    finals(first, seed=1)
    finals(again, seed=1)
    finals(other, seed=2)
    assert first.batches == again.batches
    assert first.batches != other.batches
    orders = {tuple(name[0] for name in batch) for batch in first.batches}
    assert len(orders) > 2


def test_rounds_are_at_least_what_an_interval_needs_however_little_time_there_is() -> None:
    assert finals(FakeTimer(), rounds=100, budget_s=-1.0, least=6) == {"a": 6, "b": 6, "c": 6}


@pytest.mark.parametrize("number", [1, 20])
def test_invalid_time_strikes_its_contestant_alone(number: int) -> None:
    """In the round that warms up as in a later one; the others keep equal numbers of rounds."""
    seen: list[str] = []

    def time_us(name: str, i: int) -> float:
        seen.append(name)
        return 0.0 if name.startswith("b") and i >= number else 100.0

    times, failures = interleaved(
        contestants("a", "b", "c"), FakeTimer(time_us), rounds=12, least=6, time_budget_s=1e9, seed=0
    )
    assert {name: len(values) for name, values in times.items()} == {"a": 12, "c": 12}
    assert failures == {"b": "InvalidTime: the timer gave 0.0"}


def test_final_of_invalid_times_ends_at_once() -> None:
    timer = FakeTimer(lambda name, number: float("nan"))
    times, failures = interleaved(contestants("a", "b"), timer, rounds=12, least=6, time_budget_s=1e9, seed=0)
    assert times == {}
    assert set(failures) == {"a", "b"}
    assert len(timer.batches) == 1
