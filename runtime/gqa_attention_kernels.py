"""What runs behind the ops of gqa_attention_op.py on real tensors, and the block for a call that fills a cache."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.kernel_templates.families import load_family
from tilewright.runtime.gqa_attention import NAMES, Call, head_dim_of, infer, prepared
from tilewright.runtime.gqa_attention_op import Given, by_op_kv, is_subclass, packed_rows_like
from tilewright.runtime.tensors import check_alike


def dispatch_kv(
    given: Mapping[str, Tensor | None], rms_norm_eps: float = 1e-5, head_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`dispatch` of these inputs by name, and keys and values [B, kv heads, S, head_dim] as the attention saw them.

    Keys and values are views of one tensor. For inference: nothing of this has a gradient.
    """
    inputs = tuple(given.get(name) for name in NAMES[:-1])
    by_ops = torch.compiler.is_compiling() or is_subclass(inputs[0])
    output, qkv = (by_op_kv if by_ops else block_kv)(inputs, rms_norm_eps, head_dim)
    present = {name: t for name, t in given.items() if t is not None}
    dim = head_dim_of(present, head_dim, present["cos"].shape[-1])
    heads = qkv.unflatten(-1, (qkv.shape[-1] // dim, dim)).transpose(1, 2)
    kv_heads = present["k_proj_weight"].shape[0] // dim
    return output, heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]


def block(inputs: Given, rms_norm_eps: float, head_dim: int | None) -> Tensor:
    """The output, not recorded: autograd has its formula beside the op."""
    given = (*inputs, None)
    with torch.no_grad():
        return prepared(given, False, head_dim)(given, rms_norm_eps)


def block_kv(inputs: Given, rms_norm_eps: float, head_dim: int | None) -> tuple[Tensor, Tensor]:
    """The output and the packed rows [B, S, (q heads + 2 kv heads) * head_dim]."""
    given = (*inputs, None)
    with torch.no_grad():
        call = prepared(given, False, head_dim)
        assert isinstance(call, Call)
        qkv = packed_rows_like(inputs)
        return call(given, rms_norm_eps, qkv), qkv


def gradients(
    grad: Tensor, inputs: Given, rms_norm_eps: float, head_dim: int | None, wanted: list[bool]
) -> list[Tensor]:
    """Of the wanted inputs, contiguous: the reference is run again, recorded, and differentiated. As exact, and as
    hungry for memory, as the eager block."""
    tensors = {name: t for name, t in zip(NAMES, inputs, strict=False) if t is not None}
    names = [name for name, w in zip(NAMES, wanted, strict=False) if w]
    case = infer(tensors, check_alike(tensors), head_dim, "separate")
    ops = load_family(case.problem.family).ops
    with torch.enable_grad(), _recording():
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in tensors.items()}
        state: dict[str, Any] = {**leaves, "rms_norm_eps": rms_norm_eps}
        for name in ("cos", "sin"):
            state[name] = leaves[name].expand(grad.shape[0], *leaves[name].shape[-2:])
        for op in case.problem.op_names:
            state.update(ops[op](state, case))
        found = torch.autograd.grad(state["output"], [leaves[name] for name in names], grad)
    return [t.contiguous() for t in found]


def _recording() -> Any:
    """Autograd switched on below itself, where it is off when a dispatch mode, such as a profiler's, calls the op."""
    keys = torch._C.DispatchKey
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        hidden = hidden.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden)
