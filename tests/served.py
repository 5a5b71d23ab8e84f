"""Records and machines for tests of serving, with defaults."""

import dataclasses
from datetime import UTC, datetime
from typing import Any

from eager_family import FAMILY

from tilewright.db.environment import Environment
from tilewright.db.rows import RecordRow, StoredRecord, Verdict
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import WorkloadCase, load_problem
from tilewright.runtime.machine import Machine

PROBLEM = load_problem()
H200 = Environment("cuda", "NVIDIA H200", 132, 140 << 30, "9.0", "3.6.0", torch="2.11.0+cu130", cuda="13.0")
LIMITS = Limits("cuda", 90, 227 * 1024, 132)


def a_machine(**changes: Any) -> Machine:
    return Machine(dataclasses.replace(H200, **changes), LIMITS)


def a_case(batch_size: int = 4, seq_len: int = 512, **options: Any) -> WorkloadCase:
    return PROBLEM.case(batch_size=batch_size, seq_len=seq_len, **options)


def a_plan(block_m: int = 64) -> FusionPlan:
    rest = [Stage(name, {}) for name in ("norm_rope", "attention", "output")]
    return FusionPlan((Stage("projection", {"BLOCK_M": block_m}), *rest))


def a_record(case: WorkloadCase, *, plan: Any = None, environment: Environment = H200, **row: Any) -> StoredRecord:
    fusion = a_plan()
    content = RecordRow(
        **{
            "case_key": case.key,
            "plan": fusion.to_json() if plan is None else plan,
            "digest": fusion.digest,
            "source_hash": FAMILY.registry.source_hash(fusion),
            "verdict": Verdict.BEATS_ALL,
            "median_us": 600.0,
            "created_at": datetime(2026, 1, 1, tzinfo=UTC),
            **row,
        }
    )
    return StoredRecord(content, environment, case.problem.name, case.name, case.shape_axes)
