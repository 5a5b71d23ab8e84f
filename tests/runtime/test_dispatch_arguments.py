"""The forms in which a caller may hand tensors to `dispatch`, and what is rejected."""

from typing import Any

import pytest
import torch
from calls import NORMS, SMOKE, a_case, arguments, reference

from tilewright.errors import UsageError
from tilewright.runtime import dispatch, gqa_attention
from tilewright.runtime.engine import Launcher


def test_rotary_width_may_be_narrower_than_the_head() -> None:
    case = a_case()
    given = arguments(case)
    given |= {name: given[name][..., :32].contiguous() for name in ("cos", "sin")}
    assert torch.equal(dispatch(**given), reference(case, given))


@pytest.mark.parametrize("seq_len", [1, 9])
@pytest.mark.parametrize("form", ["one row of the batch", "per row", "no batch", "stride 0", "strided", "mixed"])
def test_every_documented_form_of_the_rotary_tables_is_accepted(seq_len: int, form: str) -> None:
    case = a_case(3, seq_len)
    given = arguments(case)
    table = {name: given[name] for name in ("cos", "sin")}
    forms = {
        "one row of the batch": {n: t[:1] for n, t in table.items()},
        "per row": table,
        "no batch": {n: t[0] for n, t in table.items()},
        "stride 0": {n: t[:1].expand_as(t) for n, t in table.items()},
        "strided": {n: t.repeat(1, 1, 2)[..., ::2] for n, t in table.items()},
        "mixed": {"cos": table["cos"][:1], "sin": table["sin"]},
    }
    given |= forms[form]
    assert torch.equal(dispatch(**given), reference(case, given))


def test_templates_see_both_rotary_tables_in_one_layout() -> None:
    given = arguments(a_case(3))
    adapt = gqa_attention.rotary_adapters(given["cos"][:1], given["sin"], 3)
    assert adapt["cos"](given["cos"][:1]).stride() == adapt["sin"](given["sin"]).stride()


@pytest.mark.parametrize("batch", [1, 3])
def test_templates_see_rotary_tables_with_contiguous_rows(batch: int) -> None:
    strided = arguments(a_case(batch))["cos"].repeat(1, 1, 2)[..., ::2]
    seen = gqa_attention.rotary_adapters(strided, strided, batch)["cos"](strided)
    assert seen[0].is_contiguous()
    assert torch.equal(seen, strided)


@pytest.mark.parametrize("shape", [(2, 9, 64), (3, 8, 64), (4, 3, 9, 64)])
def test_other_rotary_shapes_are_rejected_with_the_accepted_ones(shape: tuple[int, ...]) -> None:
    given = arguments(a_case(3, 9))
    with pytest.raises(UsageError, match=r"cos has shape .*accepted: \(1, 9, 64\) or \(3, 9, 64\) or \(9, 64\)"):
        dispatch(**{**given, "cos": torch.zeros(shape, dtype=torch.bfloat16)})


