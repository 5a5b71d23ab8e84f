"""Arguments of `dispatch` and what it must return, for tests."""

from torch import Tensor

from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.kernel_templates.reference import run_ops
from tilewright.problem import WorkloadCase, load_problem

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
