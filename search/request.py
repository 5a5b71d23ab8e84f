"""What a person asks of a run, resolved against the problem and this machine; no torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.errors import UsageError
from tilewright.problem import DEFAULT_PROBLEM, Problem, WeightMode, WorkloadCase, load_problem
from tilewright.wanted import read_wanted

if TYPE_CHECKING:
    from tilewright.kernel_templates.base import Limits

INTERPRET = "interpret"
REPLAY = "replay:"


@dataclass(frozen=True)
class Selection:
    """Problem, cases and device of a request."""

    problem: Problem
    suite: str
    cases: tuple[WorkloadCase, ...]
    device: str  # cuda:N | interpret | replay:FILE
    notes: tuple[str, ...] = ()


def resolve(
    problem_name: str = DEFAULT_PROBLEM,
    *,
    cases: Sequence[str] = (),
    suite: str | None = None,
    device: str = "auto",
    weights: WeightMode = "separate",
    sizes_only: bool = False,
) -> Selection:
    """Raises UsageError for a device, suite or case that is not understood, before anything else happens.

    With `sizes_only` nothing will run, so that the interpreter may be asked about published sizes.
    """
    problem = load_problem(problem_name)
    chosen = resolve_device(device)
    if suite is None:
        suite = "smoke" if chosen == INTERPRET else "full"
    if chosen == INTERPRET and suite == "full" and not sizes_only:
        raise UsageError(
            f"suite full at {_sizes(problem)} would take the interpreter days; use --suite smoke, or a GPU"
        )
    sized = problem.at_suite(suite)
    if cases:
        selected = tuple(sized.parse_case(text, weight_mode=weights) for text in cases)
    else:
        selected = problem.suite(suite, weight_mode=weights)
    return Selection(problem, suite, tuple(dict.fromkeys(selected)), chosen)


def resolve_recorded(device: str, *, cases: Sequence[str] = ()) -> Selection:
    """The cases of a recording, or those of them that are named; UsageError for one that it does not hold."""
    from tilewright.search.recording import read_recording

    recording = read_recording(Path(device.removeprefix(REPLAY)))
    held = {one.case.key: one.case for one in recording.cases}
    weights = {case.weight_mode for case in held.values()}
    selected = []
    for text in cases:
        asked = [recording.problem.parse_case(text, weight_mode=mode) for mode in weights]
        found = [held[case.key] for case in asked if case.key in held]
        if not found:
            names = ", ".join(case.name for case in held.values())
            raise UsageError(f"case {text} is not in the recording, which holds {names}")
        selected += found
    return Selection(recording.problem, "recorded", tuple(dict.fromkeys(selected or held.values())), device)


def resolve_wanted(path: str, problem_name: str, *, device: str) -> Selection:
    """The shapes of a file that TILEWRIGHT_TRACE made, most used first; UsageError where none can be tuned here."""
    problem, chosen = load_problem(problem_name), resolve_device(device)
    wanted = read_wanted(path, problem)
    notes = tuple(f"wanted shape {shape} is of no problem known here and is left out" for shape in wanted.skipped)
    if not wanted.cases:
        raise UsageError(f"wanted {path} holds no shape of {problem.name} or another problem known here")
    published = [case for case in wanted.cases if case.problem.constants == problem.constants]
    if chosen == INTERPRET and published:
        where = f"{published[0].name} at {_sizes(problem)}"
        raise UsageError(f"wanted {path} holds {where}, which would take the interpreter days; use a GPU")
    return Selection(problem, "wanted", wanted.cases, chosen, notes)


def _sizes(problem: Problem) -> str:
    return ", ".join(f"{name}={value}" for name, value in problem.constants.items())


def resolve_device(text: str) -> str:
    """`auto` is the first GPU where there is one, else the interpreter; says so without creating a CUDA context."""
    if text == "auto":
        return "cuda:0" if gpu_count() > 0 else INTERPRET
    if text == INTERPRET:
        return INTERPRET
    kind, _, index = text.partition(":")
    if kind == "cuda" and (index.isdigit() or (index == "" and text == "cuda")):
        return f"cuda:{index or 0}"
    raise UsageError(f"device must be auto, cuda, cuda:N or interpret, got {text!r}")


def sharded(cases: tuple[WorkloadCase, ...], shard: str) -> tuple[WorkloadCase, ...]:
    """Part i of n, as in `2/4`, for hosts that share nothing: the cases by falling work, dealt out back and forth."""
    first, _, second = shard.partition("/")
    if not (first.isdigit() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise UsageError(f"shard must be i/n with 1 <= i <= n, got {shard!r}")
    index, count = int(first) - 1, int(second)
    if count > len(cases):
        raise UsageError(f"shard must be of at most {len(cases)} parts, one a case, got {shard!r}")
    ordered = sorted(cases, key=lambda case: (-case.flops, case.name))
    turns = [*range(count), *reversed(range(count))]
    mine = {case.key for position, case in enumerate(ordered) if turns[position % len(turns)] == index}
    return tuple(case for case in cases if case.key in mine)


def gpu_count() -> int:
    """GPUs that the driver lists; 0 where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def gpu_name(index: int) -> str:
    """The model of a GPU as CUDA numbers and names it, without a CUDA context of ours staying behind."""
    import pynvml

    from tilewright.db.environment import normalised_gpu_name

    pynvml.nvmlInit()
    try:
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
        return normalised_gpu_name(name.decode() if isinstance(name, bytes) else name)
    finally:
        pynvml.nvmlShutdown()


def limits_of(device: str, capability: int | None, sm_count: int) -> "Limits":
    """Of a card that is not here, where a capability is named; else of the device."""
    from tilewright.kernel_templates.device import SHARED_MEMORY_BYTES, named_limits
    from tilewright.search.session import DeviceSession

    if capability is not None:
        if capability not in SHARED_MEMORY_BYTES:
            known = ", ".join(map(str, SHARED_MEMORY_BYTES))
            raise UsageError(f"capability must be one of {known}, got {capability}")
        return named_limits(capability, sm_count)
    with DeviceSession(device) as session:
        return session.describe().limits
