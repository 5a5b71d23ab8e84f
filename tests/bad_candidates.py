"""Candidates that misbehave, added to the attention family through the workers' hook `bad_candidates:install`."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.kernel_templates.base import Limits, Template
from tilewright.kernel_templates.families import load_family
from tilewright.problem import WorkloadCase

HOOKS = ("bad_candidates:install",)
Effect = Callable[[dict[str, Any]], None]


def right(tensors: dict[str, Any]) -> None:
    tensors["output"].copy_(F.linear(tensors["context"], tensors["o_proj_weight"]))


def endless(tensors: dict[str, Any]) -> None:
    while True:
        time.sleep(0.05)


def aborts(tensors: dict[str, Any]) -> None:
    os.abort()


def segfaults(tensors: dict[str, Any]) -> None:
    ctypes.string_at(0)


def exits(tensors: dict[str, Any]) -> None:
    sys.exit(3)


def is_killed(tensors: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def runs_out_of_memory(tensors: dict[str, Any]) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 1 TiB")


def faults(tensors: dict[str, Any]) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raises(tensors: dict[str, Any]) -> None:
    raise ZeroDivisionError("a mistake of the candidate's own")


def changes_its_input(tensors: dict[str, Any]) -> None:
    right(tensors)
    tensors["o_proj_weight"].view(-1)[5] += 1


def writes_beside_its_output(tensors: dict[str, Any]) -> None:
    right(tensors)
    output = tensors["output"]
    torch.as_strided(output, (1,), (1,), output.storage_offset() + output.numel()).fill_(3.0)


def talks(tensors: dict[str, Any]) -> None:
    """Through Python's stdout and past it, as a compiler does."""
    right(tensors)
    print("talk of python", flush=True)
    os.write(1, b"talk of C\n")


def waits_for_a_process(tensors: dict[str, Any]) -> None:
    """As a compiler waits for ptxas; the file that the environment variable names tells both process numbers."""
    started = subprocess.Popen(["sleep", "300"])
    Path(os.environ["BUSY_PIDS"]).write_text(f"{os.getpid()} {started.pid}\n")
    started.wait()


def writes_nothing(tensors: dict[str, Any]) -> None:
    pass


EFFECTS: dict[str, Effect] = {
    effect.__name__: effect
    for effect in (
        right, endless, aborts, segfaults, exits, is_killed, runs_out_of_memory, faults, raises, changes_its_input,
        writes_beside_its_output, writes_nothing, talks, waits_for_a_process,
    )
}  # fmt: skip


def template(name: str, effect: Any, *covers: str, scratch: Any = None, takes_case: bool = False) -> Template:
    """A library template without parameters whose launch is `effect`, given the case as well if it takes one."""

    def launch(tensors: Any, values: Any, case: WorkloadCase, run: Any) -> None:
        effect(dict(tensors), case) if takes_case else effect(dict(tensors))

    return Template(
        name=name,
        kind="library",
        covers=covers or ("output_projection",),
        choices=lambda case, limits: (),
        constraints=(),
        default=lambda case, limits: {},
        launch=launch,
        scratch=scratch or (lambda values, case: {}),
        module=__name__,
    )


def install() -> None:
    registry = load_family("gqa_attention").registry
    for name, effect in EFFECTS.items():
        if name not in registry:
            registry.add(template(name, effect))


class BadTimer:
    """Gives `value` for a time."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def prepare(self, runnable: Any) -> Any:
        return runnable.run

    def sample(self, batch: Any) -> list[Any]:
        return [self._value for _ in batch]


def install_bad_timer() -> None:
    """The timer gives what the environment variable says: nan, none, zero, negative or infinite."""
    from tilewright.search import measure

    values = {"nan": float("nan"), "none": None, "zero": 0.0, "negative": -1.0, "infinite": float("inf")}
    value = values[os.environ["FAULTY_TIME"]]
    measure.make_timer = lambda device, options: BadTimer(value)


def install_bad_compiler() -> None:
    """In a compiling process: what a stage's compile does is named by its template."""
    from tilewright.kernel_templates import compile as compiling

    def compile_stage(template: Template, values: Any, case: WorkloadCase, limits: Limits) -> list[Any]:
        EFFECTS.get(template.name, right if template.name == "right" else writes_nothing)({})
        return []

    install()
    compiling.compile_stage = compile_stage
