"""What only a GPU shows of stale records, failing plans and the cost of a call; real kernels at small sizes."""

import dataclasses
import timeit
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from calls import SMOKE
from torch import Tensor

from tilewright.db.rows import RecordRow, StoredRecord, Verdict
from tilewright.errors import NotWarmedUp
from tilewright.kernel_templates.families import FAMILIES, load_family
from tilewright.kernel_templates.gqa_attention.common import INTERPRETED
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.kernel_templates.reference import run_ops
from tilewright.kernel_templates.tolerance import Expected, compare
from tilewright.problem import WorkloadCase
from tilewright.runtime import Grade, dispatch, forget, lookup, warmup
from tilewright.runtime.engine import Launcher, launcher_for
from tilewright.runtime.machine import machine_of
from tilewright.runtime.quarantine import quarantine_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(INTERPRETED.value), reason="kernels are interpreted in this process: run this file alone"),
]
Serve = Callable[..., None]
CASE = SMOKE.case(batch_size=2, seq_len=33)


@pytest.fixture(autouse=True)
def _real_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gqa_attention", "tilewright.kernel_templates.gqa_attention")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    load_family.cache_clear()
    forget()


def a_record(case: WorkloadCase = CASE, **environment: str) -> StoredRecord:
    """Of the default plan, as if it was tuned where `environment` says."""
    machine, registry = machine_of("cuda"), load_family("gqa_attention").registry
    plan = registry.default_plan(case, machine.limits)
    row = RecordRow(
        case.key, plan.to_json(), plan.digest, registry.source_hash(plan), Verdict.DEFAULT_KEPT, median_us=1.0,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    there = dataclasses.replace(machine.environment, **environment)
    return StoredRecord(row, there, case.problem.name, case.name, case.shape_axes)


def arguments() -> dict[str, Any]:
    inputs = make_inputs(CASE, "cuda", InputOptions(random_norm_weights=True))
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def complaint(given: dict[str, Any], output: Tensor) -> str:
    state = {**given, "rms_norm_eps": 1e-5}
    ops, names = load_family("gqa_attention").ops, CASE.problem.op_names
    wide = {name: value.float() if isinstance(value, Tensor) else value for name, value in state.items()}
    expected = Expected.of(run_ops(ops, names, state, CASE)["output"], run_ops(ops, names, wide, CASE)["output"])
    return compare("output", output, expected)[0]


def launcher() -> Launcher:
    return launcher_for(CASE, torch.device("cuda", torch.cuda.current_device()))


def test_a_stale_record_serves_after_its_check(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", "1")
    serve(a_record(triton="3.0.0"))
    given = arguments()
    assert complaint(given, dispatch(**given)) == ""
    assert launcher().found.grade is Grade.STALE


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's remark on the capture that failed
def test_a_stale_record_is_not_checked_inside_a_capture(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """G08: a clear error, a process that stays usable, and a replay that equals eager on new input."""
    monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", "1")
    serve(a_record(triton="3.0.0"))
    given, graph = arguments(), torch.cuda.CUDAGraph()
    with pytest.raises(NotWarmedUp, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dispatch(**given)
    warmup([CASE])
    dispatch(**given)  # cuBLAS makes its workspace on the first call, which a capture may not do
    with torch.cuda.graph(graph):
        output = dispatch(**given)
    given["hidden_states"].normal_()
    graph.replay()
    assert torch.equal(output, dispatch(**given))


def test_a_plan_that_does_not_fit_the_card_gives_way_on_its_first_launch(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The record is exact and its constraints let it pass, yet its first launch fails."""
    launch = Launcher._launch

    def out_of_resources(self: Launcher, tensors: dict[str, Any]) -> None:
        if self.found.grade is Grade.EXACT:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(300_000, 232_448, "shared memory")
        launch(self, tensors)

    monkeypatch.setattr(Launcher, "_launch", out_of_resources)
    serve(a_record())
    given = arguments()
    assert complaint(given, dispatch(**given)) == ""
    assert quarantine_file().exists()
    assert caplog.text.count("is not used any more") == 1


def test_a_remembered_lookup_of_the_current_gpu_takes_microseconds() -> None:
    lookup(CASE)
    best_s = min(timeit.repeat(lambda: lookup(CASE), number=1000, repeat=5)) / 1000
    assert best_s < 10e-6
