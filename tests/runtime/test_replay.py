"""`capture`: its contract where there is no graph; what needs one is in test_torch_gpu.py."""

from typing import Any

import pytest
import torch
from calls import a_case, arguments, reference
from torch import Tensor

from tilewright.errors import UsageError
from tilewright.problem import load_problem
from tilewright.runtime import capture


def test_static_inputs_are_used_in_place() -> None:
    case = a_case()
    given = arguments(case)
    replay = capture(case, given)
    assert torch.equal(replay(), reference(case, given))
    given["hidden_states"].mul_(0.5)
    assert torch.equal(replay(), reference(case, given))


def test_given_inputs_are_copied_into_the_static_ones() -> None:
    case = a_case()
    given = arguments(case)
    replay = capture(case, given)
    new = torch.randn_like(given["hidden_states"])
    assert torch.equal(replay(hidden_states=new), reference(case, {**given, "hidden_states": new}))
    assert torch.equal(given["hidden_states"], new)


def test_the_output_is_one_tensor() -> None:
    case = a_case()
    replay = capture(case, arguments(case))
    assert replay() is replay.output


@pytest.mark.parametrize("packed", [False, True])
def test_inputs_that_are_not_given_are_allocated(packed: bool) -> None:
    case = a_case(packed=packed)
    given = arguments(case)
    replay = capture(case)
    assert torch.equal(replay(**given), reference(case, given))


def test_parameters_may_be_static_inputs() -> None:
    case = a_case()
    given: dict[str, Tensor] = {name: torch.nn.Parameter(t) for name, t in arguments(case).items()}
    assert not capture(case, given)().requires_grad


def test_a_scalar_may_be_given() -> None:
    case = a_case()
    given = arguments(case)
    assert not torch.equal(capture(case, {**given, "rms_norm_eps": 3.0})().clone(), capture(case, given)())


@pytest.mark.parametrize("name", ["glm_4_5_air_attention", "qwen3_attention"])
def test_other_problems_are_captured_too(name: str) -> None:
    problem = load_problem(name)
    replay = capture(problem.with_constants(**problem.smoke_constants).case(batch_size=2, seq_len=5))
    assert replay.output.shape == (2, 5, 128)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(1)}, "no input 'hidden'; it has hidden_states"),
    ({"hidden_states": torch.zeros(2, 8, 128, dtype=torch.bfloat16)}, r"hidden_states must be a tensor \(2, 9, 128\)"),
    ({"hidden_states": torch.zeros(2, 9, 128)}, "torch.bfloat16 on cpu, got .* torch.float32"),
    ({"cos": None}, "cos must be a tensor .* got None"),
    ({"cos": torch.zeros(2, 64, 9, dtype=torch.bfloat16).mT}, "cos must be contiguous"),
]


@pytest.mark.parametrize(("inputs", "message"), BAD, ids=[message for _, message in BAD])
def test_an_input_that_does_not_fit_is_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        capture(a_case(), inputs)


@pytest.mark.parametrize("new", [{"hiden": torch.zeros(1)}, {"hidden_states": torch.zeros(9, 128)}])
def test_a_copied_input_that_does_not_fit_is_named(new: dict[str, Tensor]) -> None:
    replay = capture(a_case())
    with pytest.raises(UsageError, match=next(iter(new))):
        replay(**new)
