"""Patched models of the transformers library against the unpatched ones; tiny, random, on the CPU."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_family import LAUNCHES
from torch import Tensor, nn

from tilewright.errors import UsageError
from tilewright.kernel_templates import families
from tilewright.runtime import forget
from tilewright.runtime import transformers as served

pytest.importorskip("transformers")

from tiny_models import SEEDS, SIZES, a_model, greedy, prompt
from transformers import DynamicCache, StaticCache
from transformers.monkey_patching import get_patch_mapping

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("glm_air", "glm", "qwen3")
ATTENTIONS = {"model.layers.0.self_attn", "model.layers.1.self_attn"}


@pytest.fixture(params=["eager templates", "interpreter"])
def templates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain PyTorch in the place of kernels, or the default plan with its kernels interpreted."""
    if request.param == "interpreter":
        monkeypatch.setitem(families.FAMILIES, "gqa_attention", "tilewright.kernel_templates.gqa_attention")
        families.load_family.cache_clear()
        forget()
    yield
    families.load_family.cache_clear()


@torch.no_grad()
def logits(model: Any, ids: Tensor | None = None, **options: Any) -> Tensor:
    answer: Tensor = model(prompt() if ids is None else ids, **options).logits
    return answer


def within_bf16(found: Tensor, expected: Tensor, exact: Tensor) -> bool:
    """Errors against the float32 model at most twice those of the unpatched bfloat16 model, on average and at worst."""
    error, allowed = ((t.float() - exact).abs() for t in (found, expected))
    return bool(error.mean() <= 2 * allowed.mean() and error.max() <= 2 * allowed.max())


