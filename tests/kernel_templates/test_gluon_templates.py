"""The Gluon templates: absent where they cannot run, small spaces, and kernels that compile for Hopper."""

from dataclasses import replace
from operator import attrgetter

import pytest
from compile_child import Request, compile_in_child

from tilewright.kernel_templates.base import Template
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, named_limits
from tilewright.kernel_templates.gqa_attention import gluon_attention, gluon_output, gluon_qkv
from tilewright.problem import load_problem, problem_names

HOPPER = named_limits(90, 132)
PROJECTIONS = (gluon_qkv.TEMPLATE, gluon_output.TEMPLATE)
TEMPLATES = (*PROJECTIONS, gluon_attention.TEMPLATE)
CASES = ("b1s7", "b1s128", "b4s293", "b8s512")
each_template = pytest.mark.parametrize("template", TEMPLATES, ids=attrgetter("name"))


@each_template
@pytest.mark.parametrize(
    "limits",
    [INTERPRETER_LIMITS, named_limits(80, 108), named_limits(100, 148), replace(HOPPER, triton=(3, 99))],
    ids=["interpreter", "ampere", "blackwell", "unknown-triton"],
)
def test_absent_where_it_cannot_run(template: Template, limits: object) -> None:
    case = load_problem().parse_case("b8s512")
    assert template.valid_configs(case, limits) == []  # type: ignore[arg-type]


@each_template
@pytest.mark.parametrize("name", CASES)
def test_space_is_small_and_holds_the_default(template: Template, name: str) -> None:
    case = load_problem().parse_case(name)
    configs = template.valid_configs(case, HOPPER)
    assert template.default(case, HOPPER) in configs
    assert len(configs) <= 60


@pytest.mark.parametrize("template", PROJECTIONS, ids=attrgetter("name"))
def test_absent_for_other_element_types(template: Template) -> None:
    case = load_problem().with_dtype("float16").parse_case("b8s512")
    assert template.valid_configs(case, HOPPER) == []


def test_defaults_compile_for_every_problem_within_shared_memory() -> None:
    requests = [Request(_module(t), "b8s512", 90, problem=name) for t in TEMPLATES for name in problem_names()]
    for request, (kernel,) in zip(requests, compile_in_child(requests), strict=True):
        assert kernel.shared_memory_bytes <= HOPPER.shared_memory_bytes, request
        assert kernel.instructions["HGMMA"] > 0, request


@each_template
def test_constraint_counts_at_least_the_shared_memory_that_is_used(template: Template) -> None:
    case = load_problem().parse_case("b8s512")
    configs = template.valid_configs(case, HOPPER)
    chosen = configs[:: max(1, len(configs) // 4)]
    compiled = compile_in_child([Request(_module(template), case.name, 90, values=dict(values)) for values in chosen])
    for values, (kernel,) in zip(chosen, compiled, strict=True):
        smaller = replace(HOPPER, shared_memory_bytes=kernel.shared_memory_bytes - 1)
        assert template.rejection(values, case, smaller) is not None


def _module(template: Template) -> str:
    return f"tilewright.kernel_templates.gqa_attention.{template.name}"


def test_tail_is_split_only_where_that_saves_half_a_wave() -> None:
    split = {name: gluon_qkv.TEMPLATE.default(load_problem().parse_case(name), HOPPER)["SPLIT_TAIL"] for name in CASES}
    assert split == {"b1s7": False, "b1s128": False, "b4s293": True, "b8s512": False}


def test_consumers_in_turn_have_equal_numbers_of_tiles() -> None:
    case = load_problem().parse_case("b8s512")
    values = {**gluon_attention.TEMPLATE.default(case, HOPPER), "HEADS_PER_TILE": 1, "PING_PONG": True}
    assert gluon_attention.TEMPLATE.rejection(values, case, HOPPER) == "consumers_have_equal_turns"
