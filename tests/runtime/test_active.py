"""Which records `verify` looks at on a machine."""

import dataclasses
from collections.abc import Callable

from served import H200, PROBLEM, a_case, a_machine, a_plan, a_record

from tilewright.problem import load_problem
from tilewright.runtime.active import lookups_of_records, objection
from tilewright.runtime.layers import Layer
from tilewright.runtime.machine import Machine

Serve = Callable[..., None]


def found(machine: Machine, **options: bool) -> list[tuple[str, str]]:
    return [(one.case.name, objection(one)) for one in lookups_of_records(PROBLEM, machine, **options)]


def test_each_case_of_this_card_is_looked_at_once_small_ones_first(serve: Serve) -> None:
    serve(a_record(a_case(16, 128)), a_record(a_case(2, 100)), layer=Layer.USER)
    serve(a_record(a_case(2, 100)), layer=Layer.SHIPPED)
    assert found(a_machine()) == [("b2s100", ""), ("b16s128", "")]


def test_records_of_other_cards_and_problems_are_left_alone(serve: Serve) -> None:
    other = load_problem("glm_4_5_air_attention").parse_case("b2s100")
    serve(a_record(a_case(), environment=dataclasses.replace(H200, gpu_name="NVIDIA H100")), a_record(other))
    assert found(a_machine()) == []


def test_a_variant_in_another_dtype_is_looked_at_too(serve: Serve) -> None:
    case = PROBLEM.with_dtype("float16").case(batch_size=2, seq_len=100, weight_mode="packed")
    serve(a_record(case))
    [one] = lookups_of_records(PROBLEM, a_machine())
    assert one.case.key == case.key


def test_a_stale_record_is_an_objection_unless_it_is_allowed(serve: Serve) -> None:
    serve(a_record(a_case(), environment=dataclasses.replace(H200, triton="3.5.0")))
    assert found(a_machine(), allow_stale=False) == [("b4s512", "stale: triton 3.5.0 there, 3.6.0 here (older)")]
    assert found(a_machine(), allow_stale=True) == [("b4s512", "")]


def test_a_plan_that_cannot_run_is_an_objection_with_its_reason(serve: Serve) -> None:
    serve(a_record(a_case(), plan=a_plan(100).to_json()))
    [(_, why)] = found(a_machine())
    assert why.startswith("not served: projection: BLOCK_M=100 is not among")
