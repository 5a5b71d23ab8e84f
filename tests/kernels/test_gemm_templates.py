"""The projection templates: right numbers for every variant, and kernels that fit the cards they are offered for."""

from itertools import product
from operator import attrgetter

import pytest
import torch
from compile_child import Compiled, Request, compile_in_child
from kernel_checks import a_case, assert_stage_correct, outputs_of, sampled_configs, stage_inputs

from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Template, Values
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, named_limits
from tilewright.kernel_templates.gqa_attention import library_gemm, output_projection, qkv_norm_rope, qkv_projection
from tilewright.kernel_templates.gqa_attention.common import packed_rows
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.problem import WorkloadCase, load_problem

TILED = (qkv_projection.TEMPLATE, qkv_norm_rope.TEMPLATE, output_projection.TEMPLATE)
EVERY = (*TILED, *library_gemm.TEMPLATES)
PUBLISHED = dict(load_problem().constants)
VARIANTS = {
    "plain": {},
    "float16": {"dtype": "float16"},
    "packed": {"packed": True},
    "no_bias": {"bias": False},
    "no_norm": {"norm": False},
    "no_bias_no_norm_packed": {"bias": False, "norm": False, "packed": True},
    "half_rotary": {"rotary_width": 32},
    "shared_table": {"shared_table": True},
    "head_dim_128": {"head_dim": 128, "num_attention_heads": 3, "num_key_value_heads": 1},
    "odd_depth": {"hidden_size": 208},
}

every_template = pytest.mark.parametrize("template", EVERY, ids=attrgetter("name"))
tiled_template = pytest.mark.parametrize("template", TILED, ids=attrgetter("name"))


def default_of(template: Template, case: WorkloadCase) -> Values:
    values = template.default(case, INTERPRETER_LIMITS)
    assert template.rejection(values, case, INTERPRETER_LIMITS) is None
    template.check_values(values, case, INTERPRETER_LIMITS)
    return values


@every_template
@pytest.mark.parametrize("variant", VARIANTS)
def test_default_is_right_for_every_variant(template: Template, variant: str) -> None:
    case = a_case(batch_size=2, seq_len=11, **VARIANTS[variant])
    assert_stage_correct(template, default_of(template, case), case, OPS)


@every_template
@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 67, 127, 129])
def test_default_is_right_at_ragged_token_counts(template: Template, tokens: int) -> None:
    case = a_case(seq_len=tokens)
    assert_stage_correct(template, default_of(template, case), case, OPS)


@tiled_template
@pytest.mark.parametrize("shape", [(1, 5), (2, 33), (3, 67)], ids=["t5", "t66", "t201"])
def test_sampled_configs_are_right(template: Template, shape: tuple[int, int]) -> None:
    case = a_case(batch_size=shape[0], seq_len=shape[1], hidden_size=320)
    for values in sampled_configs(template, case, INTERPRETER_LIMITS, at_most=12):
        assert_stage_correct(template, values, case, OPS)


@tiled_template
def test_sampled_pointer_configs_are_right_without_descriptors(template: Template) -> None:
    case, limits = a_case(batch_size=2, seq_len=33, hidden_size=208), named_limits(80, 1)
    for values in sampled_configs(template, case, limits, at_most=8):
        assert_stage_correct(template, values, case, OPS)


