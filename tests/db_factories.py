"""Rows with defaults for the tests of the database."""

import dataclasses
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from tilewright.db.environment import Environment
from tilewright.db.mapping import trial_columns
from tilewright.db.models import TrialTable
from tilewright.db.rows import Level, RecordRow, RunRow, RunStatus, Status, TrialRow, Verdict
from tilewright.db.store import Store
from tilewright.problem import WorkloadCase, load_problem

PROBLEM = load_problem()


def an_env(**changes: Any) -> Environment:
    env = Environment("cuda", "NVIDIA H200", 132, 141 << 30, "9.0", "3.6.0", torch="2.11.0", driver="580.95")
    return dataclasses.replace(env, **changes)


def a_case(name: str = "b4s512") -> WorkloadCase:
    return PROBLEM.parse_case(name)


def a_run(**changes: Any) -> RunRow:
    return dataclasses.replace(RunRow("tune", seed=0, effort="quick", tool_version="0.1.0", protocol="1"), **changes)


def a_trial(number: int = 0, case: WorkloadCase | None = None, **changes: Any) -> TrialRow:
    trial = TrialRow(
        case_key=(case or a_case()).key,
        level=Level.STAGE,
        template="gemm",
        label="gemm",
        config={"BLOCK_M": 64, "number": number},
        digest=f"digest{number}",
        source_hash="source",
        status=Status.OK,
        median_us=100.0 + number,
        samples=10,
    )
    return dataclasses.replace(trial, **changes)


def a_record(median_us: float = 100.0, case: WorkloadCase | None = None, **changes: Any) -> RecordRow:
    record = RecordRow(
        case_key=(case or a_case()).key,
        plan=[{"template": "gemm", "values": {"BLOCK_M": 64}}],
        digest="plan",
        source_hash="source",
        verdict=Verdict.BEATS_ALL,
        median_us=median_us,
        evidence={"finalists": [{"label": "gemm", "median_us": median_us}]},
    )
    return dataclasses.replace(record, **changes)


def fill(path: Path, trials: int = 3) -> None:
    """A database with one finished run, some trials and one active record."""
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        for number in range(trials):
            store.add_trial(run, a_case(), an_env(), a_trial(number))
        store.activate(run, a_case(), an_env(), a_record())
        store.finish_run(run, RunStatus.DONE)


def fill_with_many(path: Path, trials: int) -> None:
    """A database with this many trials of the full suite in 20 runs, and a record of each case; takes seconds."""
    cases = PROBLEM.suite("full")
    statuses = [*[Status.OK] * 7, *Status]
    with Store.open(path) as store:
        env = store.environment(an_env())
        ids = [store.case(case) for case in cases]
        runs = [store.begin_run(a_run(), an_env()) for _ in range(20)]
        for case in cases:
            store.activate(runs[0], case, an_env(), a_record(case=case))
        one = trial_columns(a_trial(config={f"PARAMETER_{i}": 64 for i in range(12)}))
        rows = (
            one
            | {"run_id": runs[n % 20], "case_id": ids[n % 16], "environment_id": env, "digest": f"digest{n}"}
            | {"status": statuses[n // 16 % len(statuses)], "template": f"template{n // 16 % 8}", "median_us": float(n)}
            for n in range(trials)
        )
        with store.engine.begin() as connection:
            connection.execute(insert(TrialTable), list(rows))
