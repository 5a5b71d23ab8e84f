"""What serving costs on the host: lookup, dispatch above its kernels, memory over many shapes, threads.

    python benchmarks/dispatch_cost.py [--device cuda|cpu] [--calls 20000] [--shapes 10000] [--growth-calls 1000000]
                                       [--out FILE]

On the CPU the kernels are stubs, so that only the Python above them is timed; on a GPU they are the plan's own, and
the same launches are made by hand over ready tensors, call by call in turns. Exit code 1 when a target is missed.
"""

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if "cuda" not in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is decorated

import psutil
import torch
import triton

from tilewright.kernel_templates.base import run_kernel
from tilewright.kernel_templates.inputs import make_inputs
from tilewright.problem import Problem, load_problem
from tilewright.runtime import dispatch, lookup
from tilewright.runtime.engine import Launcher, launcher_for
from tilewright.runtime.machine import machine_of

TARGETS_US = {"lookup_median": 2.0, "lookup_p99": 10.0, "dispatch_above_kernels_median": 15.0}
MOST_GROWTH_MIB = 16.0
SYNC_EVERY = 8  # calls in flight: the host must never wait for a full queue


def quantiles_us(times_ns: Sequence[int]) -> dict[str, float]:
    ordered = sorted(times_ns)
    return {"median_us": ordered[len(ordered) // 2] / 1e3, "p99_us": ordered[int(len(ordered) * 0.99)] / 1e3}


def timed_in_turns(actions: dict[str, Callable[[], object]], calls: int, settle: Callable[[], None]) -> dict[str, Any]:
    """Host time of each action, one call of each after the other; the clock's own cost is left in."""
    times: dict[str, list[int]] = {name: [] for name in actions}
    gc.collect()
    gc.disable()
    try:
        for number in range(calls):
            for name, action in actions.items():
                begun = time.perf_counter_ns()
                action()
                times[name].append(time.perf_counter_ns() - begun)
            if number % SYNC_EVERY == 0:
                settle()
    finally:
        gc.enable()
    return {name: quantiles_us(values) for name, values in times.items()}


def do_nothing(*_: object) -> None:
    pass


def stub(launcher: Launcher) -> None:
    """Kernels that do nothing, as many as the plan has."""
    launcher._steps = [(do_nothing, values) for _, values in launcher._steps]
    launcher.ready = True


def by_hand(launcher: Launcher, tensors: dict[str, Any]) -> Callable[[], None]:
    """The plan's launches over ready tensors and intermediates."""
    everything = dict(tensors)
    for name, sizes, dtype in launcher._workspace:
        everything[name] = tensors["output"].new_empty(*sizes, dtype=dtype)
    steps, case = launcher._steps, launcher.case

    def run() -> None:
        for launch, values in steps:
            launch(everything, values, case, run_kernel)

    return run


def dispatch_cost(problem: Problem, device: torch.device, calls: int) -> dict[str, Any]:
    case = problem.case(batch_size=1, seq_len=128)
    inputs = make_inputs(case, device)
    given: dict[str, Any] = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    launcher = launcher_for(case, device)
    if device.type == "cpu":
        stub(launcher)
    output = dispatch(**given)
    settle = torch.cuda.synchronize if device.type == "cuda" else do_nothing
    hand = by_hand(launcher, {**inputs, "output": output})
    actions: dict[str, Callable[[], object]] = {"dispatch": lambda: dispatch(**given), "by_hand": hand}
    timed_in_turns(actions, calls // 10, settle)
    found = timed_in_turns(actions, calls, settle)
    with torch.inference_mode():
        found["dispatch_in_inference_mode"] = timed_in_turns({"it": actions["dispatch"]}, calls, settle)["it"]
    found["above_kernels_median_us"] = found["dispatch"]["median_us"] - found["by_hand"]["median_us"]
    found["case"], found["plan"], found["grade"] = case.name, launcher.plan.label, launcher.found.grade.value
    return found


def lookup_cost(problem: Problem, device: torch.device, calls: int) -> dict[str, Any]:
    case, machine = problem.case(batch_size=1, seq_len=128), machine_of(device)
    actions: dict[str, Callable[[], object]] = {
        "of_a_machine": lambda: lookup(case, machine),
        "of_the_current_device": lambda: lookup(case, None if device.type == "cuda" else "interpret"),
        "nothing": do_nothing,
    }
    timed_in_turns(actions, calls // 10, do_nothing)
    return timed_in_turns(actions, calls, do_nothing)


def growth(problem: Problem, device: torch.device, shapes: int, calls: int) -> dict[str, Any]:
    """Memory of the process from the first time that every shape was seen to the end of the calls; kernels stubbed."""
    cases = [problem.case(batch_size=1, seq_len=seq_len) for seq_len in range(1, shapes + 1)]
    inputs: dict[str, Any] = {n: t for n, t in make_inputs(cases[-1], device).items() if isinstance(t, torch.Tensor)}
    long = {name: inputs.pop(name) for name in ("hidden_states", "cos", "sin")}
    out = torch.empty_like(long["hidden_states"])

    def call(number: int) -> None:
        length = number % shapes + 1
        rows = {name: tensor[:, :length] for name, tensor in long.items()}
        dispatch(**inputs, **rows, output=out[:, :length])

    for case in cases:
        stub(launcher_for(case, long["hidden_states"].device))
    for number in range(shapes):
        call(number)
    before, begun = resident_mib(), time.perf_counter()
    for number in range(calls):
        call(number)
    after, seconds = resident_mib(), time.perf_counter() - begun
    return {"shapes": shapes, "calls": calls, "seconds": seconds, "before_mib": before, "grown_mib": after - before}


def resident_mib() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


def threads_cost(problem: Problem, device: torch.device, calls: int, count: int = 8) -> dict[str, Any]:
    """Lookups from several threads at once: the interpreter lock is shared, answers must be one object."""
    case, machine = problem.case(batch_size=1, seq_len=128), machine_of(device)
    answers: set[int] = set()
    times: list[int] = []

    def work() -> None:
        own = []
        for _ in range(calls // count):
            begun = time.perf_counter_ns()
            found = lookup(case, machine)
            own.append(time.perf_counter_ns() - begun)
            answers.add(id(found))
        times.extend(own)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"threads": count, "answers": len(answers), **quantiles_us(times)}


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Each target, met or not."""
    one = found["lookup"]["of_a_machine"]
    return {
        "lookup_median": one["median_us"] <= TARGETS_US["lookup_median"],
        "lookup_p99": one["p99_us"] <= TARGETS_US["lookup_p99"],
        "dispatch_above_kernels_median": found["dispatch"]["above_kernels_median_us"]
        <= TARGETS_US["dispatch_above_kernels_median"],
        "growth": found["growth"]["grown_mib"] <= MOST_GROWTH_MIB,
        "threads": found["threads"]["answers"] == 1,
    }


def shown(content: Any) -> Any:
    """Numbers as a person reads them."""
    if isinstance(content, dict):
        return {name: shown(value) for name, value in content.items()}
    return round(content, 3) if isinstance(content, float) else content


def suite(device: torch.device) -> Problem:
    """Published sizes on a GPU; small ones on the CPU, where no kernel runs and weights only cost memory."""
    return load_problem().at_suite("full" if device.type == "cuda" else "smoke")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--shapes", type=int, default=10_000)
    parser.add_argument("--growth-calls", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    problem = suite(device)
    environment = machine_of(device).environment
    found: dict[str, Any] = {
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": environment.gpu_name,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]},
        "lookup": lookup_cost(problem, device, options.calls),
        "dispatch": dispatch_cost(problem, device, options.calls),
        "threads": threads_cost(problem, device, options.calls),
        "growth": growth(load_problem().at_suite("smoke"), device, options.shapes, options.growth_calls),
    }
    found["targets"] = verdicts(found)
    text = json.dumps(shown(found), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(found["targets"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
