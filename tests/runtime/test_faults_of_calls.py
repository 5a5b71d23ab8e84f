"""Faults known from elsewhere, asked of a served call with the real kernels, interpreted: rows of the fault list."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import a_case, arguments, reference
from torch import Tensor

from tilewright.errors import UsageError
from tilewright.kernel_templates import families
from tilewright.problem import WorkloadCase
from tilewright.runtime import dispatch, forget
from tilewright.runtime.gqa_attention_kernels import dispatch_kv


@pytest.fixture(autouse=True)
def _real_kernels(_serving: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(families.FAMILIES, "gqa_attention", "tilewright.kernel_templates.gqa_attention")
    families.load_family.cache_clear()
    forget()
    yield
    families.load_family.cache_clear()


def block(given: dict[str, Tensor]) -> Tensor:
    return dispatch(**given)


def within_tolerance(found: Tensor, case: WorkloadCase, given: dict[str, Tensor]) -> bool:
    """No further from the float32 reference than twice the eager block is."""
    exact = reference(case, {name: t.float() for name, t in given.items()})
    error, allowed = ((t.float() - exact).abs() for t in (found, reference(case, given)))
    return bool(error.mean() <= 2 * allowed.mean() and error.max() <= 2 * allowed.max())


@pytest.mark.parametrize("seq_len", [64, 1])
@pytest.mark.parametrize("form", ["shared", "per row", "no batch", "stride 0"])
def test_g27_every_form_of_the_rotary_tables_turns_every_row(form: str, seq_len: int) -> None:
    case = a_case(3, seq_len)
    given = arguments(case)
    for name in ("cos", "sin"):
        table = given[name]
        forms = {"shared": table[:1], "per row": table, "no batch": table[0], "stride 0": table[:1].expand_as(table)}
        given[name] = forms[form]
    assert within_tolerance(dispatch(**given), case, given)


def test_g27_another_form_is_rejected_with_the_accepted_shapes() -> None:
    given = arguments(a_case(3, 7))
    with pytest.raises(UsageError, match=r"cos has shape \(2, 7, 64\); accepted: \(1, 7, 64\) or \(3, 7, 64\)"):
        dispatch(**{**given, "cos": given["cos"][:2]})


def in_nan_memory(tensor: Tensor) -> Tensor:
    """A view of these values with NaN before and behind them."""
    count = tensor.numel()
    memory = torch.full((count + 256,), torch.nan, dtype=tensor.dtype)
    memory[128 : 128 + count] = tensor.reshape(-1)
    return memory[128 : 128 + count].view_as(tensor)


def test_g28_dims_beyond_the_rotary_width_pass_through_and_nothing_beyond_the_tables_is_read() -> None:
    given = arguments(a_case())
    narrow = {name: in_nan_memory(given[name][..., :32]) for name in ("cos", "sin")}
    still = {"cos": torch.ones_like(given["cos"]), "sin": torch.zeros_like(given["sin"])}
    output, keys, _ = dispatch_kv({**given, **narrow})
    _, unturned, _ = dispatch_kv({**given, **still})
    assert output.isfinite().all()
    assert torch.equal(keys[..., 32:], unturned[..., 32:])
    assert not torch.equal(keys[..., :32], unturned[..., :32])


def test_g28_pairs_are_half_the_rotary_width_apart() -> None:
    """A key that is one-hot at dim 0 before the rotation lies in dims 0 and 16 after it, at rotary width 32."""
    given = {name: t for name, t in arguments(a_case(1, 4)).items() if "norm" not in name and "bias" not in name}
    given["hidden_states"] = torch.ones_like(given["hidden_states"])
    weight = torch.zeros_like(given["k_proj_weight"])
    weight[0::64] = 1 / 128
    given |= {"k_proj_weight": weight, "cos": torch.full((1, 4, 32), 0.5).bfloat16()}
    given["sin"] = torch.full((1, 4, 32), 0.25).bfloat16()
    _, keys, _ = dispatch_kv(given, head_dim=64)
    assert keys[0, 0, 0].nonzero().flatten().tolist() == [0, 16]
    assert keys[0, 0, 0, [0, 16]].tolist() == [0.5, 0.25]


@pytest.mark.parametrize(("batch", "seq"), [(0, 9), (2, 0)])
@pytest.mark.parametrize("way", ["eager", "compiled", "with keys and values"])
def test_g32_no_rows_give_an_empty_output(way: str, batch: int, seq: int) -> None:
    given = arguments(a_case())
    given |= {name: given[name][:batch, :seq] for name in ("hidden_states", "cos", "sin")}
    torch.compiler.reset()
    calls: dict[str, Any] = {
        "eager": block,
        "compiled": torch.compile(block, fullgraph=True, backend="aot_eager"),
        "with keys and values": lambda given: dispatch_kv(given)[0],
    }
    output = calls[way](given)
    assert (output.shape, output.dtype) == ((batch, seq, 128), torch.bfloat16)


def test_g32_no_rows_give_gradients_of_nothing() -> None:
    given = arguments(a_case())
    given |= {name: given[name][:0] for name in ("hidden_states", "cos", "sin")}
    given["q_proj_weight"].requires_grad_()
    dispatch(**given).sum().backward()
    assert given["q_proj_weight"].grad is not None
    assert not given["q_proj_weight"].grad.any()


def test_g33_tensors_on_two_devices_are_rejected() -> None:
    given = arguments(a_case())
    with pytest.raises(UsageError, match="k_proj_weight is on meta, hidden_states on cpu; all must be on one device"):
        dispatch(**{**given, "k_proj_weight": given["k_proj_weight"].to("meta")})


def test_g33_a_fresh_thread_may_make_the_first_call() -> None:
    case = a_case(1, 5)
    given = arguments(case)
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(dispatch(**given)))
    thread.start()
    thread.join()
    assert within_tolerance(outputs[0], case, given)


@pytest.mark.parametrize("name", ["hidden_states", "k_proj_weight", "o_proj_weight", "v_proj_bias", "cos"])
def test_g34_a_tensor_that_is_not_aligned_gives_the_same_numbers(name: str) -> None:
    given = arguments(a_case())
    odd = torch.zeros(given[name].numel() + 1, dtype=torch.bfloat16)[1:].view_as(given[name])
    odd.copy_(given[name])
    assert odd.data_ptr() % 16
    assert torch.equal(dispatch(**{**given, name: odd}), dispatch(**given))


def test_g34_a_weight_with_long_rows_gives_the_same_numbers() -> None:
    given = arguments(a_case())
    wide = torch.zeros(384, 129, dtype=torch.bfloat16)
    wide[:, :128] = given["q_proj_weight"]
    assert torch.equal(dispatch(**{**given, "q_proj_weight": wide[:, :128]}), dispatch(**given))


def test_g35_a_wanted_gradient_arrives() -> None:
    given = arguments(a_case())
    given["hidden_states"].requires_grad_()
    dispatch(**given).float().square().sum().backward()
    gradient = given["hidden_states"].grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_g35_parameters_without_a_wanted_gradient_work(mode: Any) -> None:
    given: dict[str, Tensor] = {name: torch.nn.Parameter(t) for name, t in arguments(a_case()).items()}
    with mode():
        output = dispatch(**given)
    assert not output.requires_grad
    assert within_tolerance(output, a_case(), {name: t.detach() for name, t in given.items()})
