"""How long a candidate takes: L2 flushed and other inputs for every sample, device time only. Imports torch."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol

import torch

from tilewright.kernel_templates.inputs import InputOptions
from tilewright.search.case_state import Bound, CaseState
from tilewright.search.outcome import Candidate, MeasureOptions

FLUSH_BYTES = 256 * 1024 * 1024  # at least twice the L2 of any card so far
BATCH = 8  # samples in flight before the host waits for them
MOST_WARM_UPS = 20


class Runnable(Protocol):
    """Something to time over one input set."""

    def restore(self) -> None: ...
    def run(self) -> None: ...


Prepared = tuple[Runnable, Callable[[], None]]  # what it runs over, and what is timed


class InvalidTime(Exception):
    """The timer gave something that is no time."""


class Timer(Protocol):
    """Times one runnable after another; microseconds."""

    def prepare(self, runnable: Runnable) -> Callable[[], None]: ...
    def sample(self, batch: Sequence[Prepared]) -> list[float]: ...


class CudaTimer:
    """CUDA events around a graph replay or a direct launch, the L2 flushed in between."""

    def __init__(self, device: torch.device, options: MeasureOptions) -> None:
        self._options = options
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device) if options.cold_l2 else None
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, runnable: Runnable) -> Callable[[], None]:
        """Warm, then captured; the graph is replayed on the current stream."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            runnable.restore()
            runnable.run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        if self._options.regime == "eager":
            return runnable.run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            runnable.run()
        return graph.replay

    def sample(self, batch: Sequence[Prepared]) -> list[float]:
        events = []
        for runnable, replay in batch:
            runnable.restore()
            if self._flush is not None:
                self._flush.zero_()
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]


class HostTimer:
    """The interpreter's: wall time of the host, good for nothing but showing that something ran."""

    def prepare(self, runnable: Runnable) -> Callable[[], None]:
        return runnable.run

    def sample(self, batch: Sequence[Prepared]) -> list[float]:
        times = []
        for runnable, run in batch:
            runnable.restore()
            begun = time.perf_counter()
            run()
            times.append((time.perf_counter() - begun) * 1e6)
        return times


def make_timer(device: torch.device, options: MeasureOptions) -> Timer:
    return CudaTimer(device, options) if device.type == "cuda" else HostTimer()


def prepare(state: CaseState, candidate: Candidate, sets: int, timer: Timer) -> list[tuple[Bound, Callable[[], None]]]:
    """The candidate over each input set, ready to be timed."""
    bound = [Bound(state, candidate, InputOptions(seed)) for seed in range(sets)]
    return [(held, timer.prepare(held)) for held in bound]


def measure(ready: Sequence[Prepared], options: MeasureOptions, timer: Timer) -> list[float]:
    """Samples, microseconds, each over the next input set; ends by the options' rules. Raises InvalidTime."""
    _warm_up(timer, ready, options)
    samples: list[float] = []
    half = max(1, options.min_samples // 2)
    while len(samples) < options.max_samples:
        count = min(BATCH if samples else half, BATCH, options.max_samples - len(samples))
        samples += _valid(timer.sample([ready[(len(samples) + i) % len(ready)] for i in range(count)]))
        if options.cut_above_us is not None and len(samples) >= half and median(samples) > options.cut_above_us:
            break
        if len(samples) >= options.min_samples and sum(samples) >= options.budget_ms * 1e3:
            break
    return samples


def measure_once(ready: Sequence[Prepared], timer: Timer) -> list[float]:
    """One sample over each input set, for where times are no measurements. Raises InvalidTime."""
    return _valid(timer.sample(ready))


def _warm_up(timer: Timer, ready: Sequence[Prepared], options: MeasureOptions) -> None:
    """Bounded by device time and by count; the samples are dropped."""
    first = max(_valid(timer.sample(ready[:1]))[0], 1.0)
    count = min(MOST_WARM_UPS, math.ceil(options.warmup_ms * 1e3 / first))
    timer.sample([ready[i % len(ready)] for i in range(count)])


def interleaved(
    contestants: Mapping[str, Sequence[Prepared]],
    timer: Timer,
    *,
    rounds: int,
    least: int,
    time_budget_s: float,
    seed: int,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Every contestant once a round in shuffled order, all on the round's input set; at least `least` rounds.

    Second are those that gave an invalid time, with the reason; their times are dropped.
    """
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    failures: dict[str, str] = {}
    begun = time.monotonic()
    for number in range(-1, rounds):
        if not times or (number >= least and time.monotonic() - begun > time_budget_s):
            break
        names = list(times)
        order.shuffle(names)
        batch = [contestants[name][number % len(contestants[name])] for name in names]
        for name, value in zip(names, timer.sample(batch), strict=True):
            try:
                _valid([value])
            except InvalidTime as error:
                failures[name] = f"InvalidTime: {error}"
                del times[name]
                continue
            if number >= 0:  # the first round warms up
                times[name].append(value)
    return times, failures


def _valid(samples: list[float]) -> list[float]:
    for value in samples:
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise InvalidTime(f"the timer gave {value!r}")
    return samples