@pytest.mark.usefixtures("templates")
@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "empty cache"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_the_unpatched_model(kind: str, use_cache: bool) -> None:
    model = a_model(kind)
    expected, exact = logits(model), logits(copy.deepcopy(model).float())
    with served.patch(model):
        found = logits(model, use_cache=use_cache)
        assert served.stats(model) == served.Stats(2, {})
    assert within_bf16(found, expected, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_over_64_steps_are_equal(kind: str) -> None:
    """In float16: a random model's best tokens are nearer to each other than bfloat16 rounds."""
    model = a_model(kind, SEEDS[kind]).half()
    expected, apart = greedy(model, prompt(1))
    before = logits(model)
    with served.patch(model):
        found, _ = greedy(model, prompt(1))
        assert served.stats(model) == served.Stats(2, {"decode": 2 * 63})
        assert apart > 4 * (logits(model) - before).abs().max()
    assert torch.equal(found, expected)
    assert len(set(expected[0].tolist())) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cache_is_filled_as_the_original_fills_it(kind: str) -> None:
    model = a_model(kind)
    expected, found = (DynamicCache(config=model.config) for _ in range(2))
    logits(model, cache=expected)
    with served.patch(model):
        logits(model, cache=found)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert a.keys.is_contiguous()
        assert torch.allclose(a.keys, b.keys, atol=0.05, rtol=0.03)
        assert torch.allclose(a.values, b.values, atol=0.05, rtol=0.03)


def test_the_epsilon_is_that_of_the_norm() -> None:
    model = a_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_norm.variance_epsilon = layer.self_attn.k_norm.variance_epsilon = 3.0
    expected, exact = logits(model), logits(copy.deepcopy(model).float())
    with served.patch(model):
        assert within_bf16(logits(model), expected, exact)


def test_a_prompt_of_one_token_is_served() -> None:
    model = a_model("qwen3")
    expected, exact = logits(model, prompt(3, 1)), logits(copy.deepcopy(model).float(), prompt(3, 1))
    with served.patch(model):
        assert within_bf16(logits(model, prompt(3, 1)), expected, exact)
        assert served.stats(model).served == 2


def test_positions_of_each_row_reach_the_block() -> None:
    model = a_model("glm_air")
    positions = torch.arange(13) + torch.tensor([[0], [40]])
    expected, exact = (
        logits(model, position_ids=positions),
        logits(copy.deepcopy(model).float(), position_ids=positions),
    )
    with served.patch(model):
        assert within_bf16(logits(model, position_ids=positions), expected, exact)
        assert served.stats(model).served == 2


def _padded(model: Any) -> Tensor:
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    return logits(model, attention_mask=mask)


def _after(model: Any, new: int) -> Tensor:
    cache = DynamicCache(config=model.config)
    for layer in range(2):
        past = torch.linspace(-1, 1, 2 * 2 * 5 * 64).view(2, 2, 5, 64).bfloat16()
        cache.update(past, past, layer)
    return logits(model, prompt(2, new), cache=cache)


def _dropout(model: Any) -> Tensor:
    model.train()
    torch.manual_seed(3)
    return logits(model)


def _static(model: Any) -> Tensor:
    return logits(model, cache=StaticCache(config=model.config, max_cache_len=32))


def _with_gradient(model: Any) -> Tensor:
    model(prompt()).logits.sum().backward()
    gradient: Tensor = model.model.layers[0].self_attn.q_proj.weight.grad
    model.zero_grad()
    return gradient


def _autocast(model: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return logits(model)


class Adapted(nn.Module):
    """As adapter libraries wrap a projection: the base's weight stays visible, and is not all of it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + 0.5 * x.sum(-1, keepdim=True)


class QuantisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * 8).round() / 8, self.bias)


class OddTensor(Tensor):
    pass


def _adapt(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)


def _quantise(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.__class__ = QuantisedLinear


def _subclass(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        layer.self_attn.o_proj.weight = nn.Parameter(weight.detach().as_subclass(OddTensor), requires_grad=False)


def _other_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_norm = nn.LayerNorm(64, dtype=torch.bfloat16)


def _hook(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: output * 2)


def _no_change(model: Any) -> None:
    pass


SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
Call = Callable[[Any], Tensor]
LEFT: list[tuple[str, str, dict[str, Any], Callable[[Any], None], Call]] = [
    ("mask", "glm_air", {}, _no_change, _padded),
    ("decode", "glm_air", {}, _no_change, lambda model: _after(model, 1)),
    ("mask", "qwen3", {}, _no_change, lambda model: _after(model, 4)),
    ("dropout", "glm", {"attention_dropout": 0.5}, _no_change, _dropout),
    ("gradient", "qwen3", {}, _no_change, _with_gradient),
    ("sliding window", "qwen3", SLIDING, _no_change, lambda model: logits(model, use_cache=False)),
    ("cache of type StaticCache", "glm_air", {}, _no_change, _static),
    ("mask", "glm_air", {"attn_implementation": "eager"}, _no_change, logits),
    ("argument output_attentions", "glm", {}, _no_change, lambda model: logits(model, output_attentions=True)),
    ("argument is_causal", "glm", {}, _no_change, lambda model: logits(model, is_causal=True)),
    ("quantised or adapted weights", "qwen3", {}, _adapt, logits),
    ("quantised or adapted weights", "glm_air", {}, _quantise, logits),
    ("quantised or adapted weights", "glm_air", {}, _subclass, logits),
    ("quantised or adapted weights", "glm", {}, _hook, logits),
    ("quantised or adapted weights", "qwen3", {}, _other_norm, logits),
    ("bias of the output projection", "qwen3", {"attention_bias": True}, _no_change, logits),
    ("head_dim 32", "qwen3", {"head_dim": 32}, _no_change, logits),
    ("dtype float32", "glm_air", {}, lambda model: model.float(), logits),
    ("autocast", "glm_air", {}, _no_change, _autocast),
]


@pytest.mark.parametrize(
    ("reason", "kind", "config", "change", "call"), LEFT, ids=[f"{i}: {left[0]}" for i, left in enumerate(LEFT)]
)
def test_a_call_that_is_left_alone_is_the_originals_and_counted(
    reason: str, kind: str, config: dict[str, Any], change: Any, call: Call
) -> None:
    model = a_model(kind, **config)
    change(model)
    expected = call(model)
    with served.patch(model):
        assert torch.equal(call(model), expected)
        assert served.stats(model) == served.Stats(0, {reason: 2})


def test_a_chunk_after_the_first_is_left_alone_also_without_a_mask() -> None:
    model = a_model("glm_air")
    attention = model.model.layers[0].self_attn
    cache = DynamicCache(config=model.config)
    cache.update(*torch.randn(2, 1, 2, 5, 64).bfloat16().unbind(0), 0)
    hidden, table = torch.randn(1, 4, 128).bfloat16(), torch.ones(1, 4, 32).bfloat16()
    with served.patch(model), torch.no_grad():
        attention(hidden, (table, table), None, cache)
        assert served.stats(model) == served.Stats(0, {"cache with content": 1})


def test_the_old_name_of_the_cache_is_left_to_the_original() -> None:
    model = a_model("glm_air")
    attention = model.model.layers[0].self_attn
    cache = DynamicCache(config=model.config)
    hidden, table = torch.randn(1, 4, 128).bfloat16(), torch.ones(1, 4, 32).bfloat16()
    with served.patch(model), torch.no_grad():
        with pytest.warns(FutureWarning, match="past_key_values"):
            attention(hidden, (table, table), None, past_key_values=cache)
        assert served.stats(model) == served.Stats(0, {"argument past_key_values": 1})
    assert cache.get_seq_length(0) == 4


def test_inputs_that_the_block_rejects_are_left_to_the_original() -> None:
    model = a_model("glm_air")
    attention = model.model.layers[0].self_attn
    hidden, table = torch.randn(1, 4, 128).bfloat16(), torch.ones(1, 1, 32).bfloat16()
    with torch.no_grad():
        expected = attention(hidden, (table, table), None)[0]
        with served.patch(model):
            assert torch.equal(attention(hidden, (table, table), None)[0], expected)
            assert served.stats(model) == served.Stats(0, {"unsupported inputs": 1})


def test_without_the_interpreter_a_cpu_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    model = a_model("qwen3")
    with served.patch(model):
        logits(model)
        assert served.stats(model) == served.Stats(0, {"device cpu": 2})


def test_a_patch_says_what_it_replaced_and_what_not() -> None:
    model = a_model("qwen3")
    own = model.model.layers[0].self_attn
    own.forward = own.forward
    patch = served.patch(model)
    assert patch.replaced == {"model.layers.1.self_attn": "Qwen3Attention"}
    assert str(patch) == (
        "model.layers.1.self_attn: Qwen3Attention replaced\n"
        "model.layers.0.self_attn: left, it has a forward of its own, set by a hook"
    )


def test_an_undone_patch_leaves_the_model_as_it_was() -> None:
    model = a_model("glm")
    modules = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    state = {name: (t.data_ptr(), t.shape) for name, t in model.state_dict().items()}
    patch = served.patch(model)
    assert {type(model.get_submodule(name)).__name__ for name in ATTENTIONS} == {"TilewrightGlm4MoeAttention"}
    assert {name: (t.data_ptr(), t.shape) for name, t in model.state_dict().items()} == state
    patch.undo()
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == modules


def test_a_second_patch_replaces_nothing_and_undoes_nothing() -> None:
    model = a_model("qwen3")
    with served.patch(model):
        second = served.patch(model)
        assert second.left == dict.fromkeys(ATTENTIONS, "served already")
        second.undo()
        assert served.unpatch(model) == sorted(ATTENTIONS)


def test_a_model_without_such_an_attention_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="Linear has no attention that can be served; accepted: Glm4MoeAttention"):
        served.patch(nn.Linear(2, 2))


def test_a_patched_model_may_be_copied() -> None:
    model = a_model("qwen3")
    with served.patch(model):
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin), logits(model))
        assert served.stats(twin).served == 2


@pytest.mark.parametrize("kind", KINDS)
def test_models_loaded_while_registered_are_served(kind: str, tmp_path: Path) -> None:
    model = a_model(kind)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected, exact = logits(plain), logits(plain.float())
    with served.register() as registration:
        assert registration.replaced == ["Glm4MoeAttention", "Qwen3Attention"]
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert within_bf16(logits(loaded), expected, exact)
    assert served.stats(loaded) == served.Stats(2, {})
    assert set(served.unpatch(loaded)) == ATTENTIONS
    assert torch.equal(logits(loaded), expected)


def test_models_loaded_after_a_registration_was_undone_are_the_librarys_own(tmp_path: Path) -> None:
    model = a_model("qwen3", attn_implementation="eager")
    model.save_pretrained(tmp_path)
    with served.register():
        type(model).from_pretrained(tmp_path)
    assert get_patch_mapping() == {}
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert type(loaded.model.layers[0].self_attn).__name__ == "Qwen3Attention"
    assert len(loaded(prompt(), output_attentions=True).attentions) == SIZES["num_hidden_layers"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_attention_compiles_without_graph_breaks(kind: str) -> None:
    model = a_model(kind)
    attention = model.model.layers[0].self_attn
    torch.compiler.reset()
    with served.patch(model), torch.no_grad():
        function: Any = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
        for batch, seq in ((2, 9), (3, 12)):
            hidden = torch.randn(batch, seq, 128).bfloat16()
            tables = model.model.rotary_emb(hidden, torch.arange(seq)[None])
            assert torch.equal(function(hidden, tables, None)[0], attention(hidden, tables, None)[0])
        assert served.stats(model) == served.Stats(2, {})
    torch.compiler.reset()


def test_a_patched_model_compiles_as_a_whole() -> None:
    model = a_model("qwen3")
    torch.compiler.reset()
    with served.patch(model), torch.no_grad():
        function: Any = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        for seq in (9, 12):
            LAUNCHES.clear()
            found = function(prompt(2, seq)).logits
            assert LAUNCHES.count("attention") == 2
            assert torch.equal(found, logits(model, prompt(2, seq)))
    torch.compiler.reset()


def test_the_runtime_imports_transformers_only_when_asked() -> None:
    code = "import sys, tilewright.runtime.transformers; print('transformers' in sys.modules, 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / ".src", check=True)
    assert answer.stdout.split() == ["False", "False"]
