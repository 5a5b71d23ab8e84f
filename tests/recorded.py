"""Databases and recordings of a toy device that answers from a written-down formula."""

import dataclasses
from collections.abc import Sequence
from itertools import product
from math import log2
from pathlib import Path
from typing import Any

from toys import EFFORT, ENVIRONMENT, FAMILY, FormulaDevice, MemoryStore, a_case, a_context

from tilewright.db.rows import Level, RunRow, RunStatus, Status, TrialRow
from tilewright.db.store import Store
from tilewright.kernel_templates import families
from tilewright.kernel_templates.plan import Stage
from tilewright.search.outcome import PROTOCOL, Candidate, TrialOutcome
from tilewright.search.progress import CaseResult
from tilewright.search.recording import Part, RecordedCase, Recording
from tilewright.search.run_records import RunRecords
from tilewright.search.tune import Tuner

GPU_S = 0.5


class TimedDevice(FormulaDevice):
    """Every candidate holds the device for GPU_S."""

    def evaluate(self, case: Any, candidate: Candidate, *rest: Any, **named: Any) -> TrialOutcome:
        return dataclasses.replace(super().evaluate(case, candidate, *rest, **named), gpu_s=GPU_S)


def use_toys(monkeypatch: Any) -> None:
    """The toys' templates stand for the family's until the test ends."""
    monkeypatch.setattr(families, "load_family", lambda name: FAMILY)
    for module in ("run", "record_run", "dry_run"):
        monkeypatch.setattr(f"tilewright.search.{module}.load_family", lambda name: FAMILY)


def a_run() -> RunRow:
    return RunRow("tune", seed=0, effort="quick", tool_version="0.1.0", protocol=PROTOCOL)


def tune_into(
    path: Path, names: Sequence[str] = ("b4s512",), device: FormulaDevice | None = None, **changes: Any
) -> list[CaseResult]:
    """Tunes on the toy device into a database, in a run of its own."""
    with Store.open(path) as store:
        run_id = store.begin_run(a_run(), ENVIRONMENT)
        records = RunRecords(store, run_id, ENVIRONMENT, EFFORT.measure.regime_name)
        stored = {"record_trial": records.record_trial, "known_trials": records.known_trials}
        context = a_context(device or TimedDevice(), MemoryStore(), **stored, **changes)
        results = Tuner(context, records).run([a_case(name) for name in names])
        store.finish_run(run_id, RunStatus.DONE)
    return results


def model_us(tile_m: int, tile_n: int, stages: int, warps: int) -> float:
    """The written-down cost model: waves of tiles on 132 SMs, a pipeline that wants three stages, warps per area."""
    waves = -(-(2048 // tile_m) * (4096 // tile_n) // 132)
    tile = 2.0 + tile_m * tile_n / 4096
    pipeline = 1 + 0.15 * abs(stages - 3)
    area = 1 + 0.1 * abs(log2(tile_m * tile_n / (2048 * warps)))
    return waves * tile * pipeline * area


def model_recording() -> Recording:
    """A whole space of one template under `model_us`; tiles that are too large for their stages fail."""
    rows = []
    sizes = (16, 32, 64, 128)
    for tile_m, tile_n, stages, warps in product(sizes, sizes, (1, 2, 3, 4, 5), (2, 4, 8)):
        values = {"TILE_M": tile_m, "TILE_N": tile_n, "STAGES": stages, "WARPS": warps}
        fits = stages * (tile_m + tile_n) <= 1000
        time_us = model_us(tile_m, tile_n, stages, warps)
        row = TrialRow(
            case_key=a_case().key,
            level=Level.STAGE,
            template="attention",
            label="attention",
            config=values,
            digest=Stage("attention", values).digest,
            source_hash="model",
            status=Status.OK if fits else Status.OUT_OF_RESOURCES,
            reason="" if fits else "shared memory",
            gpu_s=0.05 + (1000 * time_us * 1e-6 if fits else 0.0),
            median_us=time_us if fits else None,
            samples=10,
        )
        rows.append(row)
    case = RecordedCase(a_case(), tuple(rows))
    parts = {"attention": Part("triton", ("attention",), (), "model")}
    return Recording(a_case().problem, ENVIRONMENT, "graph", PROTOCOL, parts, (case,))
