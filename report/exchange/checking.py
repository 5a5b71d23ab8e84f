"""`--check`: a solution runs alone, in a fresh process, against the definition's reference."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import UsageError
from tilewright.kernel_templates.device import INTERPRETER_LIMITS
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import Problem, TensorSpec, WorkloadCase
from tilewright.report.exchange import runner
from tilewright.report.exchange.kernel_file import TunedPlan
from tilewright.report.exchange.schema import Solution

INTERPRETED_LENGTH = 35  # along the last axis, one along the others: ragged, and soon interpreted
MOST_ERROR_RATIO, SMALLEST_ERROR = 2.0, 1e-6  # as every candidate is judged
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Checked:
    """What one case came to; `launches` are the kernels that it started."""

    name: str
    ok: bool
    reason: str = ""
    error_ratio: float | None = None
    launches: tuple[str, ...] = ()
    skipped: bool = False

    @property
    def line(self) -> str:
        if self.ok:
            return f"ok    {self.name:<12} error {self.error_ratio or 0:.2f} of the reference's own"
        return f"{'skip' if self.skipped else 'FAIL':<5} {self.name:<12} {self.reason}"


def check(
    solution: Solution,
    problem: Problem,
    tuned: Sequence[TunedPlan],
    *,
    device: str,
    says: Callable[[str], None] = lambda line: None,
) -> list[Checked]:
    """On a GPU every tuned shape and one that was not tuned; interpreted every distinct plan at a short one.

    `device` is cuda or interpret. Raises UsageError where the process cannot begin.
    """
    found: list[Checked] = []
    entries: list[dict[str, Any]] = []
    for entry in _gpu_cases(problem, tuned) if device == "cuda" else _interpreted_cases(problem, tuned):
        if isinstance(entry, Checked):
            found.append(entry)
            says(entry.line)
        else:
            entries.append(entry)
    for answer in _answers(solution, problem, entries, device):
        found.append(answer)
        says(answer.line)
    return found


def _gpu_cases(problem: Problem, tuned: Sequence[TunedPlan]) -> Iterator[dict[str, Any]]:
    cases = [problem.case(weight_mode="separate", **one.axes) for one in tuned]
    for case in (*cases, _short(problem)):
        yield _case(case)


def _short(problem: Problem) -> WorkloadCase:
    *others, last = problem.variable_axes
    return problem.case(weight_mode="separate", **{**dict.fromkeys(others, 1), last: INTERPRETED_LENGTH})


def _interpreted_cases(problem: Problem, tuned: Sequence[TunedPlan]) -> Iterator[dict[str, Any] | Checked]:
    """The default plan, then each plan as it can be interpreted, at constants that keep the interpreter short."""
    case = _short(problem.with_constants(**problem.tuned_plan_constants))
    constants = dict(case.problem.constants)
    yield {**_case(case), "name": "default", "constants": constants}
    seen: set[str] = set()
    for one in tuned:
        name = problem.case(weight_mode="separate", **one.axes).name
        plan, reason = _interpretable(one.plan, case)
        if plan is None:
            yield Checked(name, ok=False, reason=reason, skipped=True)
        elif plan.digest not in seen:
            seen.add(plan.digest)
            stages = [(stage.template, dict(stage.values)) for stage in plan.stages]
            yield {
                **_case(case),
                "name": name,
                "plan": stages,
                "axes": list(case.shape_axes.values()),
                "constants": constants,
            }


def _interpretable(plan: FusionPlan, case: WorkloadCase) -> tuple[FusionPlan | None, str]:
    """Values that the interpreter lacks give way to what it has; a kernel that it cannot run is told."""
    registry = load_family(case.problem.family).registry
    stages = []
    for stage in plan.stages:
        template = registry[stage.template]
        reason = template.rejection(template.default(case, INTERPRETER_LIMITS), case, INTERPRETER_LIMITS)
        if reason is not None:  # what even its default cannot do there, no config can
            return None, f"{template.name} needs a GPU ({reason})"
        accepted = {choice.name: choice.values for choice in template.choices(case, INTERPRETER_LIMITS)}
        values = {n: v if v in accepted.get(n, (v,)) else accepted[n][0] for n, v in stage.values.items()}
        stages.append(Stage(stage.template, values))
    return FusionPlan(tuple(stages)), ""


def _case(case: WorkloadCase) -> dict[str, Any]:
    problem = case.problem
    return {
        "name": case.name,
        "inputs": [_tensor(case, spec, seed) for seed, spec in enumerate(problem.inputs)],
        "outputs": [_tensor(case, spec, 0) for spec in problem.outputs],
    }


def _tensor(case: WorkloadCase, spec: TensorSpec, seed: int) -> dict[str, Any]:
    shape = case.shape(spec.name)
    draw = "norm" if spec.name.endswith("norm_weight") else "weight" if spec.name.endswith("weight") else "normal"
    if case.problem.draws.get(spec.name) == "clamped_normal":
        draw = "clamped"
    value = case.problem.scalars.get(spec.name)
    return {"name": spec.name, "shape": shape, "dtype": spec.dtype, "draw": draw, "seed": seed, "value": value}


def _answers(
    solution: Solution, problem: Problem, cases: Sequence[Mapping[str, Any]], device: str
) -> Iterator[Checked]:
    job = {
        "file": solution.entry_file,
        "function": solution.entry_function,
        "dps": solution.spec.destination_passing_style,
        "reference": problem.reference,
        "device": "cuda" if device == "cuda" else "cpu",
        "most_ratio": MOST_ERROR_RATIO,
        "smallest_error": SMALLEST_ERROR,
        "cases": list(cases),
    }
    with tempfile.TemporaryDirectory(prefix="tilewright-solution-") as folder:
        write_sources(solution, Path(folder))
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        yield from _run(Path(folder), interpret=device != "cuda", expected=len(cases))


def write_sources(solution: Solution, folder: Path) -> None:
    """Every source under the folder; the schema has refused paths that leave it, and links are not followed."""
    root = folder.resolve()
    for source in solution.sources:
        path = (root / source.path).resolve()
        if not path.is_relative_to(root):
            raise UsageError(f"source path {source.path!r} leaves the solution's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.content, encoding="utf-8")


def _run(folder: Path, *, interpret: bool, expected: int) -> Iterator[Checked]:
    """`-I`: neither our folder nor the user's is on the path of the process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-I", runner.__file__, "job.json"]
    pipe = subprocess.PIPE
    answered = 0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        watch = threading.Timer(TIMEOUT_S, process.kill)
        watch.start()
        try:
            for line in process.stdout:
                answered += 1
                content = json.loads(line)
                yield Checked(**{**content, "launches": tuple(content.get("launches", ()))})
            process.wait()
        finally:
            watch.cancel()
            process.kill()
        if answered < expected:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            yield Checked("process", ok=False, reason=f"ended after {answered} of {expected} cases: {last[0]}")
