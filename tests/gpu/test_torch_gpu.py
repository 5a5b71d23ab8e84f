"""Graphs, compilation, streams and gradients with the real kernels."""

import threading
from typing import Any

import pytest
import torch
from calls import reference
from torch import Tensor

from tilewright.errors import NotWarmedUp
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.problem import WorkloadCase, load_problem
from tilewright.runtime import capture, dispatch, warmup
from tilewright.runtime.gqa_attention import NAMES
from tilewright.runtime.gqa_attention_kernels import dispatch_kv

pytestmark = pytest.mark.gpu
PROBLEM = load_problem()
SMALL = PROBLEM.with_constants(hidden_size=512, num_attention_heads=12, num_key_value_heads=2)


def a_case(batch_size: int = 1, seq_len: int = 128) -> WorkloadCase:
    return PROBLEM.case(batch_size=batch_size, seq_len=seq_len)


def arguments(case: WorkloadCase, device: str = "cuda") -> dict[str, Tensor]:
    inputs = make_inputs(case, device, InputOptions(random_norm_weights=True))
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def block(given: dict[str, Tensor]) -> Tensor:
    return dispatch(**given)


def scaled(given: dict[str, Tensor]) -> Tensor:
    """With an operation of torch's own behind it, so that there is something to compile."""
    return dispatch(**given) * 2


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), atol=2e-2 * float(expected.abs().max()), rtol=2e-2)


@pytest.mark.parametrize(
    "shape", [(1, 128), (2, 513), (3, 70)], ids=["record", "record of a ragged shape", "no record"]
)
def test_a_users_graph_works_right_after_warmup(shape: tuple[int, int]) -> None:
    case = a_case(*shape)
    warmup([case])
    given = arguments(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = dispatch(**given)
    given["hidden_states"].normal_()
    graph.replay()
    assert torch.equal(output, dispatch(**given))
    assert close(output, reference(case, given))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's remark on the capture that failed
def test_a_cold_graph_says_so_and_the_process_stays_usable() -> None:
    given = arguments(a_case(2, 257))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotWarmedUp, match="warmup"), torch.cuda.graph(graph):
        dispatch(**given)
    assert close(dispatch(**given), reference(a_case(2, 257), given))


def test_a_captured_case_replays_on_static_and_copied_inputs() -> None:
    case = a_case()
    given = arguments(case)
    replay = capture(case, given)
    assert torch.equal(replay(), dispatch(**given))
    given["hidden_states"].normal_()
    assert torch.equal(replay(), dispatch(**given))
    new = torch.randn_like(given["hidden_states"])
    assert torch.equal(replay(hidden_states=new), dispatch(**{**given, "hidden_states": new}))


def test_a_captured_case_replays_on_a_side_stream() -> None:
    case = a_case()
    given = arguments(case)
    replay = capture(case, given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = replay(hidden_states=given["hidden_states"] * 2).clone()
    stream.synchronize()
    assert torch.equal(found, dispatch(**given))


def test_a_captured_case_becomes_part_of_a_users_graph() -> None:
    case = a_case()
    given = arguments(case)
    replay = capture(case, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = replay() * 2
    given["hidden_states"].normal_()
    graph.replay()
    assert torch.equal(doubled, dispatch(**given) * 2)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_inside_a_graph_says_so_and_the_process_stays_usable() -> None:
    case = a_case()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotWarmedUp, match="graphs are not captured inside others"), torch.cuda.graph(graph):
        capture(case)
    given = arguments(case)
    assert torch.equal(capture(case, given)(), dispatch(**given))


def test_a_capture_survives_another_threads_work() -> None:
    case = a_case()
    given, other = arguments(case), arguments(a_case(2, 33))
    dispatch(**other)
    stop = threading.Event()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                dispatch(**other)
                torch.empty(1 << 22, device="cuda")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        replay = capture(case, given)
    finally:
        stop.set()
        thread.join()
    assert torch.equal(replay(), dispatch(**given))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_call_equals_eager(mode: str) -> None:
    function: Any = torch.compile(scaled, fullgraph=True, mode=mode)
    given = arguments(a_case())
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(function(given), scaled(given))


def test_a_compiled_call_follows_batch_and_sequence() -> None:
    function: Any = torch.compile(scaled, fullgraph=True, dynamic=True)
    for shape in ((1, 128), (2, 200), (3, 70)):
        given = arguments(a_case(*shape))
        assert torch.equal(function(given), scaled(given))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_the_eager_block(compiled: bool) -> None:
    case = SMALL.case(batch_size=2, seq_len=65)
    given = arguments(case)
    call: Any = torch.compile(block, fullgraph=True) if compiled else block
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    grad = torch.randn(2, 65, 512, device="cuda").bfloat16()
    found = torch.autograd.grad(call(leaves), list(leaves.values()), grad)
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    expected = torch.autograd.grad(_eager(exact, case), list(exact.values()), grad.double())
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


def _eager(tensors: dict[str, Tensor], case: WorkloadCase) -> Tensor:
    state: dict[str, Any] = {**tensors, "rms_norm_eps": 1e-5}
    for op in case.problem.op_names:
        state.update(OPS[op](state, case))
    output: Tensor = state["output"]
    return output


@pytest.mark.parametrize("name", ["gqa_attention", "gqa_attention_kv"])
def test_opcheck_passes(name: str) -> None:
    given = arguments(SMALL.case(batch_size=2, seq_len=33))
    given["hidden_states"].requires_grad_(name == "gqa_attention")
    inputs: list[Any] = [*(given.get(name) for name in NAMES[:-1]), 1e-5, None]
    torch.library.opcheck(getattr(torch.ops.tilewright, name).default, tuple(inputs))


@pytest.mark.parametrize("shape", [(1, 128), (2, 513), (3, 70)])
def test_keys_and_values_are_those_the_attention_saw(shape: tuple[int, int]) -> None:
    case = a_case(*shape)
    given = arguments(case)
    output, keys, values = dispatch_kv(given)
    state: dict[str, Any] = {name: t.float() for name, t in given.items()} | {"rms_norm_eps": 1e-5}
    for op in ("qkv_projection", "qk_norm", "rope"):
        state.update(OPS[op](state, case))
    heads = state["qkv"].unflatten(-1, (-1, 128)).transpose(1, 2)
    assert torch.equal(output, dispatch(**given))
    assert close(keys, heads[:, -16:-8])
    assert close(values, heads[:, -8:])


def test_compiled_calls_from_threads_on_side_streams_agree() -> None:
    given = arguments(a_case())
    function: Any = torch.compile(scaled, fullgraph=True)
    with torch.no_grad():
        expected = function(given)
    torch.cuda.synchronize()
    answers: list[Tensor] = []

    def call() -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            answers.append(function(given))
        stream.synchronize()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(answer, expected) for answer in answers] == [True] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("way", ["op", "captured"])
def test_a_device_that_is_not_current_is_used_and_not_made_current(way: str) -> None:
    case = a_case()
    given = arguments(case, "cuda:1")
    function: Any = torch.compile(block, fullgraph=True)
    with torch.cuda.device(0):
        output = function(given) if way == "op" else capture(case, given, device="cuda:1")()
        assert (output.device.index, torch.cuda.current_device()) == (1, 0)
        torch.cuda.synchronize(1)
        assert torch.equal(output, dispatch(**given))
