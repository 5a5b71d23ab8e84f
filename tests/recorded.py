"""Databases and recordings of a toy device that answers from a written-down formula."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toys import EFFORT, ENVIRONMENT, FAMILY, FormulaDevice, MemoryStore, a_case, a_context

from tilewright.db.rows import RunRow, RunStatus
from tilewright.db.store import Store
from tilewright.kernel_templates import families
from tilewright.search.outcome import PROTOCOL, Candidate, TrialOutcome
from tilewright.search.progress import CaseResult
from tilewright.search.run import RunRecords
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
