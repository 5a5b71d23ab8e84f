"""Faults that other tuners and runtimes had (G21 to G23 of the project's list), through `dispatch` and the commands."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import BIASES, SMOKE, arguments, reference
from eager_family import FAMILY, LAUNCHES
from served import a_record
from torch import Tensor

from tilewright import cli
from tilewright.db.records_json import write_records
from tilewright.db.rows import StoredRecord
from tilewright.errors import UsageError
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import WorkloadCase
from tilewright.runtime import Grade, dispatch, lookup
from tilewright.runtime.machine import machine_of

Serve = Callable[..., None]
ROOT = Path(__file__).resolve().parents[2]
FOLLOW = ("norm_rope", "attention", "output")
WHOLE = FusionPlan((Stage("whole", {}),))


def small(batch_size: int, seq_len: int) -> WorkloadCase:
    return SMOKE.case(batch_size=batch_size, seq_len=seq_len)


def record_of(case: WorkloadCase, **changes: Any) -> StoredRecord:
    """On the interpreter, of the plan that is one template."""
    environment = dataclasses.replace(machine_of("interpret").environment, **changes.pop("environment", {}))
    row = {"plan": WHOLE.to_json(), "digest": WHOLE.digest, "source_hash": FAMILY.registry.source_hash(WHOLE)}
    return a_record(case, environment=environment, **{**row, **changes})


@pytest.mark.parametrize("asked", [(1, 100), (1, 1), (2, 20), (8, 50), (1, 400)])
def test_every_shape_between_and_beyond_tuned_ones_is_right(serve: Serve, asked: tuple[int, int]) -> None:
    """G22."""
    serve(record_of(small(1, 102)), record_of(small(4, 50)))
    case = small(*asked)
    given = arguments(case)
    assert torch.equal(dispatch(**given), reference(case, given))


ANSWERS = """
import json, sys
sys.path.insert(0, sys.argv[2])
from tilewright.kernel_templates.families import register_family
register_family("gqa_attention", "eager_family")
from tilewright.problem import load_problem
from tilewright.runtime import lookup
problem = load_problem().at_suite("smoke")
found = [lookup(problem.parse_case(name), "interpret", db=sys.argv[1]) for name in ("b1s100", "b2s60", "b3s50", "b9s9")]
print(json.dumps([[one.grade.value, one.plan.digest, one.reason] for one in found]))
"""


def test_every_process_gives_the_same_answers(tmp_path: Path) -> None:
    """G22: also where records tie, and whatever the hash seed of the process."""
    plans = [FusionPlan((Stage("projection", {"BLOCK_M": m}), *(Stage(n, {}) for n in FOLLOW))) for m in (32, 64)]
    tied = [
        record_of(small(*shape), plan=plan.to_json(), digest=plan.digest, source_hash=FAMILY.registry.source_hash(plan))
        for shape, plan in zip(((4, 50), (2, 50)), plans, strict=True)
    ]
    write_records(tmp_path / "records.json", [record_of(small(1, 102)), *tied])
    path = str(tmp_path / "records.json")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", ANSWERS, path, str(ROOT / "tests")]
    there = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    here = [lookup(SMOKE.parse_case(name), "interpret", db=path) for name in ("b1s100", "b2s60", "b3s50", "b9s9")]
    assert there == [[one.grade.value, one.plan.digest, one.reason] for one in here]
    assert [one.grade for one in here] == [*[Grade.TRANSFERRED] * 3, Grade.DEFAULT]


def with_heads(heads: int, kv_heads: int) -> dict[str, Tensor]:
    return arguments(SMOKE.with_constants(num_attention_heads=heads, num_key_value_heads=kv_heads).parse_case("b2s9"))


VARIANTS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "float16": lambda: {name: t.half() for name, t in arguments(small(2, 9)).items()},
    "without bias": lambda: {name: t for name, t in arguments(small(2, 9)).items() if name not in BIASES},
    "half the heads": lambda: with_heads(2, 1),
    "another grouping": lambda: with_heads(6, 3),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_no_other_variant_runs_the_plan_tuned_for_one(serve: Serve, variant: Callable[[], dict[str, Tensor]]) -> None:
    """G23."""
    serve(record_of(small(2, 9)))
    given = variant()
    heads, kv_heads = (given[f"{name}_proj_weight"].shape[0] // 64 for name in "qk")
    case = SMOKE.with_constants(num_attention_heads=heads, num_key_value_heads=kv_heads).parse_case("b2s9")
    assert torch.equal(dispatch(**given), reference(case, given))
    assert "whole" not in LAUNCHES
    dispatch(**arguments(small(2, 9)))
    assert LAUNCHES[-1] == "whole"


def test_a_dtype_without_kernels_is_a_clear_error(serve: Serve) -> None:
    """G23."""
    serve(record_of(small(2, 9)))
    given = {name: t.float() for name, t in arguments(small(2, 9)).items()}
    with pytest.raises(UsageError, match=r"has dtype torch\.float32; accepted: torch\.bfloat16"):
        dispatch(**given)


@pytest.mark.parametrize(
    ("change", "grade"),
    [
        ({"environment": {"triton": "3.1.0"}}, Grade.DEFAULT),
        ({"source_hash": "0" * 16}, Grade.DEFAULT),
        ({"environment": {"torch": "2.1.0"}}, Grade.COMPATIBLE),
        ({"environment": {"driver": "400.1"}}, Grade.EXACT),  # unknown here, hence no difference
    ],
)
def test_a_record_of_other_versions_is_used_by_a_stated_rule_alone(
    serve: Serve, change: dict[str, Any], grade: Grade
) -> None:
    """G21."""
    serve(record_of(small(2, 9), **change))
    assert lookup(small(2, 9), "interpret").grade is grade


def test_results_show_the_compiler_of_each_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """G21."""
    path = tmp_path / "records.json"
    write_records(path, [record_of(small(2, 9), environment={"triton": version}) for version in ("3.1.0", "3.6.0")])
    assert cli.run(["results", "--db", str(path), "--csv", "--own"]) == 0
    shown = capsys.readouterr().out
    assert all(version in shown for version in ("3.1.0", "3.6.0"))
