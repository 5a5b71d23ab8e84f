"""The records that the package ships."""

import json
from pathlib import Path

import pytest

from tilewright.db.reader import Reader
from tilewright.db.records_json import read_records
from tilewright.db.shipped import SHIPPED_DIR
from tilewright.kernel_templates.device import named_limits
from tilewright.kernel_templates.families import FAMILIES, load_family
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import load_problem

PACKAGED = Path(__file__).resolve().parents[2] / "runtime" / "records"
FAMILY = "tilewright.kernel_templates.gqa_attention"


@pytest.fixture(autouse=True)
def _real_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gqa_attention", FAMILY)
    load_family.cache_clear()


def test_every_case_of_the_published_suite_has_a_record_for_the_h200() -> None:
    records = read_records(PACKAGED / "nvidia_h200.json")
    assert {stored.record.case_key for stored in records} == {case.key for case in load_problem().suite("full")}
    assert {stored.environment.gpu_name for stored in records} == {"NVIDIA H200"}
    assert all(stored.record.median_us and stored.record.baseline_us for stored in records)


def test_shipped_plans_may_run_on_that_card() -> None:
    """Also after templates have changed: a plan that its constraints no longer admit must not be shipped."""
    registry = load_family("gqa_attention").registry
    cases = {case.key: case for case in load_problem().suite("full")}
    for stored in read_records(PACKAGED / "nvidia_h200.json"):
        plan = FusionPlan.from_json(stored.record.plan)
        registry.check(plan, cases[stored.record.case_key], named_limits(90, 132))


def test_database_behind_the_records_says_the_same() -> None:
    with Reader.open(PACKAGED / "nvidia_h200.sqlite") as reader:
        in_database = {stored.record.case_key: stored.record.digest for stored in reader.active_records()}
        assert len(reader.trials(limit=2000)) > 1000
    in_json = {stored.record.case_key: stored.record.digest for stored in read_records(PACKAGED / "nvidia_h200.json")}
    assert in_database == in_json


def test_records_lie_where_the_package_looks() -> None:
    assert SHIPPED_DIR.resolve() == PACKAGED
    assert json.loads((PACKAGED / "nvidia_h200.json").read_text())["schema"]