def test_transposed_hidden_states_give_the_same_numbers() -> None:
    case = a_case()
    given = arguments(case)
    expected = dispatch(**given)
    turned = given["hidden_states"].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(dispatch(**{**given, "hidden_states": turned}), expected)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What launchers were handed, call by call."""
    calls: list[dict[str, Any]] = []
    launch = Launcher.__call__

    def recording(self: Launcher, tensors: dict[str, Any]) -> None:
        calls.append(dict(tensors))
        launch(self, tensors)

    monkeypatch.setattr(Launcher, "__call__", recording)
    return calls


def test_templates_see_aligned_tensors_whatever_the_caller_has(seen: list[dict[str, Any]]) -> None:
    given = arguments(a_case())
    expected = dispatch(**given)
    for name in ("hidden_states", "k_proj_bias", "cos"):
        odd = torch.zeros(given[name].numel() + 1, dtype=torch.bfloat16)[1:].view_as(given[name])
        odd.copy_(given[name])
        assert torch.equal(dispatch(**{**given, name: odd}), expected)
        assert seen[-1][name].data_ptr() % 16 == 0


def test_a_weight_with_long_rows_is_copied_with_one_warning(
    seen: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(a_case())
    expected = dispatch(**given)
    wide = torch.zeros(128, 385, dtype=torch.bfloat16)
    wide[:, :384] = given["o_proj_weight"]
    for _ in range(2):
        assert torch.equal(dispatch(**{**given, "o_proj_weight": wide[:, :384]}), expected)
    assert seen[-1]["o_proj_weight"].is_contiguous()
    said = [r.getMessage() for r in caplog.records if "copied on every call" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("o_proj_weight (128, 384)")


def test_packed_weights_are_told_by_their_place_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    made = gqa_attention.launcher_for
    monkeypatch.setattr(gqa_attention, "launcher_for", lambda case, d: modes.append(case.weight_mode) or made(case, d))
    for packed in (True, False):
        given = arguments(a_case(packed=packed))
        assert torch.equal(dispatch(**given), reference(a_case(), given))
    assert modes == ["packed", "separate"]


def test_an_empty_call_is_checked_like_any_other() -> None:
    given = arguments(a_case())
    empty = {name: given[name][:0] for name in ("hidden_states", "cos", "sin")}
    with pytest.raises(UsageError, match="o_proj_weight"):
        dispatch(**{**given, **empty, "o_proj_weight": given["o_proj_weight"][:, :5]})


BAD = [
    ({"hidden_states": torch.zeros(9, 128, dtype=torch.bfloat16)}, r"hidden_states has shape \(9, 128\)"),
    ({"hidden_states": torch.zeros(2, 9, 128)}, "hidden_states has dtype torch.float32; accepted: torch.bfloat16"),
    ({"k_proj_weight": torch.zeros(128, 128, dtype=torch.float16)}, "k_proj_weight has dtype torch.float16"),
    ({"o_proj_weight": torch.zeros(128, 384, dtype=torch.bfloat16, device="meta")}, "o_proj_weight is on meta"),
    ({"q_proj_weight": torch.zeros(385, 128, dtype=torch.bfloat16)}, "q_out_features is 385"),
    ({"q_proj_weight": torch.zeros(320, 128, dtype=torch.bfloat16)}, "q_out_features is 320"),
    ({"k_proj_bias": None}, "k_proj_bias is None"),
    ({"k_norm_weight": None}, "k_norm_weight is None"),
    ({"cos": None}, "cos is None"),
    ({"q_proj_weight": None}, "q_proj_weight is None"),
    ({"q_proj_weight": 3}, "q_proj_weight must be a torch.Tensor, got int"),
    ({"sin": [1.0]}, "sin must be a torch.Tensor, got list"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
    ({"head_dim": 128}, "q_norm_weight has shape"),
    ({"head_dim": 96}, "head_dim=96; accepted: 64, 128"),
    ({"output": torch.zeros(2, 9, 127, dtype=torch.bfloat16)}, "output has shape"),
    ({"output": torch.zeros(2, 128, 9, dtype=torch.bfloat16).transpose(1, 2)}, "output must be contiguous"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[message for _, message in BAD])
def test_a_wrong_argument_is_named_with_what_is_accepted(changed: dict[str, object], message: str) -> None:
    given: dict[str, object] = {**arguments(a_case()), **changed}
    with pytest.raises(UsageError, match=message):
        dispatch(**given)  # type: ignore[arg-type]


def test_query_heads_must_be_a_multiple_of_kv_heads() -> None:
    case = SMOKE.with_constants(num_attention_heads=3).case(batch_size=1, seq_len=4)
    with pytest.raises(UsageError, match="3 query heads, accepted: a multiple of the 2"):
        dispatch(**arguments(case))


def test_an_ambiguous_head_dim_is_asked_for() -> None:
    given = {name: t for name, t in arguments(a_case()).items() if name not in NORMS}
    with pytest.raises(UsageError, match="pass head_dim=64 or 128"):
        dispatch(**given)


def test_the_given_output_is_written_and_returned() -> None:
    case = a_case()
    given = arguments(case)
    output = torch.full((2, 9, 128), float("nan"), dtype=torch.bfloat16)
    assert dispatch(**given, output=output) is output
    assert torch.equal(output, reference(case, given))
