"""Tuned records as a solution file of SOL-ExecBench or FlashInfer-Bench."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.db.rows import StoredRecord
from tilewright.errors import NothingFound, UsageError
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, SHARED_MEMORY_BYTES, named_limits
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import PROBLEMS_DIR, Problem
from tilewright.report.exchange.kernel_file import TunedPlan, kernel_file
from tilewright.report.exchange.schema import Dialect, check_solution, complaints
from tilewright.report.text import clean

ENTRY = "kernel.py"
BOARD_HARDWARE = {"NVIDIA B200": "B200"}  # SOL-ExecBench knows this card by name; every other is LOCAL


@dataclass(frozen=True)
class Exported:
    """A solution and what was left out of it, with the reasons."""

    content: dict[str, Any]
    tuned: tuple[TunedPlan, ...]
    left_out: tuple[str, ...]

    @property
    def source(self) -> str:
        text: str = self.content["sources"][0]["content"]
        return text


def definition_document(name_or_path: str) -> dict[str, Any]:
    """definition.json of a shipped problem or of a folder, as it is."""
    folder = Path(name_or_path) if Path(name_or_path).is_dir() else PROBLEMS_DIR / name_or_path
    content: dict[str, Any] = json.loads((folder / "definition.json").read_text(encoding="utf-8"))
    return content


def export_solution(
    problem: Problem,
    records: Sequence[StoredRecord],
    *,
    author: str,
    definition_name: str | None = None,
    dialect: Dialect = "sol",
) -> Exported:
    """One file that dispatches among the records' plans; raises NothingFound where no record can be exported.

    Records of packed weights stay out, because a benchmark hands the weights over one by one, at every call.
    """
    tuned, left_out = _usable(problem, records)
    if not tuned:
        why = f": {'; '.join(left_out)}" if left_out else ""
        raise NothingFound(f"no record of {problem.name} can be exported{why}")
    environment = records[0].environment
    limits = limits_of(records[0])
    default = default_plan(problem, limits)
    header = [
        f"{problem.name}: made by tilewright from records of {clean(environment.gpu_name)}, "
        f"Triton {clean(environment.triton)}, torch {clean(environment.torch)}.",
        "Copied from the templates mechanically; needs torch and Triton alone. Change the templates, not this file.",
    ]
    source = kernel_file(problem, tuned, default, header)
    wrong = complaints(source)
    if wrong:
        raise UsageError(f"the templates of these plans cannot be exported: {'; '.join(sorted(set(wrong)))}")
    content = _document(problem, tuned, source, records[0], author, definition_name or problem.name, dialect)
    check_solution(content)
    return Exported(content, tuple(tuned), tuple(left_out))


def _usable(problem: Problem, records: Sequence[StoredRecord]) -> tuple[list[TunedPlan], list[str]]:
    registry = load_family(problem.family).registry
    tuned, left_out = [], []
    for stored in records:
        record = stored.record
        try:
            if stored.invalid:
                raise UsageError(stored.invalid)
            if record.weight_mode != "separate":
                raise UsageError("its weights are packed")
            case = problem.case(weight_mode="separate", **stored.axes)
            if case.key != record.case_key:
                raise UsageError("it belongs to another version of the problem")
            plan = FusionPlan.from_json(record.plan)
            registry.check(plan, case, limits_of(stored))
        except UsageError as error:
            left_out.append(f"{clean(stored.case_name)}: {error}")
            continue
        stale = "" if registry.source_hash(plan) == record.source_hash else ", measured before a template changed"
        time_us = f"{record.median_us:.1f} us" if record.median_us and stored.environment.kind == "cuda" else "verified"
        tuned.append(TunedPlan(stored.axes, plan, f"{case.name}: {time_us}, record {record.digest}{stale}"))
    tuned.sort(key=lambda one: tuple(one.axes[axis] for axis in problem.variable_axes))
    return tuned, left_out


def limits_of(stored: StoredRecord) -> Limits:
    """What the record's device allows."""
    env = stored.environment
    if env.kind != "cuda":
        return INTERPRETER_LIMITS
    capability = int(env.capability.replace(".", "") or 0)
    if capability not in SHARED_MEMORY_BYTES:
        raise UsageError(f"compute capability {env.capability} is not known")
    return named_limits(capability, env.sm_count)


def default_plan(problem: Problem, limits: Limits) -> FusionPlan:
    """For any shape: library parts where there are any, with what the smallest shape takes."""
    registry = load_family(problem.family).registry
    smallest = problem.case(weight_mode="separate", **dict.fromkeys(problem.variable_axes, 1))
    parts = sorted(registry.values(), key=lambda template: template.kind != "library")
    ordered = type(registry)(parts)
    return ordered.default_plan(smallest, limits)


def _document(
    problem: Problem,
    tuned: Sequence[TunedPlan],
    source: str,
    first: StoredRecord,
    author: str,
    definition_name: str,
    dialect: Dialect,
) -> dict[str, Any]:
    env = first.environment
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    card = "".join(c if c.isalnum() else "_" for c in env.gpu_name.lower()).strip("_")
    hardware = [BOARD_HARDWARE.get(env.gpu_name, "LOCAL") if dialect == "sol" else env.gpu_name.replace(" ", "_")]
    language: dict[str, Any] = {"languages": ["triton", "pytorch"]} if dialect == "sol" else {"language": "triton"}
    return {
        "name": f"tilewright_{problem.name}_{card}_{digest}",
        "definition": definition_name,
        "author": author,
        "description": f"{len(tuned)} tuned shapes on {clean(env.gpu_name)}, Triton {env.triton}, torch {env.torch}; "
        + "; ".join(one.evidence for one in tuned),
        "spec": {
            **language,
            "target_hardware": hardware,
            "entry_point": f"{ENTRY}::run",
            "dependencies": ["torch", "triton"],
            "destination_passing_style": True,
        },
        "sources": [{"path": ENTRY, "content": source}],
    }
