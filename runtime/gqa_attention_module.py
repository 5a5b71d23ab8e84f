"""The block as an `nn.Module` with the parameter names of published models."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.errors import UsageError
from tilewright.problem import Problem
from tilewright.runtime.gqa_attention import PROJECTIONS, dispatch, variant, with_rotary_width

LINEARS = (*PROJECTIONS, "o_proj")
PLAIN = (nn.Parameter, Tensor, FakeTensor)  # a fake one stands for its weight while a graph is exported


class GQAAttention(nn.Module):
    """Causal prefill of one layer; sizes, bias, QK norm and rotary width are the problem's.

    Parameters: q_proj, k_proj, v_proj, o_proj and, with QK norm, q_norm, k_norm, named as published models name them.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        rms_norm_eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes, inputs = problem.constants, {spec.name for spec in problem.inputs}
        self.hidden_size, self.head_dim = sizes["hidden_size"], sizes["head_dim"]
        self.num_attention_heads = sizes["num_attention_heads"]
        self.num_key_value_heads = sizes["num_key_value_heads"]
        self.rotary_dim = sizes.get("rotary_dim", self.head_dim)
        self.rms_norm_eps = problem.scalars.get("rms_norm_eps", 1e-5) if rms_norm_eps is None else rms_norm_eps
        kind: dict[str, Any] = {"device": device, "dtype": dtype or getattr(torch, problem.dtype)}
        q_width, kv_width = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        bias = "q_proj_bias" in inputs
        self.q_proj = nn.Linear(self.hidden_size, q_width, bias=bias, **kind)
        self.k_proj = nn.Linear(self.hidden_size, kv_width, bias=bias, **kind)
        self.v_proj = nn.Linear(self.hidden_size, kv_width, bias=bias, **kind)
        self.o_proj = nn.Linear(q_width, self.hidden_size, bias=False, **kind)
        normed = "q_norm_weight" in inputs
        self.q_norm = nn.RMSNorm(self.head_dim, self.rms_norm_eps, **kind) if normed else None
        self.k_norm = nn.RMSNorm(self.head_dim, self.rms_norm_eps, **kind) if normed else None

    @classmethod
    def from_weights(
        cls,
        weights: Mapping[str, Tensor],
        *,
        prefix: str = "",
        head_dim: int | None = None,
        rotary_dim: int | None = None,
        rms_norm_eps: float = 1e-5,
    ) -> Self:
        """Over the tensors of a checkpoint whose names start with `prefix`, shared, not copied.

        `head_dim` is needed without QK norm; `rotary_dim` defaults to it. UsageError names what is missing or too much.
        """
        own = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        problem = _problem_of(own, prefix, head_dim, rotary_dim)
        module = cls(problem, rms_norm_eps=rms_norm_eps, device="meta")
        try:
            module.load_state_dict(own, assign=True)
        except RuntimeError as error:
            raise UsageError(f"the weights under {prefix!r} do not make this block: {error}") from error
        return module

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """[B, S, hidden] to [B, S, hidden]; cos and sin are [1 or B, S, rotary_dim]."""
        reason = unusual(self)
        if reason is not None:
            raise UsageError(f"{reason}; GQAAttention runs plain nn.Linear and nn.RMSNorm only")
        cos, sin = position_embeddings
        if cos.shape[-1] != self.rotary_dim:
            raise UsageError(f"cos has a last dimension of {cos.shape[-1]}; expected rotary_dim={self.rotary_dim}")
        return dispatch(
            hidden_states=hidden_states,
            **weights_of(self),
            cos=cos,
            sin=sin,
            rms_norm_eps=self.rms_norm_eps,
            head_dim=self.head_dim,
        )

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, heads={self.num_attention_heads}/{self.num_key_value_heads}, "
            f"head_dim={self.head_dim}, rotary_dim={self.rotary_dim}, rms_norm_eps={self.rms_norm_eps}"
        )


def weights_of(module: nn.Module) -> dict[str, Any]:
    """The weights of a module with these parameter names, as `dispatch` names them; None where there is none."""
    found: dict[str, Any] = {f"{name}_weight": getattr(module, name).weight for name in LINEARS}
    found |= {f"{name}_bias": getattr(module, name).bias for name in PROJECTIONS}
    for name in ("q_norm", "k_norm"):
        norm = getattr(module, name, None)
        found[f"{name}_weight"] = None if norm is None else norm.weight
    return found


def unusual(module: nn.Module, norms: tuple[type[nn.Module], ...] = (nn.RMSNorm,)) -> str | None:
    """Why reading the weights alone would be wrong: a part is wrapped, quantised, sharded or hooked; None if not."""
    for name in (*LINEARS, "q_norm", "k_norm"):
        part = getattr(module, name, None)
        if part is None:
            continue
        if type(part) not in (norms if name.endswith("norm") else (nn.Linear,)):
            return f"{name} is a {type(part).__name__}"
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        if any(hooks) or "forward" in part.__dict__:
            return f"{name} has hooks"
        for tensor in (part.weight, getattr(part, "bias", None)):
            if tensor is not None and type(tensor) not in PLAIN:
                return f"{name} has weights of type {type(tensor).__name__}"
    return None


def _problem_of(weights: Mapping[str, Tensor], prefix: str, head_dim: int | None, rotary_dim: int | None) -> Problem:
    missing = [f"{name}.weight" for name in LINEARS if f"{name}.weight" not in weights]
    if missing:
        raise UsageError(f"there is no {prefix}{missing[0]} among the weights")
    normed = "q_norm.weight" in weights
    dim = head_dim or (weights["q_norm.weight"].numel() if normed else None)
    if dim is None:
        raise UsageError("head_dim cannot be told without q_norm.weight; pass head_dim=64 or 128")
    q_width, hidden_size = weights["q_proj.weight"].shape
    dtype = str(weights["q_proj.weight"].dtype).removeprefix("torch.")
    problem = variant(normed, "q_proj.bias" in weights, dtype)
    if rotary_dim not in (None, dim):
        problem = with_rotary_width(problem, rotary_dim)
    return problem.with_constants(
        hidden_size=hidden_size,
        head_dim=dim,
        num_attention_heads=q_width // dim,
        num_key_value_heads=weights["k_proj.weight"].shape[0] // dim,
    )
