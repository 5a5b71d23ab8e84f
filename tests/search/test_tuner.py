"""The coordinator on a device that answers from a formula."""

from dataclasses import replace
from pathlib import Path

import pytest
from recorded import a_run, tune_into
from toys import EFFORT, ENVIRONMENT, FAMILY, FormulaDevice, MemoryStore, a_case, a_context, stage_us

from tilewright.db.rows import Level, RecordRow, Status, Verdict
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.search.outcome import Candidate, TrialOutcome
from tilewright.search.run_records import RunRecords
from tilewright.search.tune import Budget, Tuner


def best_plan() -> FusionPlan:
    best = {"TILE": 64, "WARPS": 4}
    return FusionPlan(tuple(Stage(name, best) for name in ("fused_projection", "attention", "output")))


def test_finds_the_fusion_and_the_tiles_that_are_fastest() -> None:
    store = MemoryStore()
    [result] = Tuner(a_context(FormulaDevice(), store), store).run([a_case()])
    assert result.record is not None
    assert result.record.digest == best_plan().digest
    assert result.record.verdict is Verdict.BEATS_ALL
    assert result.record.default_us is not None
    assert result.record.baseline == "library"


def test_default_plan_is_the_first_trial() -> None:
    device, store = FormulaDevice(), MemoryStore()
    context = a_context(device, store)
    Tuner(context, store).run([a_case()])
    assert device.evaluated[0] == FAMILY.registry.default_plan(a_case(), context.limits)


def test_nothing_is_measured_twice_even_in_a_second_run() -> None:
    store = MemoryStore()
    Tuner(a_context(FormulaDevice(), store), store).run([a_case()])
    digests = [(row.level, row.digest) for row in store.trials]
    assert len(digests) == len(set(digests))
    again = FormulaDevice()
    [result] = Tuner(a_context(again, store), store).run([a_case()])
    assert again.evaluated == []
    assert result.reused == len(digests)
    assert "record stands" in result.message


def test_run_cut_short_resumes_with_the_remainder() -> None:
    whole, store = MemoryStore(), MemoryStore()
    Tuner(a_context(FormulaDevice(), whole), whole).run([a_case()])
    Tuner(a_context(FormulaDevice(), store), store).run([a_case()], Budget(trials=9))
    assert len(store.trials) == 9
    assert store.records
    Tuner(a_context(FormulaDevice(), store), store).run([a_case()])
    assert len({row.digest for row in store.trials}) == len(store.trials)
    assert store.records[a_case().key].digest == whole.records[a_case().key].digest


def test_changed_source_makes_exactly_its_trials_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    Tuner(a_context(FormulaDevice(), store), store).run([a_case()])
    store.trials = [
        replace(row, source_hash="of another day") if row.template == "attention" else row for row in store.trials
    ]
    again = FormulaDevice()
    Tuner(a_context(again, store), store).run([a_case()])
    stages = {candidate.template for candidate in again.evaluated if isinstance(candidate, Stage)}
    assert stages == {"attention"}


def test_failures_of_every_kind_are_stored_and_the_rest_goes_on() -> None:
    kinds = [Status.CRASHED, Status.TIMEOUT, Status.WRONG, Status.INVALID_TIME, Status.OUT_OF_RESOURCES]

    def fault(candidate: Candidate) -> TrialOutcome | None:
        if isinstance(candidate, Stage) and candidate.template == "attention" and candidate.values["TILE"] != 64:
            return TrialOutcome(kinds[hash(candidate.digest) % len(kinds)], "injected")
        return None

    store = MemoryStore()
    [result] = Tuner(a_context(FormulaDevice(fault), store), store).run([a_case()])
    assert result.record is not None
    assert result.record.digest == best_plan().digest
    failed = [row for row in store.trials if row.status is not Status.OK]
    assert failed
    assert all(row.reason == "injected" and row.config for row in failed)


def test_nothing_valid_means_no_record_and_a_message() -> None:
    store = MemoryStore()
    device = FormulaDevice(lambda candidate: TrialOutcome(Status.WRONG, "injected"))
    [result] = Tuner(a_context(device, store), store).run([a_case()])
    assert result.record is None
    assert result.message == "no valid plan was found"
    assert store.records == {}


def test_fast_plan_that_fails_strict_verification_never_becomes_the_record() -> None:
    def strict(plan: FusionPlan) -> TrialOutcome:
        return TrialOutcome(Status.WRONG, "wrong at seq_len 1000") if plan == best_plan() else TrialOutcome(Status.OK)

    store = MemoryStore()
    [result] = Tuner(a_context(FormulaDevice(strict=strict), store), store).run([a_case()])
    assert result.record is not None
    assert result.record.digest != best_plan().digest
    assert "wrong at seq_len 1000" in str(result.record.evidence["failures"])


def test_interrupt_keeps_what_is_finished() -> None:
    device, store = FormulaDevice(), MemoryStore()
    context = a_context(device, store, stopping=lambda: len(device.evaluated) >= 5)
    results = Tuner(context, store).run([a_case(), a_case("b1s128")])
    assert len(store.trials) == 5
    assert [result.record for result in results] == [None]


