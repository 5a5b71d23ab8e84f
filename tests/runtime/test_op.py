"""`dispatch` as torch sees it: its op under torch.compile, gradients, fake and meta tensors."""

import dataclasses
import threading
from typing import Any

import pytest
import torch
from calls import BIASES, NORMS, a_case, arguments, reference
from eager_family import CHAIN, LAUNCHES
from served import a_record
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.errors import GradientNeeded
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.runtime import dispatch, machine
from tilewright.runtime.gqa_attention import NAMES
from tilewright.runtime.gqa_attention_kernels import dispatch_kv

ABSENT = [(), BIASES, NORMS, (*BIASES, *NORMS)]
ABSENT_IDS = ["all inputs", "without bias", "without norm", "without both"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(**options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """`dispatch` compiled without graph breaks, and what counts its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(lambda given: dispatch(**given), fullgraph=True, backend=counter, **options), counter


def eager_gradients(given: dict[str, Tensor], case: Any, grad: Tensor) -> tuple[Tensor, ...]:
    """Of every input, by autograd through the eager block."""
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    state: dict[str, Any] = {**leaves, "rms_norm_eps": 1e-5}
    for op in CHAIN:
        if op != "qk_norm" or "q_norm_weight" in given:
            state.update(OPS[op](state, case))
    return torch.autograd.grad(state["output"], list(leaves.values()), grad)


@pytest.mark.parametrize("absent", ABSENT, ids=ABSENT_IDS)
def test_gradients_are_those_of_the_eager_block(absent: tuple[str, ...]) -> None:
    case = a_case()
    given = {name: t for name, t in arguments(case).items() if name not in absent}
    grad = torch.randn(2, 9, 128, dtype=torch.bfloat16)
    expected = eager_gradients(given, case, grad)
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    found = torch.autograd.grad(dispatch(**leaves, head_dim=64), list(leaves.values()), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", ["no batch", "one row of the batch"])
def test_shared_rotary_tables_get_the_gradient_of_every_row(form: str) -> None:
    case = a_case()
    given = arguments(case)
    shared = {n: given[n][:1] if form == "one row of the batch" else given[n][0] for n in ("cos", "sin")}
    full = {n: t.expand(2, 9, 64).contiguous().requires_grad_() for n, t in shared.items()}
    dispatch(**{**given, **full}).sum().backward()
    tables = {n: t.clone().requires_grad_() for n, t in shared.items()}
    dispatch(**{**given, **tables}).sum().backward()
    expected = full["cos"].grad.float().sum(0)  # type: ignore[union-attr]
    assert torch.allclose(tables["cos"].grad.float().reshape(9, 64), expected, atol=0.05, rtol=0.02)  # type: ignore[union-attr]


def test_a_gradient_goes_to_the_inputs_that_want_one() -> None:
    given = arguments(a_case())
    given["q_proj_weight"].requires_grad_()
    dispatch(**given).sum().backward()
    assert {name for name, t in given.items() if t.grad is not None} == {"q_proj_weight"}


def test_a_second_gradient_is_a_clear_error() -> None:
    given = arguments(a_case())
    given["hidden_states"].requires_grad_()
    with pytest.raises(GradientNeeded, match="create_graph"):
        torch.autograd.grad(dispatch(**given).sum(), given["hidden_states"], create_graph=True)


def test_an_op_for_caches_that_should_carry_a_gradient_is_a_clear_error() -> None:
    given = arguments(a_case())
    given["hidden_states"].requires_grad_()
    inputs = [given.get(name) for name in NAMES[:-1]]
    output, _ = torch.ops.tilewright.gqa_attention_kv(*inputs, 1e-5, None)
    with pytest.raises(GradientNeeded, match="inference"):
        output.sum().backward()


@pytest.mark.parametrize("absent", ABSENT, ids=ABSENT_IDS)
def test_a_compiled_call_without_graph_breaks_equals_eager(absent: tuple[str, ...]) -> None:
    given = {name: t for name, t in arguments(a_case()).items() if name not in absent}
    function = torch.compile(lambda given: dispatch(**given, head_dim=64), fullgraph=True, backend="aot_eager")
    assert torch.equal(function(given), dispatch(**given, head_dim=64))


def test_a_dynamic_batch_and_sequence_compile_once() -> None:
    function, counter = compiled(dynamic=True)
    counts = []
    for batch, seq in ((2, 9), (2, 10), (3, 9), (5, 7)):
        given = arguments(a_case(batch, seq))
        assert torch.equal(function(given), dispatch(**given))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_a_marked_batch_and_sequence_compile_once() -> None:
    function, counter = compiled()
    for batch, seq in ((2, 9), (4, 11)):
        given = arguments(a_case(batch, seq))
        for name in ("hidden_states", "cos", "sin"):
            torch._dynamo.mark_dynamic(given[name], 0)
            torch._dynamo.mark_dynamic(given[name], 1)
        assert torch.equal(function(given), dispatch(**given))
    assert counter.frame_count == 1


def test_a_static_compilation_is_made_anew_for_another_length() -> None:
    function, counter = compiled(dynamic=False)
    for seq in (9, 10):
        given = arguments(a_case(2, seq))
        assert torch.equal(function(given), dispatch(**given))
    assert counter.frame_count == 2


def test_a_compiled_call_runs_the_plan_of_the_shape_it_sees(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is found when the graph runs, not when it is traced."""
    case = a_case(2, 10)
    whole = FusionPlan((Stage("whole", {}),))
    here = machine.machine_of("interpret")
    source = load_family("gqa_attention").registry.source_hash(whole)
    serve(a_record(case, plan=whole.to_json(), environment=here.environment, source_hash=source))
    function, counter = compiled(dynamic=True)
    seen = []
    for seq in (30, 10):
        LAUNCHES.clear()
        function(arguments(a_case(2, seq)))
        seen.append((list(LAUNCHES), counter.frame_count))
    (far, first), (here_, second) = seen
    assert (far, here_, first) == (["projection", "norm_rope", "attention", "output"], ["whole"], second)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_gradients_are_the_eager_ones(dynamic: bool) -> None:
    function, _ = compiled(dynamic=dynamic)
    names = ("hidden_states", "k_proj_weight", "v_proj_bias", "q_norm_weight")
    for seq in (9, 12) if dynamic else (9,):
        given = arguments(a_case(2, seq))
        leaves = [given[name].requires_grad_() for name in names]
        expected = torch.autograd.grad(dispatch(**given).sum(), leaves)
        found = torch.autograd.grad(function(given).sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_call_with_parameters_works_where_no_gradient_is_recorded(mode: Any) -> None:
    given: dict[str, Tensor] = {n: torch.nn.Parameter(t) for n, t in arguments(a_case()).items()}
    function, _ = compiled()
    with mode():
        output = function(given)
        assert not output.requires_grad
        assert torch.equal(output, dispatch(**given))


def test_a_compiled_call_writes_a_given_output() -> None:
    given = arguments(a_case())
    function, _ = compiled()
    output = torch.empty(2, 9, 128, dtype=torch.bfloat16)
    assert function({**given, "output": output}).data_ptr() == output.data_ptr()
    assert torch.equal(output, dispatch(**given))


def test_a_compiled_call_rejects_an_output_of_another_shape() -> None:
    function, _ = compiled()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"output has shape \(2, 1, 128\)"):
        function({**arguments(a_case()), "output": torch.empty(2, 1, 128, dtype=torch.bfloat16)})


@pytest.mark.parametrize("name", ["gqa_attention", "gqa_attention_kv", "gqa_attention_backward"])
@pytest.mark.parametrize("layout", ["compact", "permuted"])
def test_opcheck_passes(name: str, layout: str) -> None:
    given = arguments(a_case())
    if layout == "permuted":
        given["hidden_states"] = given["hidden_states"].transpose(0, 1).contiguous().transpose(0, 1)
    if name == "gqa_attention":
        given["hidden_states"].requires_grad_()
    inputs: list[Any] = [*(given.get(name) for name in NAMES[:-1]), 1e-5, None]
    if name == "gqa_attention_backward":
        wanted = [n in ("cos", "o_proj_weight") for n in NAMES[:-1]]
        inputs = [torch.randn(2, 9, 128, dtype=torch.bfloat16), *inputs, wanted]
    torch.library.opcheck(getattr(torch.ops.tilewright, name).default, tuple(inputs))


def test_meta_tensors_give_the_shape() -> None:
    output = dispatch(**{name: t.to("meta") for name, t in arguments(a_case()).items()})
    assert (output.shape, output.dtype, output.device.type) == ((2, 9, 128), torch.bfloat16, "meta")


def test_fake_tensors_give_the_shape_without_a_launch() -> None:
    given = arguments(a_case())
    with FakeTensorMode() as mode:
        output = dispatch(**{name: mode.from_tensor(t) for name, t in given.items()})
    assert (output.shape, output.dtype, output.device.type, LAUNCHES) == ((2, 9, 128), torch.bfloat16, "cpu", [])


def test_a_plain_eager_call_goes_past_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.runtime.gqa_attention.by_op", lambda *a: pytest.fail("the op was called"))
    dispatch(**arguments(a_case()))


def test_threads_may_differentiate_at_once() -> None:
    given = arguments(a_case())
    expected: list[Tensor] = []
    found: list[Tensor] = []

    def call(into: list[Tensor]) -> None:
        hidden = given["hidden_states"].clone().requires_grad_()
        into.extend(torch.autograd.grad(dispatch(**{**given, "hidden_states": hidden}).sum(), hidden))

    call(expected)
    threads = [threading.Thread(target=call, args=(found,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(t, expected[0]) for t in found] == [True] * 4


def keeps_rows_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole block as one stage, whose packed rows never leave it."""
    registry = load_family("gqa_attention").registry
    whole = registry["whole"]

    def launch(tensors: Any, *rest: Any) -> None:
        whole.launch({**tensors, "qkv": torch.empty_like(tensors["qkv"])}, *rest)

    monkeypatch.setitem(registry._templates, "whole", dataclasses.replace(whole, launch=launch))


@pytest.mark.parametrize(("plan", "absent"), [*(("default", absent) for absent in ABSENT), ("whole", ())])
def test_keys_and_values_are_those_the_attention_saw(
    serve: Any, monkeypatch: pytest.MonkeyPatch, plan: str, absent: tuple[str, ...]
) -> None:
    case = a_case()
    given = {name: t for name, t in arguments(case).items() if name not in absent}
    if plan == "whole":
        keeps_rows_to_itself(monkeypatch)
        whole = FusionPlan((Stage("whole", {}),))
        here = machine.machine_of("interpret").environment
        source = load_family("gqa_attention").registry.source_hash(whole)
        serve(a_record(case, plan=whole.to_json(), environment=here, source_hash=source))
    output, keys, values = dispatch_kv(given, head_dim=64)
    assert (LAUNCHES == ["whole"]) == (plan == "whole")
    state: dict[str, Any] = {**given, "rms_norm_eps": 1e-5}
    for op in ("qkv_projection", "qk_norm", "rope"):
        if op != "qk_norm" or "q_norm_weight" in given:
            state.update(OPS[op](state, case))
    heads = state["qkv"].view(2, 9, 10, 64).transpose(1, 2)
    assert torch.equal(output, reference(case, given))
    assert torch.equal(keys, heads[:, 6:8])
    assert torch.equal(values, heads[:, 8:])


def test_keys_and_values_come_out_of_a_compiled_call() -> None:
    given = arguments(a_case())
    function = torch.compile(lambda given: dispatch_kv(given), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(function(given), dispatch_kv(given), strict=True))
