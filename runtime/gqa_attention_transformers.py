"""Attention classes of the transformers library whose forward runs the block where it may, else the original.

Imports transformers: loaded by runtime/transformers.py when it is asked for something. Which calls may be served is
one list of questions below, the first that is answered yes being the reason why a call is left to the original.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoePreTrainedModel, Glm4MoeRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3PreTrainedModel, Qwen3RMSNorm
from triton import knobs

from tilewright.errors import UsageError
from tilewright.runtime.gqa_attention import HEAD_DIMS, dispatch
from tilewright.runtime.gqa_attention_kernels import dispatch_kv
from tilewright.runtime.gqa_attention_module import unusual, weights_of
from tilewright.runtime.log import warn_once
from tilewright.runtime.tensors import ACCEPTED_DTYPES

# What the library hands every attention and the block need not know; any other argument goes to the original.
IGNORED = ("position_ids", "use_cache")

_lock = threading.Lock()


@dataclass
class Calls:
    """How often one module's calls were served, and why others were not; calls inside compiled graphs are not seen."""

    served: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def note(self, reason: str | None) -> None:
        with _lock:
            if reason is None:
                self.served += 1
            else:
                self.refused[reason] = self.refused.get(reason, 0) + 1


@dataclass(frozen=True)
class Call:
    """The arguments of one forward, to be judged."""

    module: Any
    hidden_states: Tensor
    position_embeddings: Any
    attention_mask: Any
    cache: Any
    others: dict[str, Any]


class Served(nn.Module):
    """Mixed in before an attention class of the library."""

    calls: Calls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = Calls()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the original's; the second result, the attention weights, is None for a served call."""
        call = Call(self, hidden_states, position_embeddings, attention_mask, cache, kwargs)
        reason = why_not(call)
        output = None
        if reason is None:
            try:
                output = _run(call)
            except UsageError as error:
                reason = "unsupported inputs"
                warn_once(("unsupported", type(self).__name__), "%s is left to the original: %s", type(self), error)
        if not torch.compiler.is_compiling():
            self.calls.note(reason)
        if output is not None:
            return output, None
        if cache is not None:  # by name, and only then: it may have come under its old one
            kwargs["cache"] = cache
        answer: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, position_embeddings, attention_mask, **kwargs
        )
        return answer


class TilewrightGlm4MoeAttention(Served, Glm4MoeAttention):
    pass


class TilewrightQwen3Attention(Served, Qwen3Attention):
    pass


CLASSES: dict[type[nn.Module], type[Served]] = {
    Glm4MoeAttention: TilewrightGlm4MoeAttention,
    Qwen3Attention: TilewrightQwen3Attention,
}
ORIGINALS: dict[type[nn.Module], type[nn.Module]] = {ours: original for original, ours in CLASSES.items()}
NORMS = (Glm4MoeRMSNorm, Qwen3RMSNorm)
RECORDING = (Glm4MoePreTrainedModel, Qwen3PreTrainedModel)


def why_not(call: Call) -> str | None:
    """The first reason why the original must answer this call, or None."""
    return next((reason for question in QUESTIONS if (reason := question(call)) is not None), None)


def _gradient(call: Call) -> str | None:
    if call.module.training and call.module.attention_dropout > 0:
        return "dropout"
    if not torch.is_grad_enabled():
        return None
    wanted = call.hidden_states.requires_grad or any(p.requires_grad for p in call.module.parameters())
    return "gradient" if wanted else None


def _mask(call: Call) -> str | None:
    if call.attention_mask is not None:
        return "mask"
    return "sliding window" if getattr(call.module, "sliding_window", None) is not None else None


def _cache(call: Call) -> str | None:
    """Only a fresh layer of the default cache is filled: others keep less, or elsewhere, than they are given."""
    if call.cache is None:
        return None
    if type(call.cache) is not DynamicCache:
        return f"cache of type {type(call.cache).__name__}"
    index = call.module.layer_idx
    if index >= len(call.cache.layers):
        kind = call.cache.layer_class_to_replicate
        return None if kind is DynamicLayer else f"cache layer of type {getattr(kind, '__name__', kind)}"
    layer = call.cache.layers[index]
    if type(layer) is not DynamicLayer:
        return f"cache layer of type {type(layer).__name__}"
    if layer.get_seq_length() == 0:
        return None
    return "decode" if call.hidden_states.shape[1] == 1 else "cache with content"


def _arguments(call: Call) -> str | None:
    implementation = call.module.config._attn_implementation
    if implementation != "sdpa":
        return f"attention implementation {implementation}"
    for name, value in call.others.items():
        if name not in IGNORED and value is not None and value is not False:
            return f"argument {name}"
    return None


def _weights(call: Call) -> str | None:
    module = call.module
    if unusual(module, NORMS) is not None:
        return "quantised or adapted weights"
    if module.o_proj.bias is not None:
        return "bias of the output projection"
    if module.head_dim not in HEAD_DIMS:
        return f"head_dim {module.head_dim}"
    return None if module.scaling == module.head_dim**-0.5 else "scaling of the scores"


def _tensors(call: Call) -> str | None:
    hidden = call.hidden_states
    if hidden.dtype not in ACCEPTED_DTYPES:
        return f"dtype {hidden.dtype}".replace("torch.", "")
    if torch.is_autocast_enabled(hidden.device.type):
        return "autocast"
    kind = hidden.device.type
    return None if kind == "cuda" or (kind == "cpu" and _interpreted()) else f"device {kind}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _interpreted() -> bool:
    """Asked while a graph is traced, not by the graph: torch.compile cannot read the environment."""
    return bool(knobs.runtime.interpret)


QUESTIONS: tuple[Callable[[Call], str | None], ...] = (_gradient, _mask, _cache, _arguments, _weights, _tensors)


def _run(call: Call) -> Tensor:
    cos, sin = call.position_embeddings
    given = {"hidden_states": call.hidden_states, **weights_of(call.module), "cos": cos, "sin": sin}
    norm = getattr(call.module, "q_norm", None)
    eps: float = call.module.config.rms_norm_eps if norm is None else norm.variance_epsilon
    head_dim: int = call.module.head_dim
    if call.cache is None:
        return dispatch(**given, rms_norm_eps=eps, head_dim=head_dim)
    output, keys, values = dispatch_kv(given, eps, head_dim)
    call.cache.update(keys, values, call.module.layer_idx, kwargs=call.others)
    return output


def forget_recorders() -> None:
    """Output recorders that the library pointed at our classes for good point at the originals, which ours are too."""
    for model in RECORDING:
        for output, recorder in model._can_record_outputs.items():
            if isinstance(recorder, type) and recorder in ORIGINALS:
                model._can_record_outputs[output] = ORIGINALS[recorder]


def attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are, or were, an attention class that can be served, by name."""
    for name, module in model.named_modules():
        if type(module) in CLASSES or type(module) in ORIGINALS:
            yield name, module
