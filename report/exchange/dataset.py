"""Definition, workload and trace files, in the dialect of FlashInfer-Bench or of SOL-ExecBench."""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.db.rows import StoredRecord
from tilewright.errors import UsageError
from tilewright.problem import PROBLEMS_DIR, Problem
from tilewright.report.exchange.schema import Dialect
from tilewright.report.text import clean

UNKNOWN = "NaN"  # largest single errors are not kept; both formats write what is no number as a string
NAMESPACE = uuid.UUID("6f0d1c1e-3b1c-5a52-9d3b-0c8f6f6f7477")  # of workloads that no published file names


def definition_file(problem: Problem, document: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """FlashInfer-Bench knows no computed axes and wants an op type; SOL-ExecBench takes our definition as it is."""
    if dialect == "sol":
        return dict(document)
    axes = {name: dict(axis) for name, axis in document["axes"].items()}
    for name in problem.derived:
        axes[name] = {"type": "const", "value": _constant(problem, name)}
    tensors = {}
    for kind in ("inputs", "outputs"):
        tensors[kind] = {
            name: {**entry, "shape": None if entry["shape"] is None else [str(dim) for dim in entry["shape"]]}
            for name, entry in document[kind].items()
        }
    return {
        "name": document["name"],
        "op_type": document.get("op_type") or problem.family,
        "description": document.get("description"),
        "axes": axes,
        **tensors,
        "reference": document["reference"],
        "tags": [],
        "constraints": [],
    }


def _constant(problem: Problem, axis: str) -> int:
    """A computed axis that no variable axis enters."""
    one, two = (
        problem.case(weight_mode="separate", **dict.fromkeys(problem.variable_axes, size))[axis] for size in (1, 2)
    )
    if one != two:
        raise UsageError(f"axis {axis} of {problem.name} varies with the shape, which FlashInfer-Bench cannot say")
    return one


def workloads(problem: Problem) -> list[dict[str, Any]]:
    """The published workloads of the problem; empty for one that has none."""
    path = PROBLEMS_DIR / problem.name / "workload.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.strip()]


def workload_of(problem: Problem, axes: Mapping[str, int], published: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The published workload at these axes, or one with an identity of its own that never changes."""
    for one in published:
        if dict(one["axes"]) == dict(axes):
            return dict(one)
    inputs = {
        spec.name: {"type": "random"}
        if spec.shape is not None
        else {"type": "scalar", "value": problem.scalars[spec.name]}
        for spec in problem.inputs
    }
    name = f"{problem.name} {json.dumps(dict(axes), sort_keys=True)}"
    return {"axes": dict(axes), "inputs": inputs, "uuid": str(uuid.uuid5(NAMESPACE, name))}


def workload_lines(definition: str, every: Iterable[Mapping[str, Any]], dialect: Dialect) -> list[dict[str, Any]]:
    """FlashInfer-Bench wraps each workload in a trace without a solution."""
    if dialect == "sol":
        return [dict(one) for one in every]
    return [{"definition": definition, "workload": dict(one), "solution": None, "evaluation": None} for one in every]


def trace_lines(
    problem: Problem, definition: str, solution: str, records: Iterable[StoredRecord]
) -> list[dict[str, Any]]:
    """One trace for each record whose time is a measurement; the reference is the best baseline of its final.

    Neither format has a field for an interval or for what the error was judged by, so these ride in `extra`.
    """
    published = workloads(problem)
    lines = []
    for stored in records:
        record, env = stored.record, stored.environment
        if env.kind != "cuda" or record.median_us is None or stored.invalid:
            continue
        baseline_us = record.baseline_us or record.default_us or record.median_us
        extra = {
            "low_us": record.low_us,
            "high_us": record.high_us,
            "baseline": record.baseline or "default plan",
            "checked": "strict check against a float32 reference: no error above twice the eager block's",
        }
        evaluation = {
            "status": "PASSED",
            "environment": {
                "hardware": clean(env.gpu_name).replace(" ", "_"),
                "libs": {"torch": env.torch, "triton": env.triton, "cuda": env.cuda},
            },
            "timestamp": record.created_at.isoformat() if record.created_at else "unknown",
            "log": "",
            "correctness": {"max_relative_error": UNKNOWN, "max_absolute_error": UNKNOWN, "extra": extra},
            "performance": {
                "latency_ms": record.median_us / 1e3,
                "reference_latency_ms": baseline_us / 1e3,
                "speedup_factor": baseline_us / record.median_us,
            },
        }
        workload = workload_of(problem, stored.axes, published)
        lines.append({"definition": definition, "workload": workload, "solution": solution, "evaluation": evaluation})
    return lines
