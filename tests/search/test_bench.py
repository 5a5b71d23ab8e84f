"""What a bench reports of given rounds."""

from toys import FAMILY, LIMITS, a_case

from tilewright.problem import Ceilings
from tilewright.search.bench import OURS, BenchReport, summarise
from tilewright.search.outcome import FinalSamples

PLAN = FAMILY.registry.default_plan(a_case(), LIMITS)


def report(*rounds: dict[str, float], measures: bool = True) -> BenchReport:
    ceilings = Ceilings(790e12, 4.3e12) if measures else None
    cases = tuple(
        summarise(a_case(), PLAN, "exact", FinalSamples({n: (t,) * 12 for n, t in times.items()}), ceilings)
        for times in rounds
    )
    return BenchReport("problem", {}, {}, cases, "0", "now", measures=measures)


def test_best_baseline_of_each_case_is_the_one_compared_with() -> None:
    content = report({OURS: 90, "eager": 900, "torch_compile": 100}, {OURS: 110, "eager": 900, "torch_compile": 100})
    total = content.aggregates()
    assert total["mean_us"] == {"eager": 900, OURS: 100, "torch_compile": 100}
    assert total["ratio_of_means"] == 1.0
    assert total["worst_ratio"] == 1.1
    assert content.worst_ratio == 1.1


def test_mean_is_missing_where_a_case_lacks_the_contestant() -> None:
    content = report({OURS: 90, "eager": 900, "torch_compile": 100}, {OURS: 110, "torch_compile": 100})
    assert content.aggregates()["mean_us"]["eager"] is None


def test_case_in_which_ours_failed_is_no_comparison() -> None:
    content = report({"eager": 900})
    assert content.compared == []
    assert "no comparison" in content.text()
    assert content.worst_ratio == float("inf")


def test_times_of_the_interpreter_are_shown_nowhere() -> None:
    content = report({OURS: 123.25, "eager": 900}, measures=False)
    assert "123.25" not in str(content.to_json())
    assert "123" not in content.text() + content.cases[0].summary
    assert content.to_json()["cases"][0]["ran"] == ["eager", OURS]
