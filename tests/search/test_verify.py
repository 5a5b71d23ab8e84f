"""The gate: every wrong implementation is rejected for its own reason, every right one passes."""

import math
from dataclasses import replace

import pytest
import torch
import wrong_kernels

from tilewright.db.rows import Status
from tilewright.kernel_templates import families
from tilewright.kernel_templates.device import INTERPRETER_LIMITS
from tilewright.kernel_templates.families import Family, load_family
from tilewright.kernel_templates.inputs import InputOptions
from tilewright.kernel_templates.plan import FusionPlan, Registry, Stage
from tilewright.problem import WorkloadCase, load_problem, problem_names
from tilewright.search.case_state import CaseState
from tilewright.search.tolerance import MOST_RELATIVE_ERROR, bound
from tilewright.search.verify import Finding, quick_check, strict_check

CPU = torch.device("cpu")
# Only the strict level can see these: other lengths, other inputs, norm weights that are not one, tiny heads.
STRICT_ONLY = {"right_at_whole_tiles_only", "cached_output", "norm_weight_ignored", "eps_outside_the_root"}


def a_case(name: str = "b1s16") -> WorkloadCase:
    return load_problem().at_suite("smoke").parse_case(name)


def family_with(compute: wrong_kernels.Compute) -> Family:
    family = load_family("gqa_attention")
    return replace(family, registry=Registry([*family.registry.values(), wrong_kernels.wrong(compute)]))


def plan_with(compute: wrong_kernels.Compute) -> FusionPlan:
    """Library and default parts around the wrong one."""
    tilings = {
        ("qkv_projection",): ("*", "norm_rope", "sdpa_output"),
        ("qk_norm", "rope"): ("cublas_qkv", "*", "sdpa_output"),
        ("attention",): ("cublas_qkv", "norm_rope", "*", "cublas_output"),
        ("output_projection",): ("cublas_qkv", "norm_rope", "sdpa", "*"),
    }
    registry = load_family("gqa_attention").registry
    stages = []
    for name in tilings[wrong_kernels.ALL[compute]]:
        values = {} if name == "*" else registry[name].default(a_case(), INTERPRETER_LIMITS)
        stages.append(Stage(compute.__name__ if name == "*" else name, values))
    return FusionPlan(tuple(stages))


def quick(compute: wrong_kernels.Compute, case: WorkloadCase) -> Finding:
    state = CaseState(case, family_with(compute), CPU)
    return quick_check(state, Stage(compute.__name__, {}))


def strict(compute: wrong_kernels.Compute, case: WorkloadCase) -> Finding:
    wrong_kernels._FIRST.clear()
    return strict_check(family_with(compute), case, plan_with(compute), CPU, INTERPRETER_LIMITS)


@pytest.mark.parametrize("compute", wrong_kernels.ALL, ids=lambda compute: compute.__name__)
def test_wrong_implementation_is_rejected(compute: wrong_kernels.Compute) -> None:
    case = a_case()
    found = quick(compute, case)
    if compute.__name__ in STRICT_ONLY:
        assert found.status is Status.OK, "the quick check sees it now: take it off the list"
        found = strict(compute, case)
    assert found.status is Status.WRONG
    assert found.reason


def test_reasons_say_what_is_wrong() -> None:
    reasons = {c.__name__: quick(c, a_case()).reason for c in wrong_kernels.ALL}
    assert "relative error" in reasons["mask_off_by_one"]
    assert "not finite" in reasons["only_even_rows"]
    assert "not finite" in reasons["stale_scratch"]
    assert "changes its input" in reasons["in_place_input"]


def test_one_wrong_row_among_many_is_seen() -> None:
    """Its share of the whole is small; the worst row gives it away."""

    def last_row(t: wrong_kernels.Tensors, case: WorkloadCase) -> dict[str, torch.Tensor]:
        made = dict(wrong_kernels.output_projection(t, case))
        made["output"][0, -1] *= 1.04
        return made

    case = a_case("b8s67")
    wrong_kernels.ALL[last_row] = ("output_projection",)
    try:
        found = quick(last_row, case)
    finally:
        del wrong_kernels.ALL[last_row]
    assert found.status is Status.WRONG
    assert "worst row" in found.reason


@pytest.mark.parametrize("problem", problem_names())
def test_every_default_is_accepted(problem: str) -> None:
    case = load_problem(problem).at_suite("smoke").parse_case("b2s7")
    family = load_family("gqa_attention")
    state = CaseState(case, family, CPU)
    for template in family.registry.values():
        values = template.default(case, INTERPRETER_LIMITS)
        finding = quick_check(state, Stage(template.name, values), InputOptions(4, True))
        assert finding.status is Status.OK, f"{template.name}: {finding.reason}"
        assert finding.error_ratio is not None
        assert finding.error_ratio <= 2


def test_right_plan_passes_the_strict_level_and_repeats_itself() -> None:
    family = load_family("gqa_attention")
    plan = family.registry.default_plan(a_case(), INTERPRETER_LIMITS)
    finding = strict_check(family, a_case(), plan, CPU, INTERPRETER_LIMITS)
    assert (finding.status, finding.reason, finding.deterministic) == (Status.OK, "", True)


def test_result_that_varies_is_told() -> None:
    calls = iter(range(10**6))

    def wobbles(t: wrong_kernels.Tensors, case: WorkloadCase) -> dict[str, torch.Tensor]:
        made = dict(wrong_kernels.output_projection(t, case))
        made["output"].view(-1)[0] *= 1 + 0.01 * (next(calls) % 2)
        return made

    wrong_kernels.ALL[wobbles] = ("output_projection",)
    try:
        found = strict(wobbles, a_case())
    finally:
        del wrong_kernels.ALL[wobbles]
    assert (found.status, found.deterministic) == (Status.OK, False)


@pytest.mark.parametrize("eager_error", [0.0, 1e-4, 3e-3, 0.04])
def test_bound_is_twice_the_eager_error_under_a_cap(eager_error: float) -> None:
    assert bound(eager_error) <= max(2 * eager_error, 2.1e-6)
    assert bound(eager_error) <= MOST_RELATIVE_ERROR
    assert math.isfinite(bound(eager_error))


def test_families_are_as_they_were() -> None:
    """The wrong ones never enter the registry that runs are made from."""
    names = {compute.__name__ for compute in wrong_kernels.ALL}
    assert not names & set(families.load_family("gqa_attention").registry)
