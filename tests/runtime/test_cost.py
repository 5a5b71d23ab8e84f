"""What serving costs: bounded memory, safe in threads, and microseconds. benchmarks/dispatch_cost.py measures it."""

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from calls import a_case, arguments

from tilewright.runtime import dispatch, engine, gqa_attention, lookup, serving
from tilewright.runtime.engine import launcher_for
from tilewright.runtime.machine import machine_of
from tilewright.runtime.memo import Memo
from tilewright.runtime.tensors import signature

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do nothing."""
    use = engine.Launcher._use

    def stubbed(self: engine.Launcher, found: Any) -> None:
        use(self, found)
        self._steps = [(lambda *_: None, values) for _, values in self._steps]

    monkeypatch.setattr(engine.Launcher, "_use", stubbed)


def shapes_of(count: int) -> Callable[[int], torch.Tensor]:
    """A call at one of `count` lengths."""
    given: dict[str, Any] = arguments(a_case(1, count))
    long = {name: given.pop(name) for name in ("hidden_states", "cos", "sin")}

    def call(number: int) -> torch.Tensor:
        rows = {name: tensor[:, : number % count + 1] for name, tensor in long.items()}
        return dispatch(**given, **rows)

    return call


def median_us(action: Callable[[], object], count: int = 2000) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - begun)
    return median(times) / 1e3


def test_memory_does_not_grow_once_every_shape_was_seen() -> None:
    call = shapes_of(100)
    for number in range(200):
        call(number)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(10_000):
            call(number)
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # bytes: two for each call would be this much


def test_more_shapes_than_fit_are_dropped_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memos = [Memo(capacity=50) for _ in range(3)]
    for module, name, memo in zip(
        (gqa_attention, engine, serving), ("_calls", "_launchers", "_lookups"), memos, strict=True
    ):
        monkeypatch.setattr(module, name, memo)
    call = shapes_of(120)
    for number in range(360):
        call(number)
    assert [len(memo) for memo in memos] == [50, 50, 50]


def test_threads_over_more_shapes_than_fit_get_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gqa_attention, "_calls", Memo(capacity=10))
    monkeypatch.setattr(engine, "_launchers", Memo(capacity=10))
    call = shapes_of(30)
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            wrong.extend(n for n in range(first, first + 300) if call(n).shape != (1, n % 30 + 1, 128))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(7 * first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_remembered_lookup_takes_at_most_two_microseconds() -> None:
    machine = machine_of("interpret")
    case = a_case()
    lookup(case, machine)
    assert median_us(lambda: lookup(case, machine)) < 2.0


def test_dispatch_adds_little_to_its_kernels() -> None:
    """15 us on a quiet machine, 13 measured; twice that here, because tests share theirs."""
    given: dict[str, Any] = arguments(a_case())
    dispatch(**given)
    assert launcher_for(a_case(), CPU).ready
    assert median_us(lambda: dispatch(**given)) < 30.0


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda t: t[:1],
    "layout": lambda t: t.t().contiguous().t(),
    "dtype": lambda t: t.half(),
    "device": lambda t: t.to("meta"),
    "alignment": lambda t: torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view_as(t),
    "gradient": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("position", [0, 2])
def test_every_trait_of_every_tensor_counts_in_a_signature(
    change: Callable[[torch.Tensor], torch.Tensor], position: int
) -> None:
    plain = [torch.zeros(16, 16, dtype=torch.bfloat16) for _ in range(3)]
    changed: list[torch.Tensor | None] = [*plain]
    changed[position] = change(plain[position])
    assert signature(changed, grad=True) != signature(plain, grad=True)


def test_absent_tensors_count_in_a_signature() -> None:
    t = torch.zeros(16, dtype=torch.bfloat16)
    assert len({signature(given, grad=False) for given in ((t, None, t), (t, t, None), (t, t, t), (t, t))}) == 4


def test_a_gradient_counts_only_while_one_is_recorded() -> None:
    plain, wanted = torch.zeros(16), torch.zeros(16).requires_grad_()
    assert signature((wanted,), grad=False) == signature((plain,), grad=False)
