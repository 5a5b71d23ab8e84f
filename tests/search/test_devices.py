"""Several devices of one host: cases are spread, a case stays where it is, and unequal devices are refused."""

import dataclasses
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_fleet import FAMILY as FAKE_FAMILY
from fake_fleet import FakeSession
from toys import EFFORT, ENVIRONMENT, FormulaDevice, MemoryStore, a_case, a_context

from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus
from tilewright.errors import UsageError
from tilewright.problem import WorkloadCase
from tilewright.search.devices import refuse_unequal, resolve_devices, run_devices, tune_longest_first
from tilewright.search.outcome import Candidate, TrialOutcome
from tilewright.search.progress import Silent
from tilewright.search.request import sharded
from tilewright.search.run import TuneRequest
from tilewright.search.tune import Budget, Tuner

CASES = tuple(a_case(f"b1s{length}") for length in (256, 264, 272, 280, 288, 296, 304, 312))


class SleepingDevice(FormulaDevice):
    """A GPU that is busy for a while with every candidate, and says in which thread it was used for which case."""

    def __init__(self, seconds: float = 0.0, fault: Any = lambda candidate: None) -> None:
        super().__init__(fault)
        self.seconds = seconds
        self.used: list[tuple[WorkloadCase, str]] = []

    def evaluate(self, case: WorkloadCase, candidate: Candidate, *rest: Any, **named: Any) -> TrialOutcome:
        self.used.append((case, threading.current_thread().name))
        time.sleep(self.seconds)
        return super().evaluate(case, candidate, *rest, **named)


def crew(count: int, store: MemoryStore, seconds: float = 0.0, **changes: Any) -> dict[str, SleepingDevice]:
    devices = {f"cuda:{number}": SleepingDevice(seconds) for number in range(count)}
    small = replace(EFFORT, stage_trials=1, plan_trials=2)
    tuners = {
        name: Tuner(a_context(device, store, effort=small), store)  # type: ignore[arg-type]
        for name, device in devices.items()
    }
    tune_longest_first(tuners, CASES, **changes)
    return devices


def test_four_devices_do_at_least_3_2_times_the_work_of_one_with_the_same_winners() -> None:
    stores = {count: MemoryStore() for count in (1, 4)}
    seconds = {}
    for count, store in stores.items():
        begun = time.monotonic()
        crew(count, store, seconds=0.08)
        seconds[count] = time.monotonic() - begun
    assert seconds[1] / seconds[4] >= 3.2
    winners = [{key: record.digest for key, record in store.records.items()} for store in stores.values()]
    assert winners[0] == winners[1]
    assert len(winners[0]) == len(CASES)


def test_a_case_stays_on_one_device_and_the_longest_begins() -> None:
    devices = crew(3, MemoryStore(), seconds=0.002)
    homes = {case.key: {name for name, device in devices.items() if (case, name) in device.used} for case in CASES}
    assert all(len(names) == 1 for names in homes.values())
    first = {device.used[0][0].name for device in devices.values()}
    assert first == {case.name for case in CASES[-3:]}


def test_results_come_in_the_order_of_the_cases() -> None:
    store = MemoryStore()
    tuners = {name: Tuner(a_context(FormulaDevice(), store), store) for name in ("cuda:0", "cuda:1")}
    assert [result.case for result in tune_longest_first(tuners, CASES[:4])] == list(CASES[:4])


def test_a_budget_in_trials_counts_for_all_devices_together() -> None:
    store = MemoryStore()
    crew(2, store, budget=Budget(trials=2 * len(CASES)))
    assert len(store.trials) == 2 * len(CASES)


