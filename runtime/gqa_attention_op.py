"""The block as torch.library ops: what torch.compile, autograd and fake tensors see. Plain eager calls go past them.

The ops are opaque: a compiled graph calls them with real tensors, so that the plan follows the shapes of each call and
a new shape causes no recompilation. Gradients recompute the block by the reference, in an op of their own.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import GradientNeeded, UsageError

INPUTS = (
    "Tensor hidden_states, Tensor q_proj_weight, Tensor? q_proj_bias, Tensor k_proj_weight, Tensor? k_proj_bias, "
    "Tensor v_proj_weight, Tensor? v_proj_bias, Tensor o_proj_weight, Tensor? q_norm_weight, Tensor? k_norm_weight, "
    "Tensor cos, Tensor sin, float rms_norm_eps, int? head_dim"
)

Given = tuple[Tensor | None, ...]  # the tensors in the schema's order

LIBRARY = torch.library.Library("tilewright", "FRAGMENT")
LIBRARY.define(f"gqa_attention({INPUTS}) -> Tensor")
LIBRARY.define(f"gqa_attention_kv({INPUTS}) -> (Tensor, Tensor)")
LIBRARY.define(f"gqa_attention_backward(Tensor grad, {INPUTS}, bool[] wanted) -> Tensor[]")


def is_subclass(tensor: object) -> bool:
    """Fake and other tensors whose memory is not theirs to be read; the ops know what to do with them."""
    return type(tensor) is not Tensor and isinstance(tensor, Tensor) and type(tensor) is not torch.nn.Parameter


def by_op(given: Given, rms_norm_eps: float, head_dim: int | None, output: Tensor | None = None) -> Tensor:
    """The block through its op; ops return new tensors, so that a given `output` costs one copy."""
    result: Tensor = torch.ops.tilewright.gqa_attention(*given, rms_norm_eps, head_dim)
    if output is None:
        return result
    if output.shape != result.shape:
        raise UsageError(f"output has shape {tuple(output.shape)}, expected {tuple(result.shape)}")
    return output.copy_(result)


def by_op_kv(given: Given, rms_norm_eps: float, head_dim: int | None) -> tuple[Tensor, Tensor]:
    """Output and packed rows of the block through its op."""
    output, qkv = torch.ops.tilewright.gqa_attention_kv(*given, rms_norm_eps, head_dim)
    return output, qkv


def packed_rows_like(given: Given) -> Tensor:
    """Uninitialised rows [B, S, (q heads + 2 kv heads) * head_dim] for these inputs."""
    hidden, features = given[0], sum(t.shape[0] for t in (given[1], given[3], given[5]) if t is not None)
    assert hidden is not None
    return hidden.new_empty(hidden.shape[0], hidden.shape[1], features)


def _fake_block(*args: Any) -> Tensor:
    hidden, o_proj_weight = args[0], args[7]
    output: Tensor = hidden.new_empty(hidden.shape[0], hidden.shape[1], o_proj_weight.shape[0])
    return output


def _fake_block_kv(*args: Any) -> tuple[Tensor, Tensor]:
    return _fake_block(*args), packed_rows_like(args[:-2])


def _fake_backward(grad: Tensor, *args: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, wanted in zip(args[:-3], args[-1], strict=True) if wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-2])
    ctx.options = inputs[-2:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (grad, *given)):
        raise GradientNeeded("gqa_attention has first gradients only; call backward without create_graph=True")
    wanted = list(ctx.needs_input_grad[: len(given)])
    grads = iter(torch.ops.tilewright.gqa_attention_backward(grad, *given, *ctx.options, wanted))
    return (*(next(grads) if w else None for w in wanted), None, None)


def _no_backward(ctx: Any, *grads: Tensor) -> None:
    raise GradientNeeded("gqa_attention_kv is for inference; call it under torch.no_grad(), or gqa_attention instead")


# What runs on real tensors is loaded by the first call, because it needs the ops to be defined.


def _block(*args: Any) -> Tensor:
    from tilewright.runtime import gqa_attention_kernels

    return gqa_attention_kernels.block(args[:-2], *args[-2:])


def _block_kv(*args: Any) -> tuple[Tensor, Tensor]:
    from tilewright.runtime import gqa_attention_kernels

    return gqa_attention_kernels.block_kv(args[:-2], *args[-2:])


def _block_backward(grad: Tensor, *args: Any) -> list[Tensor]:
    from tilewright.runtime import gqa_attention_kernels

    return gqa_attention_kernels.gradients(grad, args[:-3], *args[-3:])


for _name, _kernel, _fake in (
    ("gqa_attention", _block, _fake_block),
    ("gqa_attention_kv", _block_kv, _fake_block_kv),
    ("gqa_attention_backward", _block_backward, _fake_backward),
):
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(f"tilewright::{_name}", _fake, lib=LIBRARY)

torch.library.register_autograd("tilewright::gqa_attention", _backward, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("tilewright::gqa_attention_kv", _no_backward, lib=LIBRARY)
