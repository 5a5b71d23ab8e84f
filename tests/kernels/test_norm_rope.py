"""Norm and rotation in place against the oracle, in the interpreter."""

import dataclasses

import pytest
import torch

from tilewright.kernel_templates.base import Values, run_kernel
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, named_limits
from tilewright.kernel_templates.gqa_attention.norm_rope import TEMPLATE
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.reference import cast, run_ops
from tilewright.problem import WorkloadCase, load_problem

SMALL = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
Inputs = dict[str, object]


def a_case(
    seq_len: int = 17, *, ops: tuple[str, ...] = ("qk_norm", "rope"), dtype: str = "bfloat16", **constants: int
) -> WorkloadCase:
    problem = load_problem().with_dtype(dtype).with_constants(**{**SMALL, **constants})
    kept = tuple(op for op in problem.ops if op.name in ops or op.name not in ("qk_norm", "rope"))
    return dataclasses.replace(problem, ops=kept).case(batch_size=2, seq_len=seq_len)


def guarded(values: torch.Tensor) -> torch.Tensor:
    """The same values in front of NaN memory."""
    memory = torch.full((values.numel() + 16 * 1024,), float("nan"), dtype=values.dtype)
    memory[: values.numel()] = values.flatten()
    return memory[: values.numel()].view(values.shape)


def make_inputs(case: WorkloadCase, *, width: int | None = None, table_batch: int = 2, scale: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.problem.dtype)

    def draw(*shape: int, limit: float = 10.0) -> torch.Tensor:
        return guarded(torch.randn(shape, generator=generator).clamp(-limit, limit).to(dtype))

    head_dim = case["head_dim"]
    table = (table_batch, case["seq_len"], head_dim if width is None else width)
    return {
        "qkv": draw(*(case.shape("qkv") or ())) * scale,
        "q_norm_weight": draw(head_dim),
        "k_norm_weight": draw(head_dim),
        "cos": draw(*table, limit=1.0),
        "sin": draw(*table, limit=1.0),
        "rms_norm_eps": 1e-5,
    }


def apply(case: WorkloadCase, inputs: Inputs, values: Values | None = None) -> torch.Tensor:
    qkv = inputs["qkv"]
    assert isinstance(qkv, torch.Tensor)
    written = guarded(qkv)
    config = TEMPLATE.default(case, INTERPRETER_LIMITS) if values is None else values
    TEMPLATE.launch({**inputs, "qkv": written}, config, case, run_kernel)
    return written


def assert_matches_oracle(case: WorkloadCase, inputs: Inputs, values: Values | None = None) -> None:
    """At most twice the eager block's error against float64; v bit-equal."""
    ops = [op for op in case.problem.op_names if op in ("qk_norm", "rope")]
    truth = run_ops(OPS, ops, cast(inputs, torch.float64), case)["qkv"]
    eager = run_ops(OPS, ops, inputs, case)["qkv"]
    written = apply(case, inputs, values)
    assert (written.double() - truth).abs().max() <= 2 * (eager.double() - truth).abs().max()
    start = (case["num_attention_heads"] + case["num_key_value_heads"]) * case["head_dim"]
    assert torch.equal(written[..., start:], eager[..., start:])


@pytest.mark.parametrize("seq_len", [1, 7, 15, 17])
def test_spread_of_configs_matches_the_oracle(seq_len: int) -> None:
    case = a_case(seq_len)
    inputs = make_inputs(case)
    for values in TEMPLATE.valid_configs(case, INTERPRETER_LIMITS)[::11]:
        assert_matches_oracle(case, inputs, values)


@pytest.mark.parametrize("ops", [("qk_norm",), ("rope",), ("qk_norm", "rope")], ids="+".join)
@pytest.mark.parametrize("width", [16, 24, 32, 64])
@pytest.mark.parametrize("table_batch", [1, 2])
def test_switches_match_the_oracle(ops: tuple[str, ...], width: int, table_batch: int) -> None:
    case = a_case(ops=ops)
    assert_matches_oracle(case, make_inputs(case, width=width, table_batch=table_batch))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_sizes_and_dtypes_match_the_oracle(dtype: str, head_dim: int) -> None:
    case = a_case(dtype=dtype, head_dim=head_dim, num_attention_heads=5, num_key_value_heads=1)
    assert_matches_oracle(case, make_inputs(case))


def test_squares_of_large_float16_values_do_not_overflow() -> None:
    case = a_case(dtype="float16")
    assert_matches_oracle(case, make_inputs(case, scale=1000.0))


def test_expanded_tables_serve_every_batch_row() -> None:
    case = a_case()
    inputs = make_inputs(case, table_batch=1)
    single = apply(case, inputs)
    for name in ("cos", "sin"):
        table = inputs[name]
        assert isinstance(table, torch.Tensor)
        inputs[name] = table.expand(2, -1, -1)
    assert torch.equal(apply(case, inputs), single)


def test_dims_past_the_rotary_width_keep_their_norm() -> None:
    case = a_case()
    inputs = make_inputs(case, width=32)
    both = apply(case, inputs).unflatten(-1, (-1, 64))
    normed = apply(a_case(ops=("qk_norm",)), inputs).unflatten(-1, (-1, 64))
    assert torch.equal(both[..., 32:], normed[..., 32:])


def test_one_hot_reaches_its_half_split_partner_alone() -> None:
    case = a_case(ops=("rope",))
    inputs = make_inputs(case, width=32)
    qkv = torch.zeros(case.shape("qkv") or (), dtype=torch.bfloat16)
    qkv.unflatten(-1, (-1, 64))[..., 0] = 1
    heads = apply(case, {**inputs, "qkv": qkv}).unflatten(-1, (-1, 64))[:, :, :8]
    assert heads.ne(0).any(0).any(0).any(0).nonzero().flatten().tolist() == [0, 16]


@pytest.mark.parametrize("name", ["b1s1", "b1s128", "b2s2048"])
def test_default_is_valid(name: str) -> None:
    case, limits = load_problem().parse_case(name), named_limits(90, 132)
    values = TEMPLATE.default(case, limits)
    TEMPLATE.check_values(values, case, limits)
    assert TEMPLATE.rejection(values, case, limits) is None
