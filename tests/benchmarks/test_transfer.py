"""Leave-one-out on a small database: which plan is lent, and what it costs."""

from pathlib import Path

import pytest
from db_factories import a_run, an_env
from toys import FAMILY, a_case

from tilewright.benchmarks import transfer
from tilewright.db.rows import Level, RecordRow, Status, TrialRow, Verdict
from tilewright.db.store import Store
from tilewright.errors import NothingFound
from tilewright.kernel_templates.plan import FusionPlan, Stage

NAMES = ("split_projection", "norm_rope", "attention", "library_output")  # the default's templates


def a_plan(tile: int) -> FusionPlan:
    return FusionPlan(tuple(Stage(name, {"TILE": tile, "WARPS": 4}) for name in NAMES))


DEFAULT = a_plan(16)


def a_trial(case: str, candidate: FusionPlan | Stage, median_us: float) -> TrialRow:
    key = a_case(case).key
    ok, end = Status.OK, {"median_us": median_us}
    if isinstance(candidate, FusionPlan):
        source = FAMILY.registry.source_hash(candidate)
        return TrialRow(key, Level.PLAN, "", "", candidate.to_json(), candidate.digest, source, ok, **end)
    source = FAMILY.registry[candidate.template].source_hash
    values = dict(candidate.values)
    return TrialRow(key, Level.STAGE, candidate.template, "", values, candidate.digest, source, ok, **end)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two near cases that lend to each other, and one far from both."""
    monkeypatch.setattr(transfer, "load_family", lambda name: FAMILY)
    path = tmp_path / "tuned.sqlite"
    winners = {"b1s512": 32, "b1s640": 64, "b8s4096": 32}
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        for case, tile in winners.items():
            plan = a_plan(tile)
            trials = [a_trial(case, plan, 100.0), a_trial(case, DEFAULT, 120.0)]
            trials += [a_trial(case, stage, 25.0) for stage in plan.stages]
            if case == "b1s512":
                trials.append(a_trial(case, a_plan(64), 110.0))
            if case == "b1s640":
                trials += [a_trial(case, stage, 26.0) for stage in a_plan(32).stages]
            for trial in trials:
                store.add_trial(run, a_case(case), an_env(), trial)
            source = FAMILY.registry.source_hash(plan)
            record = RecordRow(
                a_case(case).key, plan.to_json(), plan.digest, source, Verdict.BEATS_ALL, median_us=100.0
            )
            store.activate(run, a_case(case), an_env(), record)
    return path


def test_each_case_is_lent_the_plan_of_its_neighbour_or_the_default(database: Path) -> None:
    found = {left.case: left for left in transfer.leave_one_out(str(database))}
    assert {name: left.source for name, left in found.items()} == {
        "b1s512": "b1s640",
        "b1s640": "b1s512",
        "b8s4096": "",
    }
    assert {name: left.how for name, left in found.items()} == {
        "b1s512": "measured",
        "b1s640": "summed",
        "b8s4096": "measured",
    }
    assert [left.regret for left in found.values()] == pytest.approx([1.10, 1.04, 1.20])


def test_summary_counts_what_is_known(database: Path) -> None:
    found = transfer.leave_one_out(str(database))
    summary = transfer.summary([*found, transfer.Left("b9s9", "", "unknown", None, None)])
    assert (summary["cases"], summary["known"], summary["measured"]) == (4, 3, 2)
    assert summary["geometric_mean_regret"] == pytest.approx((1.1 * 1.04 * 1.2) ** (1 / 3) - 1, abs=1e-4)
    assert summary["worst_regret"] == pytest.approx(0.2)
    assert "b9s9" in transfer.table([transfer.Left("b9s9", "", "unknown", None, None)])


def test_database_without_two_records_is_told(tmp_path: Path, database: Path) -> None:
    empty = tmp_path / "empty.sqlite"
    Store.open(empty).close()
    with pytest.raises(NothingFound, match="fewer than two records"):
        transfer.leave_one_out(str(empty))
