"""Is a candidate right? The quick check comes before every timing, the strict one before a record. Imports torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tilewright.db.rows import Status
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.inputs import InputOptions
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.kernel_templates.tolerance import compare
from tilewright.problem import WorkloadCase
from tilewright.search.case_state import Bound, CaseState, Checked
from tilewright.search.outcome import Candidate

# The first are the inputs of the public protocol. They hide a norm weight of one that is left out, an epsilon that a
# variance of one dwarfs, and what an earlier call left behind; the second show all three.
QUICK = (InputOptions(), InputOptions(101, random_norm_weights=True, faint=True))
STRICT = (
    InputOptions(0),
    InputOptions(1, random_norm_weights=True),
    InputOptions(2, outlier_channel=True),
    InputOptions(3, random_norm_weights=True, faint=True),
    InputOptions(4, random_norm_weights=True, outlier_channel=True),
)
REPEATS = 3
PRIME_LENGTH = 61
Phase = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """`error_ratio` is the candidate's error over the eager block's, the larger of the tensors it writes."""

    status: Status = Status.OK
    reason: str = ""
    error_ratio: float | None = None
    deterministic: bool = True


def quick_check(state: CaseState, candidate: Candidate, phase: Phase = lambda name: None) -> Finding:
    """Two runs in the same poisoned, guarded memory over different inputs; both must match the wide reference."""
    segment = state.segment(candidate)
    for options in QUICK:
        state.expected(options, segment.first, segment.last)
    held = Checked(state, candidate, QUICK[0])
    phase("launch")
    first = check(state, held, QUICK[0], scratch=True, launched=lambda: phase("run"))
    if first.status is not Status.OK:
        return first
    second = check(state, held, QUICK[1])
    if second.status is not Status.OK:
        return replace(second, reason=f"{second.reason} ({_traits(QUICK[1])}, second call)")
    return replace(second, error_ratio=max(first.error_ratio or 0.0, second.error_ratio or 0.0))


def check(
    state: CaseState,
    held: Checked,
    options: InputOptions,
    *,
    scratch: bool = False,
    launched: Callable[[], None] = lambda: None,
) -> Finding:
    """One run over these inputs. Scratch is poisoned only when asked: a served block finds what its last call left."""
    held.load(options)
    held.poison(scratch=scratch)
    held.run()
    launched()
    _synchronise(state)
    finding = _judge(state, held, options)
    if finding.status is not Status.OK:
        return finding
    for complaint, names in (("writes outside", held.overrun()), ("changes its input", held.changed())):
        if names:
            return Finding(Status.WRONG, f"{complaint} {', '.join(names)}", finding.error_ratio)
    return finding


def replay_check(state: CaseState, held: Bound, replay: Callable[[], None], options: InputOptions) -> Finding:
    """What will be timed gives the right outputs too: a capture may miss a launch that an ordinary call makes."""
    held.poison()
    replay()
    _synchronise(state)
    finding = _judge(state, held, options)
    if finding.status is Status.OK:
        return finding
    return replace(finding, reason=f"as it is timed: {finding.reason}")


def _judge(state: CaseState, held: Bound, options: InputOptions) -> Finding:
    worst = 0.0
    for name, wanted in state.expected(options, held.segment.first, held.segment.last).items():
        reason, ratio = compare(name, held.made[name], wanted)
        if reason:
            return Finding(Status.WRONG, reason, ratio)
        worst = max(worst, ratio)
    return Finding(error_ratio=worst)


def compare_outputs(state: CaseState, outputs: dict[str, torch.Tensor], options: InputOptions) -> str:
    """Why the block's outputs are wrong for these inputs; empty when they are right."""
    expected = state.expected(options, 0, len(state.case.problem.ops) - 1)
    for name, wanted in expected.items():
        reason, _ = compare(name, outputs[name], wanted)
        if reason:
            return reason
    return ""


def strict_check(family: Family, case: WorkloadCase, plan: FusionPlan, device: torch.device, limits: Limits) -> Finding:
    """Several seeds and kinds of inputs, neighbouring lengths, repeats that must agree."""
    state = CaseState(case, family, device)
    held = Checked(state, plan, STRICT[0])
    worst = 0.0
    for options in STRICT:
        finding = check(state, held, options, scratch=options is STRICT[0])
        if finding.status is not Status.OK:
            return replace(finding, reason=f"seed {options.seed}, {_traits(options)}: {finding.reason}")
        worst = max(worst, finding.error_ratio or 0.0)
        state.forget_inputs(options)
    same = _repeats_agree(state, plan)
    for neighbour in neighbours(case):
        if _rejected(family, plan, neighbour, limits):
            continue
        finding = quick_check(CaseState(neighbour, family, device), plan)
        if finding.status is not Status.OK:
            return replace(finding, reason=f"neighbour {neighbour.name}: {finding.reason}")
        worst = max(worst, finding.error_ratio or 0.0)
    return Finding(error_ratio=worst, deterministic=same)


def neighbours(case: WorkloadCase) -> list[WorkloadCase]:
    """The case at one more, one less and a prime along its last variable axis, the other axes halved."""
    axis = case.problem.variable_axes[-1]
    others = {name: max(1, value // 2) for name, value in case.shape_axes.items() if name != axis}
    lengths = {case[axis] - 1, case[axis] + 1, PRIME_LENGTH} - {0, case[axis]}
    return [case.problem.case(weight_mode=case.weight_mode, **{**others, axis: length}) for length in sorted(lengths)]


def _repeats_agree(state: CaseState, plan: FusionPlan) -> bool:
    """Bit for bit the same, every time."""
    held = Bound(state, plan, InputOptions())
    first: list[torch.Tensor] | None = None
    for _ in range(REPEATS):
        held.poison()
        held.run()
        _synchronise(state)
        found = [held.made[name].clone() for name in held.writes]
        if first is not None and not all(torch.equal(a, b) for a, b in zip(first, found, strict=True)):
            return False
        first = first or found
    return True


def _rejected(family: Family, plan: FusionPlan, case: WorkloadCase, limits: Limits) -> bool:
    """A plan that a neighbour's constraints exclude is never served there."""
    stages = ((family.registry[stage.template], stage.values) for stage in plan.stages)
    return any(template.rejection(values, case, limits) is not None for template, values in stages)


def _traits(options: InputOptions) -> str:
    traits = [
        "drawn norm weights" if options.random_norm_weights else "unit norm weights",
        *["outlier channel"] * options.outlier_channel,
        *["faint activations"] * options.faint,
    ]
    return ", ".join(traits)


def _synchronise(state: CaseState) -> None:
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
