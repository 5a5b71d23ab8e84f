"""What a person asks of a run, resolved against the problem and this machine; no torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.errors import UsageError
from tilewright.problem import DEFAULT_PROBLEM, Problem, WeightMode, WorkloadCase, load_problem

INTERPRET = "interpret"


@dataclass(frozen=True)
class Selection:
    """Problem, cases and device of a request."""

    problem: Problem
    suite: str
    cases: tuple[WorkloadCase, ...]
    device: str  # cuda:N | interpret


def resolve(
    problem_name: str = DEFAULT_PROBLEM,
    *,
    cases: Sequence[str] = (),
    suite: str | None = None,
    device: str = "auto",
    weights: WeightMode = "separate",
) -> Selection:
    """Raises UsageError for a device, suite or case that is not understood, before anything else happens."""
    problem = load_problem(problem_name)
    chosen = resolve_device(device)
    if suite is None:
        suite = "smoke" if chosen == INTERPRET else "full"
    if chosen == INTERPRET and suite == "full":
        sizes = ", ".join(f"{name}={value}" for name, value in problem.constants.items())
        raise UsageError(f"suite full at {sizes} would take the interpreter days; use --suite smoke, or a GPU")
    sized = problem.at_suite(suite)
    if cases:
        selected = tuple(sized.parse_case(text, weight_mode=weights) for text in cases)
    else:
        selected = problem.suite(suite, weight_mode=weights)
    return Selection(problem, suite, tuple(dict.fromkeys(selected)), chosen)


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
