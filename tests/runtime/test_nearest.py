"""The rule by which an untuned shape inherits the plan of a near one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from served import H200, a_case, a_machine, a_plan, a_record

from tilewright.runtime import Grade, lookup

Serve = Callable[..., None]


@pytest.mark.parametrize(
    ("asked", "grade"),
    [
        ((1, 1024), Grade.EXACT),
        ((1, 1000), Grade.TRANSFERRED),
        ((8, 4096), Grade.EXACT),
        ((1, 2048), Grade.TRANSFERRED),
        ((1, 2049), Grade.DEFAULT),
        ((1, 1), Grade.DEFAULT),
        ((4, 2560), Grade.DEFAULT),
        ((64, 4096), Grade.DEFAULT),
        ((1, 131072), Grade.DEFAULT),
    ],
)
def test_near_shapes_inherit_a_plan_and_far_ones_do_not(serve: Serve, asked: tuple[int, int], grade: Grade) -> None:
    serve(a_record(a_case(1, 1024)), a_record(a_case(8, 4096)))
    assert lookup(a_case(*asked), a_machine()).grade is grade


def test_the_same_tokens_in_far_axes_are_not_near(serve: Serve) -> None:
    serve(a_record(a_case(16, 128)))
    assert lookup(a_case(4, 512), a_machine()).grade is Grade.DEFAULT


@pytest.mark.parametrize("reverse", [False, True])
def test_the_nearest_shape_is_chosen_by_tokens_then_length_then_name(serve: Serve, reverse: bool) -> None:
    near = [a_case(4, 600), a_case(4, 500), a_case(3, 512), a_case(5, 600)]
    records = [a_record(case) for case in near]
    serve(*(reversed(records) if reverse else records))
    assert lookup(a_case(4, 512), a_machine()).record is records[1]


def test_equal_token_counts_are_told_apart_by_length(serve: Serve) -> None:
    records = [a_record(a_case(4, 768)), a_record(a_case(6, 512))]
    serve(*records)
    assert lookup(a_case(4, 512), a_machine()).record is records[1]


@pytest.mark.parametrize("change", [{"gpu_name": "NVIDIA H100"}, {"triton": "3.5.0"}])
def test_a_near_shape_of_another_card_or_compiler_is_not_inherited(serve: Serve, change: dict[str, Any]) -> None:
    serve(a_record(a_case(4, 500), environment=dataclasses.replace(H200, **change)))
    assert lookup(a_case(4, 512), a_machine()).grade is Grade.DEFAULT


def test_a_near_shape_of_another_template_source_is_not_inherited(serve: Serve) -> None:
    serve(a_record(a_case(4, 500), source_hash="0" * 16))
    assert lookup(a_case(4, 512), a_machine()).grade is Grade.DEFAULT


def test_ties_go_to_the_first_name(serve: Serve) -> None:
    records = [a_record(a_case(4, 1024)), a_record(a_case(4, 256))]
    serve(*records)
    assert lookup(a_case(4, 512), a_machine()).record is records[0]


def test_a_plan_that_the_shape_forbids_gives_way_to_the_next_nearest(serve: Serve) -> None:
    near = a_record(a_case(4, 130), plan=a_plan(128).to_json())
    serve(near, a_record(a_case(4, 150)))
    found = lookup(a_case(4, 127), a_machine())
    assert (found.grade, found.plan) == (Grade.TRANSFERRED, a_plan(64))


def test_packed_weights_use_a_record_of_separate_ones_when_they_have_none(serve: Serve) -> None:
    serve(a_record(a_case()))
    assert lookup(a_case(weight_mode="packed"), a_machine()).grade is Grade.TRANSFERRED
    assert lookup(a_case(weight_mode="separate"), a_machine()).grade is Grade.EXACT