def test_budget_in_seconds_ends_the_search_but_not_the_final() -> None:
    device, store = FormulaDevice(), MemoryStore()
    context = a_context(device, store, now_s=lambda: float(len(device.evaluated)))
    [result] = Tuner(context, store).run([a_case()], Budget(seconds=6))
    assert len(store.trials) <= 8
    assert result.record is not None


@pytest.mark.parametrize("budget", [{"seconds": 0}, {"seconds": -1}, {"trials": 0}])
def test_budget_that_allows_nothing_is_refused(budget: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be positive"):
        Budget(**budget)


def test_winner_of_one_case_is_tried_early_in_the_next() -> None:
    device, store = FormulaDevice(), MemoryStore()
    context = a_context(device, store, look_ahead=1, effort=replace(EFFORT, stage_trials=2))
    Tuner(context, store).run([a_case("b1s128"), a_case("b1s512")])
    second = [row for row in store.trials if row.case_key == a_case("b1s512").key and row.level is Level.STAGE]
    won = {stage["template"]: stage["values"] for stage in store.records[a_case("b1s128").key].plan}
    for name, values in won.items():
        assert values in [row.config for row in second if row.template == name]


def test_winner_of_an_earlier_run_is_tried_early_in_the_next(tmp_path: Path) -> None:
    """Two samples find the best tiles of a second case only because the first case's are among them."""
    few = replace(EFFORT, stage_trials=2)
    database = tmp_path / "runs.sqlite"
    [first] = tune_into(database, ["b1s128"])
    [second] = tune_into(database, ["b1s512"], effort=few)
    [alone] = tune_into(tmp_path / "alone.sqlite", ["b1s512"], effort=few)
    records = [result.record for result in (first, second, alone)]
    assert records[0] is not None
    assert records[1] is not None
    assert records[2] is not None
    assert records[1].digest == records[0].digest == best_plan().digest
    assert (records[1].median_us or 0) < (records[2].median_us or 0)


def test_winners_of_another_card_or_of_forgotten_parameters_are_no_seeds(tmp_path: Path) -> None:
    database = tmp_path / "runs.sqlite"
    case, plan = a_case("b1s128"), FusionPlan((Stage("attention", {"OLD": 1}),))
    record = RecordRow(case.key, plan.to_json(), plan.digest, "of another day", Verdict.BEATS_ALL)
    with Store.open(database) as store:
        for env in (ENVIRONMENT, replace(ENVIRONMENT, gpu_name="NVIDIA H100")):
            store.activate(store.begin_run(a_run(), env), case, env, record)
        records = RunRecords(store, store.begin_run(a_run(), ENVIRONMENT), ENVIRONMENT, "graph")
        assert records.winners(a_case("b1s512")) == [(case, plan)]
        assert records.winners(case) == []
        assert records.winners(a_case("b1s512").problem.case(weight_mode="packed", batch_size=1, seq_len=512)) == []
    [result] = tune_into(database, ["b1s512"])
    assert result.record is not None


def test_noisy_time_is_kept_and_taken_once_more() -> None:
    seen: set[str] = set()

    def fault(candidate: Candidate) -> TrialOutcome | None:
        if isinstance(candidate, Stage) and candidate.digest not in seen:
            seen.add(candidate.digest)
            return TrialOutcome(Status.OK, samples_us=(9000.0,) * 8, noisy="hardware slowdown")
        return None

    store = MemoryStore()
    [result] = Tuner(a_context(FormulaDevice(fault), store), store).run([a_case()])
    stages = [row for row in store.trials if row.level is Level.STAGE]
    assert {row.attempt for row in stages} == {1, 2}
    assert all(row.noisy for row in stages if row.attempt == 1)
    assert result.record is not None
    assert result.record.digest == best_plan().digest


def test_refinal_times_the_finalists_again_without_a_new_trial() -> None:
    store = MemoryStore()
    Tuner(a_context(FormulaDevice(), store), store).run([a_case()])
    first = store.records[a_case().key]
    again = FormulaDevice()
    [result] = Tuner(a_context(again, store), store, refinal=True).run([a_case()])
    assert again.evaluated == []
    assert result.record is not None
    assert result.record.verdict is Verdict.INCUMBENT_KEPT
    assert store.records[a_case().key] is not first


def test_triton_only_leaves_library_templates_out() -> None:
    store = MemoryStore()
    Tuner(a_context(FormulaDevice(), store, kinds=("triton",)), store).run([a_case()])
    assert "library_output" not in {row.template for row in store.trials}


def test_same_seed_gives_the_same_candidates() -> None:
    sequences = []
    for _ in range(2):
        device, store = FormulaDevice(), MemoryStore()
        Tuner(a_context(device, store, seed=11), store).run([a_case()])
        sequences.append([candidate.digest for candidate in device.evaluated])
    assert sequences[0] == sequences[1]


def test_interpreter_gives_a_record_without_times() -> None:
    store = MemoryStore()
    limits = replace(a_context(FormulaDevice(), store).limits, kind="interpret")
    [result] = Tuner(a_context(FormulaDevice(), store, limits=limits), store).run([a_case()])
    assert result.record is not None
    assert result.record.verdict is Verdict.UNMEASURED
    assert result.record.median_us is None
    assert stage_us(FusionPlan.from_json(result.record.plan).stages[0]) > 0