def test_an_error_on_one_device_stops_the_others_and_is_raised() -> None:
    store = MemoryStore()

    def broken(candidate: Candidate) -> TrialOutcome:
        raise OSError("the driver is gone")

    small = replace(EFFORT, stage_trials=1, plan_trials=2)
    tuners = {
        "cuda:0": Tuner(a_context(SleepingDevice(0.02), store, effort=small), store),
        "cuda:1": Tuner(a_context(FormulaDevice(broken), store, effort=small), store),
    }
    with pytest.raises(OSError, match="the driver is gone"):
        tune_longest_first(tuners, CASES)
    assert len(store.records) < len(CASES) - 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"gpu_name": "NVIDIA H100"}, "gpu_name"), ({"power_limit_w": 350.0}, r"power_limit_w \(700.0 and 350.0\)")],
)
def test_devices_of_another_model_or_power_limit_are_refused(changes: dict[str, Any], named: str) -> None:
    expected = dataclasses.replace(ENVIRONMENT, power_limit_w=700.0)
    other = dataclasses.replace(expected, **changes)
    with pytest.raises(UsageError, match=f"devices cuda:0 and cuda:1 differ in {named}"):
        refuse_unequal({"cuda:0": expected, "cuda:1": other})


def test_devices_that_differ_in_clocks_alone_are_equal() -> None:
    refuse_unequal({"cuda:0": ENVIRONMENT, "cuda:1": dataclasses.replace(ENVIRONMENT, sm_clock_mhz=1980)})


@pytest.mark.parametrize(
    ("asked", "found"), [("all", ("cuda:0", "cuda:1", "cuda:2")), ("2,0", ("cuda:2", "cuda:0")), ("1,1", ("cuda:1",))]
)
def test_devices_are_numbers_or_all(asked: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.search.devices.gpu_count", lambda: 3)
    assert resolve_devices(asked) == found


@pytest.mark.parametrize(("asked", "gpus"), [("all", 0), ("3", 3), ("a", 3), ("0,", 3), ("-1", 3)])
def test_devices_that_are_not_there_are_refused(asked: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.search.devices.gpu_count", lambda: gpus)
    with pytest.raises(UsageError, match="devices"):
        resolve_devices(asked)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_split_the_cases_evenly_and_share_none(count: int) -> None:
    parts = [sharded(CASES, f"{number}/{count}") for number in range(1, count + 1)]
    assert sorted(case.name for part in parts for case in part) == sorted(case.name for case in CASES)
    work = [sum(case.flops for case in part) for part in parts]
    assert max(work) <= 1.5 * min(work)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/9", "1/0"])
def test_a_shard_that_is_none_is_refused(shard: str) -> None:
    with pytest.raises(UsageError, match="shard must be"):
        sharded(CASES, shard)


class Watching(Silent):
    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def run_on(path: Path, sessions: dict[str, FakeSession], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("tilewright.search.run.load_family", lambda name: FAKE_FAMILY)
    request = TuneRequest(
        "gqa_attention_with_qk_norm",
        cases=[case.name for case in CASES[:4]],
        suite="full",
        device="cuda",
        effort="quick",
        db=str(path),
    )
    report = run_devices(request, list(sessions), lambda measures: Watching(), lambda device: sessions[device])  # type: ignore[arg-type, return-value]
    return json.loads(json.dumps(report.to_json()))  # type: ignore[no-any-return]


def test_every_device_has_a_run_of_its_own_and_one_report_names_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = {name: FakeSession(name, 0.002) for name in ("cuda:0", "cuda:1")}
    report = run_on(tmp_path / "tuned.sqlite", sessions, monkeypatch)
    assert [case["case"] for case in report["cases"]] == [case.name for case in CASES[:4]]
    assert all(case["record"] for case in report["cases"])
    with Reader.open(tmp_path / "tuned.sqlite") as reader:
        runs, trials = reader.runs(), reader.trials()
    assert [run.status for run in runs] == [RunStatus.DONE, RunStatus.DONE]
    homes = {key: {trial.run_id for trial in trials if trial.trial.case_key == key} for key in (c.key for c in CASES)}
    assert [len(homes[case.key]) for case in CASES[:4]] == [1, 1, 1, 1]


def test_unequal_devices_are_refused_before_anything_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = {"cuda:0": FakeSession(), "cuda:1": FakeSession(power_limit_w=500.0)}
    with pytest.raises(UsageError, match="power_limit_w"):
        run_on(tmp_path / "tuned.sqlite", sessions, monkeypatch)
    with Reader.open(tmp_path / "tuned.sqlite") as reader:
        assert reader.runs() == []
