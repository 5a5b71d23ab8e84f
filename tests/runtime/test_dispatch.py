"""`dispatch` against the reference: variants, gradients, memory of earlier calls."""

import threading
from typing import Any

import pytest
import torch
from calls import BIASES, NORMS, SMOKE, a_case, arguments, reference
from eager_family import LAUNCHES
from torch import Tensor

from tilewright.errors import GradientNeeded, MachineUnfit, NotWarmedUp
from tilewright.kernel_templates.base import allocate
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.problem import Problem, load_problem
from tilewright.runtime import dispatch, gqa_attention, warmup
from tilewright.runtime.engine import launcher_for
from tilewright.runtime.memo import Memo


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


@pytest.mark.parametrize(("batch", "seq"), [(0, 9), (2, 0), (0, 0)])
def test_an_empty_batch_or_sequence_gives_an_empty_output_without_a_launch(batch: int, seq: int) -> None:
    given = arguments(a_case())
    empty = {"hidden_states": given["hidden_states"][:batch, :seq]}
    empty |= {name: given[name][:batch, :seq] for name in ("cos", "sin")}
    output = dispatch(**{**given, **empty})
    assert (output.shape, output.dtype, LAUNCHES) == ((batch, seq, 128), torch.bfloat16, [])


def test_a_given_output_that_would_cut_the_graph_is_a_clear_error() -> None:
    given = arguments(a_case())
    given["hidden_states"].requires_grad_()
    with pytest.raises(GradientNeeded, match="hidden_states requires a gradient"):
        dispatch(**given, output=torch.empty(2, 9, 128, dtype=torch.bfloat16))


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
