"""What only a GPU shows of `dispatch`: graph capture, streams, threads, devices; eager templates stand in."""

import threading

import pytest
import torch
from torch import Tensor

from tilewright.errors import NotWarmedUp
from tilewright.kernel_templates.inputs import make_inputs
from tilewright.problem import WorkloadCase, load_problem
from tilewright.runtime import dispatch, warmup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMOKE = load_problem().with_constants(**load_problem().smoke_constants)


def a_case() -> WorkloadCase:
    return SMOKE.case(batch_size=2, seq_len=33)


def arguments(device: str = "cuda") -> dict[str, Tensor]:
    inputs = make_inputs(a_case(), device)
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def captured(given: dict[str, Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = dispatch(**given)
    return graph, output


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's remark on the capture that failed
def test_a_cold_capture_is_a_clear_error_and_the_process_stays_usable() -> None:
    given = arguments()
    with pytest.raises(NotWarmedUp, match="warmup"):
        captured(given)
    assert torch.isfinite(dispatch(**given)).all()


def test_a_warm_capture_replays_on_new_input() -> None:
    warmup([a_case()])
    given = arguments()
    # cuBLAS makes its workspace on the first call, which a capture may not do.
    dispatch(**given)
    graph, output = captured(given)
    given["hidden_states"].normal_()
    graph.replay()
    assert torch.equal(output, dispatch(**given))


def test_side_streams_and_fresh_threads_give_the_same_answer() -> None:
    given = arguments()
    expected = dispatch(**given)
    torch.cuda.synchronize()
    answers: list[Tensor] = []

    def call() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            answers.append(dispatch(**given))
        stream.synchronize()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert all(torch.equal(answer, expected) for answer in answers)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_current_is_used_and_not_made_current() -> None:
    given = arguments("cuda:1")
    with torch.cuda.device(0):
        output = dispatch(**given)
        assert (output.device.index, torch.cuda.current_device()) == (1, 0)
    assert torch.equal(output.cpu(), dispatch(**{n: t.to("cuda:0") for n, t in given.items()}).cpu())
