"""`dispatch` for the gqa_attention family: what its arguments mean, and which variant of the problem they are."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import GradientNeeded, UsageError
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.inputs import adjacent
from tilewright.kernel_templates.reference import run_ops
from tilewright.problem import Problem, WeightMode, WorkloadCase, load_problem
from tilewright.runtime.engine import Launcher, launcher_for
from tilewright.runtime.gqa_attention_op import Given, by_op, is_subclass
from tilewright.runtime.memo import Memo
from tilewright.runtime.rotary import rotary_adapters, table_shape
from tilewright.runtime.tensors import Adapter, check_alike, check_device, check_output, copies, signature
from tilewright.runtime.variants import infer_case, without

PROBLEM = "gqa_attention_with_qk_norm"
NAMES = (
    "hidden_states", "q_proj_weight", "q_proj_bias", "k_proj_weight", "k_proj_bias", "v_proj_weight", "v_proj_bias",
    "o_proj_weight", "q_norm_weight", "k_norm_weight", "cos", "sin", "output",
)  # fmt: skip
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
NORMS = ("q_norm_weight", "k_norm_weight")
HEAD_DIMS = (64, 128)


def dispatch(
    *,
    hidden_states: Tensor,
    q_proj_weight: Tensor,
    q_proj_bias: Tensor | None = None,
    k_proj_weight: Tensor,
    k_proj_bias: Tensor | None = None,
    v_proj_weight: Tensor,
    v_proj_bias: Tensor | None = None,
    o_proj_weight: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    cos: Tensor,
    sin: Tensor,
    rms_norm_eps: float = 1e-5,
    output: Tensor | None = None,
    head_dim: int | None = None,
) -> Tensor:
    """The whole block by the best plan known for this call; `head_dim` is needed only where shapes leave it open.

    Biases and norm weights may be left out, each group as a whole. Gradients are right, by running the reference again
    in the backward pass. UsageError (a ValueError) names the argument, its value and what is accepted.
    """
    given = (
        hidden_states, q_proj_weight, q_proj_bias, k_proj_weight, k_proj_bias, v_proj_weight, v_proj_bias,
        o_proj_weight, q_norm_weight, k_norm_weight, cos, sin, output,
    )  # fmt: skip
    if torch.compiler.is_compiling() or is_subclass(hidden_states):
        return by_op(given[:-1], rms_norm_eps, head_dim, output)
    return prepared(given, torch.is_grad_enabled(), head_dim)(given, rms_norm_eps)


def prepared(given: Given, grad: bool, head_dim: int | None) -> "Call | _Recorded":
    """What serves arguments like these, in the order of NAMES; worked out on first use."""
    q_proj_weight: Any = given[1]
    k_proj_weight: Any = given[3]
    try:
        packed = q_proj_weight.data_ptr() + q_proj_weight.nbytes == k_proj_weight.data_ptr() and _is_packed(given)
        key = (head_dim, packed, signature(given, grad=grad))
    except AttributeError:  # something is no tensor; the checks name it
        _prepare(given, grad, head_dim, packed=False)
        raise
    return _calls.get(key) or _calls.keep(key, _prepare(given, grad, head_dim, packed))


@dataclass(frozen=True)
class Call:
    """A prepared call: valid for every set of arguments of one signature."""

    present: tuple[str, ...]  # names of the tensors that are given, and what picks them from the arguments
    pick: Callable[[tuple[Tensor | None, ...]], tuple[Tensor, ...]]
    adapters: tuple[tuple[str, Adapter], ...]
    output_shape: tuple[int, ...]
    launcher: Launcher | None  # None where there is nothing to compute

    def __call__(self, given: Given, rms_norm_eps: float, qkv: Tensor | None = None) -> Tensor:
        """`qkv`, where given, is left holding the packed rows that the attention reads."""
        tensors: dict[str, Any] = dict(zip(self.present, self.pick(given), strict=True))
        if "output" not in tensors:
            hidden: Tensor = tensors["hidden_states"]
            tensors["output"] = hidden.new_empty(*self.output_shape)
        output: Tensor = tensors["output"]
        if type(rms_norm_eps) is not float or not 0.0 <= rms_norm_eps < math.inf:
            rms_norm_eps = _checked_eps(rms_norm_eps)
        if self.launcher is not None:
            tensors["rms_norm_eps"] = rms_norm_eps
            for name, adapt in self.adapters:
                tensors[name] = adapt(tensors[name])
            if qkv is not None:
                tensors["qkv"] = qkv
            self.launcher(tensors)
            if qkv is not None and "qkv" not in self.launcher.leaves:
                _fill(qkv, tensors, self.launcher.case)
        return output


@dataclass(frozen=True)
class _Recorded:
    """A call that autograd must record, which is what the op is for."""

    head_dim: int | None

    def __call__(self, given: Given, rms_norm_eps: float) -> Tensor:
        return by_op(given[:-1], rms_norm_eps, self.head_dim)


_calls: Memo[tuple[Any, ...], Call | _Recorded] = Memo()


def _fill(qkv: Tensor, tensors: Mapping[str, Any], case: WorkloadCase) -> None:
    """The packed rows by the reference, for a plan that keeps them to itself."""
    last = max(i for i, op in enumerate(case.problem.ops) if "qkv" in op.writes)
    state = {name: value for name, value in tensors.items() if name != "qkv"}
    qkv.copy_(run_ops(load_family(case.problem.family).ops, case.problem.op_names[: last + 1], state, case)["qkv"])


def _checked_eps(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"rms_norm_eps must be a finite number of at least 0, got {value!r}")
    return float(value)


def _is_packed(given: Given) -> bool:
    """True when the three weights, and the three biases where given, are views of one allocation, end to end."""
    by_name = dict(zip(NAMES, given, strict=True))
    for kind in ("weight", "bias"):
        parts = [t for name in PROJECTIONS if (t := by_name[f"{name}_{kind}"]) is not None]
        # Separate allocations may touch by chance; a view over them would leave its storage.
        if len({t.untyped_storage().data_ptr() for t in parts}) > 1 or not adjacent(parts):
            return False
    return True


def _prepare(given: Given, grad: bool, head_dim: int | None, packed: bool) -> Call | _Recorded:
    """Checks everything that the signature fixes, and finds the plan."""
    tensors = {name: tensor for name, tensor in zip(NAMES, given, strict=True) if tensor is not None}
    missing = [name for name in ("hidden_states", "o_proj_weight", "cos", "sin") if name not in tensors]
    missing += [f"{name}_weight" for name in PROJECTIONS if f"{name}_weight" not in tensors]
    if missing:
        raise UsageError(f"{missing[0]} is None; it must be a tensor")
    dtype = check_alike(tensors)
    case = infer(tensors, dtype, head_dim, "packed" if packed else "separate")
    hidden = tensors["hidden_states"]
    shape = (*hidden.shape[:2], case["hidden_size"])
    if "output" in tensors:
        check_output(tensors["output"], shape)
    if grad and (wanting := [name for name, t in tensors.items() if t.requires_grad]):
        if "output" in tensors:
            raise GradientNeeded(f"{wanting[0]} requires a gradient, which a given output cannot carry; leave it out")
        return _Recorded(head_dim)
    present, pick = tuple(tensors), itemgetter(*(NAMES.index(name) for name in tensors))
    if 0 in shape or hidden.is_meta:
        return Call(present, pick, (), shape, None)
    check_device(hidden.device)
    adapters = copies({name: t for name, t in tensors.items() if name not in ("cos", "sin", "output")})
    adapters |= rotary_adapters(tensors["cos"], tensors["sin"], shape[0])
    return Call(present, pick, tuple(adapters.items()), shape, launcher_for(case, hidden.device))


def infer(tensors: Mapping[str, Tensor], dtype: str, head_dim: int | None, weight_mode: WeightMode) -> WorkloadCase:
    """The case of these arguments; an empty batch or sequence counts as one row, so that all else is still checked."""
    hidden = tensors["hidden_states"]
    if hidden.dim() != 3:
        raise UsageError(f"hidden_states has shape {tuple(hidden.shape)}, expected (batch_size, seq_len, hidden_size)")
    batch, seq = hidden.shape[:2]
    width = tensors["cos"].shape[-1] if tensors["cos"].dim() else 0
    problem = variant(_switch(tensors, NORMS), _switch(tensors, [f"{n}_bias" for n in PROJECTIONS]), dtype)
    dim = head_dim_of(tensors, head_dim, width)
    if width < 2 or width % 2 or width > dim:
        raise UsageError(
            f"cos has a last dimension of {width}; accepted: an even rotary width of at most head_dim={dim}"
        )
    if width != dim:
        problem = with_rotary_width(problem, width)
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    shapes["hidden_states"] = (max(batch, 1), max(seq, 1), hidden.shape[2])
    for name in ("cos", "sin"):
        table_shape(name, tensors[name], batch, seq, width)
        shapes[name] = (max(batch, 1), max(seq, 1), width)
    case = infer_case(problem, shapes, weight_mode=weight_mode, known={"head_dim": dim})
    heads, kv_heads = case["num_attention_heads"], case["num_key_value_heads"]
    if heads % kv_heads:
        raise UsageError(
            f"q_proj_weight gives {heads} query heads, accepted: a multiple of the {kv_heads} of k_proj_weight"
        )
    return case


def _switch(tensors: Mapping[str, Tensor], names: "tuple[str, ...] | list[str]") -> bool:
    """True when all of these are given, False when none is."""
    given = [name for name in names if name in tensors]
    if given and len(given) < len(names):
        absent = next(name for name in names if name not in tensors)
        raise UsageError(f"{given[0]} is given and {absent} is None; give all of {', '.join(names)} or none")
    return bool(given)


def head_dim_of(tensors: Mapping[str, Tensor], head_dim: int | None, width: int) -> int:
    """From the norm weight, the argument, or a rotary width that leaves no other choice."""
    if head_dim is None and "q_norm_weight" in tensors:
        head_dim = tensors["q_norm_weight"].numel()
        source = "q_norm_weight"
    elif head_dim is None and width == HEAD_DIMS[-1]:
        return width
    else:
        source = "head_dim"
    if head_dim is None:
        raise UsageError(
            f"head_dim cannot be told without q_norm_weight at rotary width {width}; pass head_dim=64 or 128"
        )
    if head_dim not in HEAD_DIMS:
        raise UsageError(f"{source} gives head_dim={head_dim!r}; accepted: {', '.join(map(str, HEAD_DIMS))}")
    return head_dim


@cache
def variant(qk_norm: bool, bias: bool, dtype: str) -> Problem:
    """The family's problem with QK norm and biases switched on or off, rotating whole heads."""
    problem = load_problem(PROBLEM).with_dtype(dtype)
    if not qk_norm:
        problem = without(problem, ops=("qk_norm",))
    if not bias:
        problem = without(problem, inputs=[f"{name}_bias" for name in PROJECTIONS])
    return problem


def with_rotary_width(problem: Problem, width: int) -> Problem:
    """The problem with tables of `rotary_dim` columns: the first dims of each head turn, the rest pass through."""
    inputs = tuple(
        dataclasses.replace(spec, shape=(*(spec.shape or ())[:-1], "rotary_dim"))
        if spec.name in ("cos", "sin")
        else spec
        for spec in problem.inputs
    )
    return dataclasses.replace(problem, inputs=inputs, constants={**problem.constants, "rotary_dim": width})
