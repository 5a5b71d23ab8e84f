"""Entering a final: a plan or a baseline becomes something that can be timed over each input set. Imports torch."""

from collections.abc import Callable, Sequence

import torch

from tilewright.db.rows import Status
from tilewright.errors import TilewrightError, UsageError
from tilewright.kernel_templates.base import Tensors, allocate
from tilewright.kernel_templates.inputs import InputOptions
from tilewright.search.case_state import CaseState
from tilewright.search.measure import Prepared, Runnable, Timer, prepare
from tilewright.search.outcome import FinalEntry
from tilewright.search.verify import Finding, compare_outputs, quick_check, replay_check


class Refused(TilewrightError):
    """A contestant whose output is wrong: nothing is timed that was not verified."""


class BoundBaseline:
    """A baseline over one input set, with outputs of its own."""

    def __init__(self, state: CaseState, function: Callable[[Tensors], None], options: InputOptions) -> None:
        self.outputs = allocate(state.case, [spec.name for spec in state.case.problem.outputs], state.device)
        self._function = function
        self._tensors: Tensors = {**state.inputs(options), **self.outputs}

    def restore(self) -> None:
        pass

    def run(self) -> None:
        self._function(self._tensors)


def enter(state: CaseState, entry: FinalEntry, timer: Timer, sets: int) -> Sequence[Prepared]:
    """Verified, prepared on every input set. Raises Refused with the reason when it is wrong."""
    if entry.plan is None:
        return [(runnable, timer.prepare(runnable)) for runnable in _baseline(state, entry.name, sets)]
    _refuse_if_wrong(quick_check(state, entry.plan))
    ready = prepare(state, entry.plan, sets, timer)
    held, replay = ready[0]
    _refuse_if_wrong(replay_check(state, held, replay, InputOptions()))
    return ready


def _refuse_if_wrong(finding: Finding) -> None:
    if finding.status is not Status.OK:
        raise Refused(finding.reason)


def _baseline(state: CaseState, name: str, sets: int) -> list[Runnable]:
    if name not in state.family.baselines:
        raise UsageError(f"no baseline {name!r}; there are {', '.join(state.family.baselines) or 'none'}")
    function = state.family.baselines[name](state.case)
    bound = [BoundBaseline(state, function, InputOptions(seed)) for seed in range(sets)]
    for tensor in bound[0].outputs.values():
        tensor.fill_(float("nan"))
    bound[0].run()
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
    reason = compare_outputs(state, bound[0].outputs, InputOptions())
    if reason:
        raise Refused(reason)
    return list(bound)
