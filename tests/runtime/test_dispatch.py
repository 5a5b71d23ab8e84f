"""`dispatch` against the reference, over the forms in which a caller may hand in tensors."""

import threading
from typing import Any

import pytest
import torch
from eager_family import LAUNCHES
from torch import Tensor

from tilewright.errors import GradientNeeded, MachineUnfit, NotWarmedUp, UsageError
from tilewright.kernel_templates.base import allocate
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.kernel_templates.reference import run_ops
from tilewright.problem import Problem, WorkloadCase, load_problem
from tilewright.runtime import dispatch, gqa_attention, warmup
from tilewright.runtime.engine import Launcher, launcher_for
from tilewright.runtime.memo import Memo

SMOKE = load_problem().with_constants(**load_problem().smoke_constants)
BIASES = ("q_proj_bias", "k_proj_bias", "v_proj_bias")
NORMS = ("q_norm_weight", "k_norm_weight")


def a_case(batch_size: int = 2, seq_len: int = 9, *, packed: bool = False) -> WorkloadCase:
    return SMOKE.case(batch_size=batch_size, seq_len=seq_len, weight_mode="packed" if packed else "separate")


def arguments(case: WorkloadCase) -> dict[str, Tensor]:
    inputs = make_inputs(case, "cpu", InputOptions(random_norm_weights=True))
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def reference(case: WorkloadCase, given: dict[str, Tensor]) -> Tensor:
    """The eager block on contiguous copies, full tables."""
    tensors = {name: t.contiguous() for name, t in given.items()}
    shape = (case["batch_size"], case["seq_len"], -1)
    for name in ("cos", "sin"):
        tensors[name] = tensors[name].expand(shape).contiguous()
    names = [op for op in case.problem.op_names if op != "qk_norm" or "q_norm_weight" in given]
    output = run_ops(OPS, names, {**tensors, "rms_norm_eps": 1e-5}, case)["output"]
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("problem", [SMOKE, load_problem()], ids=["smoke", "published"])
@pytest.mark.parametrize("weight_mode", ["separate", "packed"])
def test_a_call_is_the_case_that_was_tuned(problem: Problem, weight_mode: Any) -> None:
    case = problem.case(batch_size=3, seq_len=70, weight_mode=weight_mode)
    names = [spec.name for spec in problem.inputs if spec.shape is not None]
    assert gqa_attention.infer(allocate(case, names, "meta"), "bfloat16", None, weight_mode).key == case.key


def test_dispatch_equals_the_eager_block() -> None:
    case = a_case()
    given = arguments(case)
    assert torch.equal(dispatch(**given), reference(case, given))


@pytest.mark.parametrize(
    "absent", [BIASES, NORMS, (*BIASES, *NORMS)], ids=["without bias", "without norm", "without both"]
)
def test_optional_inputs_may_be_left_out(absent: tuple[str, ...]) -> None:
    case = a_case()
    given = {name: t for name, t in arguments(case).items() if name not in absent}
    assert torch.equal(dispatch(**given, head_dim=64), reference(case, given))


def test_float16_is_accepted() -> None:
    case = a_case()
    given = {name: t.half() for name, t in arguments(case).items()}
    assert torch.equal(dispatch(**given), reference(case, given))


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


@pytest.mark.parametrize(("batch", "seq"), [(0, 9), (2, 0), (0, 0)])
def test_an_empty_batch_or_sequence_gives_an_empty_output_without_a_launch(batch: int, seq: int) -> None:
    given = arguments(a_case())
    empty = {"hidden_states": given["hidden_states"][:batch, :seq]}
    empty |= {name: given[name][:batch, :seq] for name in ("cos", "sin")}
    output = dispatch(**{**given, **empty})
    assert (output.shape, output.dtype, LAUNCHES) == ((batch, seq, 128), torch.bfloat16, [])


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


def test_a_wanted_gradient_is_a_clear_error() -> None:
    given = arguments(a_case())
    given["hidden_states"].requires_grad_()
    with pytest.raises(GradientNeeded, match="hidden_states requires a gradient"):
        dispatch(**given)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_work_where_no_gradient_is_recorded(mode: type[torch.no_grad]) -> None:
    case = a_case()
    given = arguments(case)
    expected = reference(case, given)
    parameters = {n: torch.nn.Parameter(t) if n.endswith("weight") else t for n, t in given.items()}
    with mode():
        assert torch.equal(dispatch(**parameters), expected)


def test_inputs_are_left_as_they_were() -> None:
    given = arguments(a_case())
    before = {name: t.clone() for name, t in given.items()}
    dispatch(**given)
    assert all(torch.equal(given[name], before[name]) for name in given)


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(MachineUnfit, match="TRITON_INTERPRET=1"):
        dispatch(**arguments(a_case()))


def test_a_signature_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    prepare = gqa_attention._prepare
    monkeypatch.setattr(gqa_attention, "_prepare", lambda *a: prepared.append(a) or prepare(*a))
    for seed in range(3):
        given = make_inputs(a_case(), "cpu", InputOptions(seed=seed))
        dispatch(**given)  # type: ignore[arg-type]
    assert len(prepared) == 1


def test_threads_get_the_same_answer() -> None:
    case = a_case()
    given = arguments(case)
    expected = reference(case, given)
    wrong = []

    def call() -> None:
        wrong.extend(1 for _ in range(5) if not torch.equal(dispatch(**given), expected))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_warmup_runs_the_plan_of_each_case() -> None:
    warmup([a_case(), a_case(packed=True)], "interpret")
    assert LAUNCHES == ["projection", "norm_rope", "attention", "output"] * 2


def test_a_capture_of_a_cold_call_names_warmup_and_the_call_works_later(monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_case()
    launcher = launcher_for(case, torch.device("cpu"))
    monkeypatch.setattr(launcher, "_index", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotWarmedUp, match=r"tilewright\.runtime\.warmup"):
        dispatch(**arguments(case))
    monkeypatch.setattr(launcher, "_index", None)
    given = arguments(case)
    assert torch.equal(dispatch(**given), reference(case, given))


def test_a_launcher_is_ready_after_its_first_call() -> None:
    launcher = launcher_for(a_case(), torch.device("cpu"))
    assert not launcher.ready
    dispatch(**arguments(a_case()))
    assert launcher.ready


def test_intermediates_are_not_kept_between_calls() -> None:
    case = a_case()
    dispatch(**arguments(case))
    kept = [value for value in vars(launcher_for(case, torch.device("cpu"))).values() if isinstance(value, Tensor)]
    assert kept == []


def test_the_memo_is_bounded_and_drops_the_oldest() -> None:
    memo: Memo[int, int] = Memo(capacity=100)
    for key in range(1000):
        memo.keep(key, key)
    assert (len(memo), memo.get(999), memo.get(0)) == (100, 999, None)
