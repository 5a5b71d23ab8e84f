"""`GQAAttention`: names and switches of published models, and what it refuses."""

from typing import Any

import pytest
import torch
from calls import a_case, arguments, reference
from torch import Tensor, nn

from tilewright.errors import UsageError
from tilewright.problem import Problem, load_problem
from tilewright.runtime import GQAAttention
from tilewright.runtime.variants import without

PROBLEMS = ("gqa_attention_with_qk_norm", "glm_4_5_air_attention", "qwen3_attention")
NAMES = {
    "gqa_attention_with_qk_norm": {"q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"},
    "glm_4_5_air_attention": {"q_proj.bias", "k_proj.bias", "v_proj.bias"},
    "qwen3_attention": {"q_norm.weight", "k_norm.weight"},
}
PROJECTIONS = {f"{name}_proj.weight" for name in "qkvo"}


def smoke(name: str) -> Problem:
    problem = load_problem(name)
    return problem.with_constants(**problem.smoke_constants)


def state(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arguments of `dispatch` under the names of a published model."""
    parts = ("proj_weight", "proj_bias", "norm_weight")
    return {
        name.replace("_weight", ".weight").replace("_bias", ".bias"): t
        for name, t in given.items()
        if name[2:] in parts
    }


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_problem_decides_which_parameters_there_are(name: str) -> None:
    assert set(GQAAttention(smoke(name)).state_dict()) == PROJECTIONS | NAMES[name]


@pytest.mark.parametrize("name", PROBLEMS)
def test_published_sizes_are_the_problems(name: str) -> None:
    problem = load_problem(name)
    module = GQAAttention(problem, device="meta")
    heads = problem.constants["num_attention_heads"] * problem.constants["head_dim"]
    assert module.q_proj.weight.shape == (heads, problem.constants["hidden_size"])
    assert module.rotary_dim == problem.constants.get("rotary_dim", problem.constants["head_dim"])


@pytest.mark.parametrize("prefix", ["", "model.layers.0.self_attn."])
def test_a_module_over_a_checkpoint_gives_the_block(prefix: str) -> None:
    case = a_case()
    given = arguments(case)
    weights = {f"{prefix}{name}": t for name, t in state(given).items()}
    if prefix:
        weights["lm_head.weight"] = torch.zeros(1)
    module = GQAAttention.from_weights(weights, prefix=prefix)
    output = module(given["hidden_states"], (given["cos"], given["sin"]))
    assert torch.equal(output, reference(case, given))


def test_weights_of_a_checkpoint_are_shared() -> None:
    given = arguments(a_case())
    module = GQAAttention.from_weights(state(given))
    assert module.q_proj.weight.data_ptr() == given["q_proj_weight"].data_ptr()


@pytest.mark.parametrize("width", [None, 32])
def test_without_norm_the_head_is_named_and_may_rotate_in_part(width: int | None) -> None:
    case = a_case()
    given = {name: t for name, t in arguments(case).items() if "norm" not in name}
    given |= {name: given[name][..., : width or 64].contiguous() for name in ("cos", "sin")}
    module = GQAAttention.from_weights(state(given), head_dim=64, rotary_dim=width)
    output = module(given["hidden_states"], (given["cos"], given["sin"]))
    assert torch.equal(output, reference(case, given))


def test_a_state_goes_round() -> None:
    first, second = GQAAttention(smoke("qwen3_attention")), GQAAttention(smoke("qwen3_attention"))
    second.load_state_dict(first.state_dict())
    hidden, table = torch.randn(2, 5, 128).bfloat16(), torch.randn(1, 5, 64).bfloat16()
    assert torch.equal(first(hidden, (table, table)), second(hidden, (table, table)))


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_parameter_gets_its_gradient(name: str) -> None:
    module = GQAAttention(smoke(name))
    table = torch.randn(2, 1, 5, module.rotary_dim).bfloat16()
    module(torch.randn(2, 5, 128).bfloat16(), (table[0], table[1])).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_a_compiled_module_equals_eager() -> None:
    torch.compiler.reset()
    module = GQAAttention(smoke("glm_4_5_air_attention")).requires_grad_(False)
    function = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, seq in ((2, 5), (3, 8)):
        hidden, table = torch.randn(batch, seq, 128).bfloat16(), torch.randn(1, seq, 32).bfloat16()
        assert torch.equal(function(hidden, (table, table)), module(hidden, (table, table)))
    torch.compiler.reset()


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_an_exported_module_equals_eager_at_other_sizes(strict: bool) -> None:
    module = GQAAttention(smoke("glm_4_5_air_attention")).requires_grad_(False)
    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq", min=2)
    calls = []
    for b, s in ((2, 5), (3, 7)):
        table = torch.randn(1, s, 32).bfloat16()
        calls.append((torch.randn(b, s, 128).bfloat16(), (table, table)))
    shapes = ({0: batch, 1: seq}, ({1: seq}, {1: seq}))
    exported = torch.export.export(module, calls[0], dynamic_shapes=shapes, strict=strict).module()
    assert torch.equal(exported(*calls[1]), module(*calls[1]))


def test_the_epsilon_is_the_problems_unless_given() -> None:
    problem = smoke("qwen3_attention")
    assert (GQAAttention(problem).rms_norm_eps, GQAAttention(problem, rms_norm_eps=1e-3).rms_norm_eps) == (1e-6, 1e-3)


def test_a_problem_without_norm_makes_none() -> None:
    assert GQAAttention(without(smoke("qwen3_attention"), ops=("qk_norm",))).q_norm is None


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"o_proj.weight": None}, {}, "there is no o_proj.weight"),
    ({"q_norm.weight": None, "k_norm.weight": None}, {}, "pass head_dim=64 or 128"),
    ({"k_norm.weight": None}, {}, "k_norm.weight"),
    ({"o_proj.bias": torch.zeros(128)}, {}, "o_proj.bias"),
    ({"k_proj.bias": torch.zeros(5)}, {}, "k_proj.bias"),
    ({"q_proj.weight": torch.zeros(384, 128)}, {}, "dtype must be bfloat16 or float16, got 'float32'"),
]


@pytest.mark.parametrize(("changes", "options", "message"), BAD, ids=[message for *_, message in BAD])
def test_weights_that_make_no_block_are_named(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    weights = {name: t for name, t in {**state(arguments(a_case())), **changes}.items() if t is not None}
    with pytest.raises(UsageError, match=message):
        GQAAttention.from_weights(weights, **options)


def test_tables_of_another_width_are_rejected() -> None:
    module = GQAAttention(smoke("glm_4_5_air_attention"))
    table = torch.zeros(1, 5, 64).bfloat16()
    with pytest.raises(UsageError, match="last dimension of 64; expected rotary_dim=32"):
        module(torch.zeros(1, 5, 128).bfloat16(), (table, table))


def test_a_wrapped_projection_is_rejected_not_passed_over() -> None:
    module = GQAAttention(smoke("glm_4_5_air_attention"))
    module.v_proj = nn.Sequential(module.v_proj)  # type: ignore[assignment]
    table = torch.zeros(1, 5, 32).bfloat16()
    with pytest.raises(UsageError, match="v_proj is a Sequential"):
        module(torch.zeros(1, 5, 128).bfloat16(), (table, table))
