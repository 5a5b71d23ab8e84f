"""The statistics of a final: who wins, who ties, and how often noise is taken for a difference."""

import random
from dataclasses import replace

import pytest

from tilewright.db.rows import Verdict
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.search.final import decide, median_interval, ratio_interval
from tilewright.search.outcome import FinalEntry, FinalSamples


def plan(tile: int) -> FusionPlan:
    return FusionPlan((Stage("template", {"BLOCK_M": tile}),))


def entry(name: str, source: str) -> FinalEntry:
    return FinalEntry(name, None if source == "baseline" else plan(hash(name) % 997), source)


def samples(seed: int = 0, rounds: int = 40, noise: float = 0.004, **medians: float) -> FinalSamples:
    """Rounds that share a drift, as a throttling card gives, with noise of their own."""
    rng = random.Random(seed)
    drift = [1 + 0.05 * rng.random() for _ in range(rounds)]
    return FinalSamples({n: tuple(m * d * rng.gauss(1, noise) for d in drift) for n, m in medians.items()})


ENTRIES = [entry("default", "default"), entry("fast", "candidate"), entry("library", "baseline")]


def test_clear_winner_beats_default_and_baseline() -> None:
    decision = decide(ENTRIES, samples(default=100, fast=90, library=99))
    assert (decision.winner, decision.verdict) == ("fast", Verdict.BEATS_ALL)
    assert decision.ratios["fast"].high < 0.92


def test_winner_that_only_ties_the_baseline_says_so() -> None:
    decision = decide(ENTRIES, samples(default=100, fast=90, library=90))
    assert (decision.winner, decision.verdict) == ("fast", Verdict.BEATS_DEFAULT)


def test_gain_below_the_threshold_keeps_the_default() -> None:
    decision = decide(ENTRIES, samples(noise=0.0005, default=100, fast=99.5, library=120))
    assert (decision.winner, decision.verdict) == ("default", Verdict.DEFAULT_KEPT)
    assert "default" in decision.reason


def test_tie_goes_to_the_incumbent() -> None:
    entries = [entry("old", "incumbent"), *ENTRIES]
    decision = decide(entries, samples(old=90, default=100, fast=90, library=99))
    assert (decision.winner, decision.verdict) == ("old", Verdict.INCUMBENT_KEPT)
    assert "fast" in decision.ties


def test_challenger_must_beat_the_default_as_well_as_the_incumbent() -> None:
    entries = [entry("old", "incumbent"), *ENTRIES]
    assert decide(entries, samples(old=100, default=90, fast=90, library=99)).winner != "fast"


def test_contestant_that_did_not_finish_cannot_win() -> None:
    times = samples(default=100, library=99)
    assert decide(ENTRIES, times).winner == "default"


def test_pairing_removes_shared_drift() -> None:
    times = samples(default=100, fast=98, library=99)
    assert ratio_interval(times.rounds["fast"], times.rounds["default"]).high < 0.985
    assert median_interval(times.rounds["fast"]).high - median_interval(times.rounds["fast"]).low > 0.5


def test_same_config_twice_is_rarely_called_different() -> None:
    entries = [entry("default", "default"), entry("same", "candidate")]
    different = sum(decide(entries, samples(seed, default=100, same=100)).winner == "same" for seed in range(100))
    assert different <= 5


def test_interval_covers_the_true_median_about_95_times_in_100() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(400):
        interval = median_interval([rng.expovariate(1) for _ in range(30)])
        covered += interval.low <= 0.6931 <= interval.high
    assert 0.93 <= covered / 400 <= 0.995


def test_of_equals_the_one_with_fewer_registers_wins() -> None:
    heavy = replace(entry("heavy", "candidate"), cost=(400, 90_000))
    light = replace(entry("light", "candidate"), cost=(300, 90_000))
    decision = decide([ENTRIES[0], heavy, light], samples(default=100, heavy=90, light=90.01))
    assert decision.winner == "light"


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 6 values, got 5"):
        median_interval([1, 2, 3, 4, 5])
