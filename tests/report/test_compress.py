"""The fewest plans that cover all cases: exact, only from what was measured."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from db_factories import a_run, an_env
from hypothesis import given
from hypothesis import strategies as st
from toys import FAMILY, a_case

from tilewright import cli
from tilewright.db.rows import Level, Status, TrialRow
from tilewright.db.store import Store
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.report import compress


def a_plan(tile: int) -> FusionPlan:
    names = ("fused_projection", "attention", "output")
    return FusionPlan(tuple(Stage(name, {"TILE": tile, "WARPS": 4}) for name in names))


def a_trial(case: str, tile: int, median_us: float) -> TrialRow:
    plan = a_plan(tile)
    hashes = FAMILY.registry.source_hash(plan)
    return TrialRow(
        a_case(case).key,
        Level.PLAN,
        "",
        plan.label,
        plan.to_json(),
        plan.digest,
        hashes,
        Status.OK,
        median_us=median_us,
    )


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One plan is best nowhere and near the best everywhere; each best plan is far off at the other case."""
    monkeypatch.setattr(compress, "load_family", lambda name: FAMILY)
    path = tmp_path / "plans.sqlite"
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        for case, times in {"b1s128": (100.0, 150.0, 104.0), "b4s512": (150.0, 100.0, 103.0)}.items():
            for tile, median_us in zip((16, 32, 64), times, strict=True):
                store.add_trial(run, a_case(case), an_env(), a_trial(case, tile, median_us))
        stale = dataclasses.replace(a_trial("b1s128", 128, 1.0), source_hash="of another day")
        store.add_trial(run, a_case("b1s128"), an_env(), stale)
    return path


def test_one_plan_that_is_near_everywhere_replaces_two_that_are_best(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["compress", "--db", str(database), "--max-slowdown", "1.05", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [plan["plan"] for plan in answer["plans"]] == [a_plan(64).to_json()]
    assert answer["plans"][0]["serves"] == {"b1s128": 1.04, "b4s512": 1.03}
    assert (answer["best_plans"], answer["plans_measured"]) == (2, 3)


def test_tighter_bound_needs_more_plans(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compress", "--db", str(database), "--max-slowdown", "1.0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 2
    assert cli.run(["compress", "--db", str(database)]) == 0
    assert "1 plans serve 2 cases" in capsys.readouterr().out


def test_bad_questions_are_told(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compress", "--db", str(database), "--max-slowdown", "0.9"]) == 2
    assert "--max-slowdown must be at least 1, got 0.9" in capsys.readouterr().err
    assert cli.run(["compress", "--db", str(database), "--gpu", "NVIDIA A100"]) == 3


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.dictionaries(st.sampled_from("pqrstu"), st.floats(1, 2), min_size=1),
        min_size=1,
    )
)
def test_no_smaller_set_covers(times: dict[str, dict[str, float]]) -> None:
    kept = compress.fewest(times, 1.2)

    def covers(plans: tuple[str, ...]) -> bool:
        return all(any(of.get(plan, 9.0) <= 1.2 * min(of.values()) for plan in plans) for of in times.values())

    assert covers(kept)
    every = sorted({plan for of in times.values() for plan in of})
    assert not any(covers(smaller) for smaller in itertools.combinations(every, len(kept) - 1))