@tiled_template
@pytest.mark.parametrize("store", ["pointer", "tma", "tma_halves"])
@pytest.mark.parametrize("variant", ["plain", "packed", "half_rotary"])
def test_persistent_programs_are_right(template: Template, store: str, variant: str) -> None:
    case = a_case(batch_size=3, seq_len=67, **VARIANTS[variant])
    columns = {"HEADS_PER_TILE": 1} if template is qkv_norm_rope.TEMPLATE else {"BLOCK_N": 64, "SPLIT_K": 1}
    values: Values = {
        "USE_TMA": True, "PERSISTENT": True, "BLOCK_M": 64, "BLOCK_K": 64, "GROUP_M": 4, **columns, "STORE": store,
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    assert template.rejection(values, case, INTERPRETER_LIMITS) in (None, "tile_large_enough")
    assert_stage_correct(template, values, case, OPS)


@pytest.mark.parametrize("template", [qkv_projection.TEMPLATE, output_projection.TEMPLATE], ids=attrgetter("name"))
@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("use_tma", [False, True])
def test_split_depth_is_right_and_repeats_bit_for_bit(template: Template, split: int, use_tma: bool) -> None:
    case = a_case(seq_len=19, hidden_size=544)
    values: Values = {
        "USE_TMA": use_tma, "PERSISTENT": False, "BLOCK_M": 32, "BLOCK_K": 64, "GROUP_M": 1, "BLOCK_N": 64,
        "SPLIT_K": split, "STORE": "pointer", "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    assert_stage_correct(template, values, case, OPS)
    inputs = stage_inputs(template, case, OPS)
    first, second = (outputs_of(template, values, case, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_template
def test_rows_in_front_of_nan_memory_stay_finite(template: Template) -> None:
    case = a_case(seq_len=7, hidden_size=208, rotary_width=32)
    inputs = stage_inputs(template, case, OPS)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            padded = torch.full((value.numel() + 4096,), float("nan"), dtype=value.dtype)
            inputs[name] = padded[: value.numel()].copy_(value.flatten()).view(value.shape)
    for values in sampled_configs(template, case, INTERPRETER_LIMITS, at_most=6):
        assert all(bool(out.isfinite().all()) for out in outputs_of(template, values, case, inputs).values())


@every_template
def test_unaligned_and_transposed_activations_give_the_same_numbers(template: Template) -> None:
    case = a_case(batch_size=2, seq_len=9)
    name = "context" if template.covers == ("output_projection",) else "hidden_states"
    inputs = stage_inputs(template, case, OPS)
    values = default_of(template, case)
    expected = outputs_of(template, values, case, inputs)
    shifted = torch.empty(inputs[name].numel() + 1, dtype=inputs[name].dtype)[1:].view_as(inputs[name])
    for variant in (shifted.copy_(inputs[name]), inputs[name].transpose(0, 1).contiguous().transpose(0, 1)):
        got = outputs_of(template, values, case, {**inputs, name: variant})
        assert all(torch.equal(got[out], expected[out]) for out in expected)


def test_rotation_leaves_the_other_dims_as_the_norm_made_them() -> None:
    turned = a_case(seq_len=7, rotary_width=32)
    template, values = qkv_norm_rope.TEMPLATE, default_of(qkv_norm_rope.TEMPLATE, turned)
    inputs = stage_inputs(template, turned, OPS)
    still = {**inputs, "cos": torch.ones_like(inputs["cos"]), "sin": torch.zeros_like(inputs["sin"])}
    got, unturned = (
        outputs_of(template, values, turned, given)["qkv"].unflatten(-1, (-1, 64)) for given in (inputs, still)
    )
    assert torch.equal(got[..., 32:], unturned[..., 32:])
    assert torch.equal(got[:, :, 8:], unturned[:, :, 8:])  # v heads
    assert not torch.equal(got[:, :, :8, :32], unturned[:, :, :8, :32])


def test_packed_weights_must_lie_end_to_end() -> None:
    with pytest.raises(UsageError, match="end to end"):
        packed_rows([torch.empty(4, 16), torch.empty(4, 16)])


@tiled_template
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("heads", [(96, 8, 128), (6, 2, 64), (5, 1, 64), (3, 1, 128)], ids=str)
def test_default_may_run_everywhere(template: Template, capability: int, heads: tuple[int, int, int]) -> None:
    head_axes = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    limits = named_limits(capability, 132)
    for tokens, hidden_size in product((1, 2, 17, 67, 128, 1000, 4096), (128, 2880, 4096)):
        case = a_case(seq_len=tokens, hidden_size=hidden_size, **head_axes)
        values = template.default(case, limits)
        assert template.rejection(values, case, limits) is None, (tokens, hidden_size)
        template.check_values(values, case, limits)


@tiled_template
@pytest.mark.parametrize("shape", [(1, 1), (1, 128), (4, 512), (2, 2048)], ids=str)
def test_space_is_small_enough_to_search_and_large_enough_to_be_worth_it(
    template: Template, shape: tuple[int, int]
) -> None:
    case = a_case(batch_size=shape[0], seq_len=shape[1], **PUBLISHED)
    limits = named_limits(90, 132)
    configs = template.valid_configs(case, limits)
    assert 10 <= len(configs) <= 300
    assert template.default(case, limits) in configs


def test_fused_epilogue_counts_towards_shared_memory() -> None:
    """One stage more than fits: 245,792 bytes as compiled for sm_90 by Triton 3.6, where 232,448 are allowed."""
    case, limits = a_case(batch_size=2, seq_len=2048, **PUBLISHED), named_limits(90, 132)
    values = {**qkv_norm_rope.TEMPLATE.default(case, limits), "STORE": "tma_halves", "num_stages": 4}
    assert qkv_norm_rope.TEMPLATE.rejection(values, case, limits) == "fits_shared_memory"


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int, int], list[Compiled]]:
    """Kernels of every default at the published sizes, by template, tokens and capability."""
    keys = [(t.module, tokens, sm) for t in TILED for tokens, sm in ((2048, 80), (128, 90), (2048, 90), (2048, 100))]
    requests = [Request(module, {"seq_len": tokens, **PUBLISHED}, sm) for module, tokens, sm in keys]
    return dict(zip(keys, compile_in_child(requests), strict=True))


def test_defaults_fit_shared_memory_as_compiled(compiled: dict[tuple[str, int, int], list[Compiled]]) -> None:
    for (module, tokens, capability), kernels in compiled.items():
        limit = named_limits(capability, 132).shared_memory_bytes
        for kernel in kernels:
            assert kernel.shared_memory_bytes <= limit, (module, tokens, capability)


def test_hopper_defaults_use_wide_matrix_instructions_and_bulk_copies(
    compiled: dict[tuple[str, int, int], list[Compiled]],
) -> None:
    for (module, tokens, capability), (kernel, *_) in compiled.items():
        if capability == 90:
            assert kernel.instructions["HGMMA"], (module, tokens)
            assert kernel.instructions["UTMALDG"], (module, tokens)


def test_hopper_defaults_at_many_tokens_do_not_spill(compiled: dict[tuple[str, int, int], list[Compiled]]) -> None:
    for (module, tokens, capability), (kernel, *_) in compiled.items():
        if capability == 90 and tokens >= 1024:
            assert kernel.stack_bytes == 0, module
