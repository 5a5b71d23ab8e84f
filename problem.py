"""Problems read from the data files under problems/, or from a folder of the user's.

`definition.json` and `workload.jsonl` follow SOL-ExecBench's schema. `tuning.json` beside them holds what
that schema has no room for: the chain of ops with their reads, writes and FLOPs, the intermediate tensors,
the letters that abbreviate an axis (`b4s512`), and small constants for the smoke suite.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.definition import (
    DTYPE_BYTES,
    SUITES,
    Ceilings,
    Op,
    Problem,
    TensorSpec,
    WeightMode,
    WorkloadCase,
)
from tilewright.errors import ProblemError

__all__ = [
    "DEFAULT_PROBLEM", "DTYPE_BYTES", "PROBLEMS_DIR", "SUITES", "Ceilings", "Op", "Problem", "TensorSpec",
    "WeightMode", "WorkloadCase", "case_of_key", "load_problem", "problem_names", "problems_like",
]  # fmt: skip

PROBLEMS_DIR = Path(__file__).resolve().parent / "problems"
DEFAULT_PROBLEM = "gqa_attention_with_qk_norm"


def problem_names() -> tuple[str, ...]:
    """The problems shipped with the package."""
    return tuple(sorted(path.parent.name for path in PROBLEMS_DIR.glob("*/definition.json")))


def load_problem(name_or_path: str = DEFAULT_PROBLEM) -> Problem:
    """A shipped problem by name, or one from a folder that holds definition.json and tuning.json."""
    folder = Path(name_or_path) if Path(name_or_path).is_dir() else PROBLEMS_DIR / name_or_path
    if not (folder / "definition.json").is_file():
        raise ProblemError(f"problem {name_or_path!r} is not known; shipped: {', '.join(problem_names())}")
    definition = _read_json(folder / "definition.json")
    tuning = _read_json(folder / "tuning.json")
    try:
        return _build(definition, tuning, folder)
    except KeyError as error:
        raise ProblemError(f"{folder.name}: field {error.args[0]!r} is missing") from error


def problems_like(problem: Problem) -> tuple[Problem, ...]:
    """This problem, then the shipped ones of its family."""
    shipped = (load_problem(name) for name in problem_names() if name != problem.name)
    return (problem, *(other for other in shipped if other.family == problem.family))


def case_of_key(key: str, problems: Iterable[Problem]) -> WorkloadCase | None:
    """The case that a key names, from the first of these problems that gives it at some constants and dtype."""
    parts = key.split("|")
    if len(parts) != len(("family", "chain", "dtype", "constants", "inputs", "weights", "axes")):
        return None
    dtype, constants, weights, axes = parts[2], parts[3], parts[5], parts[6]
    for problem in problems:
        try:
            sized = problem.with_constants(**_numbers(constants)).with_dtype(dtype)
            case = sized.case(weight_mode="packed" if weights == "packed" else "separate", **_numbers(axes))
        except ValueError:  # a ProblemError is one
            continue
        if case.key == key:
            return case
    return None


def _numbers(text: str) -> dict[str, int]:
    pairs = (part.partition("=") for part in text.split(","))
    return {name: int(value) for name, _, value in pairs}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProblemError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ProblemError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _build(definition: Mapping[str, Any], tuning: Mapping[str, Any], folder: Path) -> Problem:
    axes = definition["axes"]
    problem = Problem(
        name=definition["name"],
        family=tuning["family"],
        description=definition.get("description", ""),
        variable_axes=tuple(name for name, axis in axes.items() if axis["type"] == "var"),
        constants={name: axis["value"] for name, axis in axes.items() if axis["type"] == "const"},
        derived={name: axis["expression"] for name, axis in axes.items() if axis["type"] == "expr"},
        inputs=tuple(_specs(definition["inputs"])),
        outputs=tuple(_specs(definition["outputs"])),
        intermediates=tuple(_specs(tuning["intermediates"])),
        ops=tuple(Op(o["name"], tuple(o["reads"]), tuple(o["writes"]), o["flops"]) for o in tuning["ops"]),
        packings={name: tuple(parts) for name, parts in tuning.get("packings", {}).items()},
        abbreviations=tuning["abbreviations"],
        scalars=tuning.get("scalars", {}),
        draws=tuning.get("draws", {}),
        reference=definition["reference"],
        suites={"full": tuple(_workload(folder / "workload.jsonl")), "smoke": tuple(tuning["smoke"]["cases"])},
        smoke_constants=tuning["smoke"]["constants"],
        tuned_plan_constants=tuning["smoke"].get("tuned_plans", tuning["smoke"]["constants"]),
    )
    _validate(problem)
    return problem


def _specs(entries: Mapping[str, Any]) -> Iterator[TensorSpec]:
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPE_BYTES:
            raise ProblemError(f"tensor {name}: dtype {entry['dtype']!r} is not one of {', '.join(DTYPE_BYTES)}")
        shape = entry["shape"]
        yield TensorSpec(name, None if shape is None else tuple(str(dim) for dim in shape), entry["dtype"])


def _workload(path: Path) -> Iterator[Mapping[str, int]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield json.loads(line)["axes"]


def _validate(problem: Problem) -> None:
    """Every name that the chain, the shapes and the suites use must exist."""
    tensors = problem.tensors
    for op in problem.ops:
        for tensor in (*op.reads, *op.writes):
            if tensor not in tensors:
                raise ProblemError(f"{problem.name}: op {op.name} uses unknown tensor {tensor!r}")
    for suite in problem.suites:
        for case in problem.suite(suite):
            for tensor in tensors:
                case.shape(tensor)
            for op in problem.ops:
                case.op_flops(op)
