"""Implementations with one thing wrong each, in plain PyTorch: a gate that lets one through is no gate.

`tilewright selftest` and the tests run them. They are in no registry that a tuning run sees.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tilewright.kernel_templates import seeded_faults
from tilewright.kernel_templates.base import Limits, Run, Scratch, Template, Tensors, Values, no_scratch
from tilewright.kernel_templates.families import Family, register_family
from tilewright.kernel_templates.gqa_attention import reference
from tilewright.kernel_templates.plan import FusionPlan, Registry, Stage
from tilewright.kernel_templates.reference import ReferenceOps, run_ops
from tilewright.problem import WorkloadCase

TILE = 16  # of the one that is right at whole tiles alone; divides the lengths of most cases


@dataclass(frozen=True)
class Seeded:
    """A wrong template, what is wrong with it, and words of the reason for which it must be rejected.

    `strict` marks those that only the strict check can see, because they are right at the case itself.
    """

    template: Template
    fault: str
    reason: str
    strict: bool = False


def no_causal_mask(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return _attention(t, case, first_hidden=None)


def mask_off_by_one(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return _attention(t, case, first_hidden=2)


def half_of_the_keys(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """Twice as fast, and what a broken loop bound does."""
    return _attention(t, case, stride=2)


def scale_left_out(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return _attention(t, case, scale=1.0)


def wrong_kv_head(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """Query head h reads kv head h % kv_heads instead of h // group."""
    return _attention(t, case, interleaved=False)


def k_tail_dropped(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    x = t["hidden_states"].clone()
    x[..., -TILE:] = 0
    return reference.qkv_projection({**t, "hidden_states": x}, case)


def bias_left_out(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    return reference.qkv_projection({name: value for name, value in t.items() if not name.endswith("bias")}, case)


def epsilon_outside_the_root(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide / (wide.square().mean(-1, keepdim=True).sqrt() + t["rms_norm_eps"])
        return weight * wide.to(x.dtype)

    q, k, v = reference.split_heads(t["qkv"], case)
    return {"qkv": reference.join_heads(norm(q, t["q_norm_weight"]), norm(k, t["k_norm_weight"]), v)}


def norm_weight_left_out(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    ones = {name: torch.ones_like(t[name]) for name in ("q_norm_weight", "k_norm_weight")}
    return reference.qk_norm({**t, **ones}, case)


def rope_halves_swapped(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    """cat(second, -first) instead of cat(-second, first)."""
    return reference.rope({**t, "sin": -t["sin"]}, case)


def rope_of_adjacent_pairs(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        width = t["cos"].shape[-1]
        turned = x[..., :width]
        pairs = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
        turned = turned * t["cos"][:, :, None] + pairs * t["sin"][:, :, None]
        return torch.cat((turned, x[..., width:]), dim=-1)

    q, k, v = reference.split_heads(t["qkv"], case)
    return {"qkv": reference.join_heads(rotate(q), rotate(k), v)}


def keys_not_rotated(t: Tensors, case: WorkloadCase) -> Mapping[str, Tensor]:
    q, _, v = reference.split_heads(reference.rope(t, case)["qkv"], case)
    return {"qkv": reference.join_heads(q, reference.split_heads(t["qkv"], case)[1], v)}


def _attention(
    t: Tensors,
    case: WorkloadCase,
    *,
    first_hidden: int | None = 1,
    stride: int = 1,
    scale: float | None = None,
    interleaved: bool = True,
) -> Mapping[str, Tensor]:
    """`first_hidden` keys after the row's own are masked, none when it is None."""
    q, k, v = (x.transpose(1, 2) for x in reference.split_heads(t["qkv"], case))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if interleaved else x.repeat(1, group, 1, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)).float()
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if first_hidden is not None:
        hidden |= torch.ones_like(hidden).triu(first_hidden)
    if stride > 1:
        hidden[:, 1::stride] = True
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).to(q.dtype)
    return {"context": (weights @ v).transpose(1, 2).flatten(2)}


Writer = Callable[[Tensors, WorkloadCase, Mapping[str, Tensor]], None]


def write_all(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    for name, value in made.items():
        t[name].copy_(value)


def even_rows_only(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    for name, value in made.items():
        t[name].flatten(0, -2)[::2].copy_(value.flatten(0, -2)[::2])


def last_row_wrong(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    write_all(t, case, made)
    for name in made:
        t[name].flatten(0, -2)[-1].mul_(0.5)


def whole_tiles_only(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    """The last, ragged tile of every sequence is computed as if it were whole."""
    write_all(t, case, made)
    ragged = case["seq_len"] % TILE
    if ragged:
        for name in made:
            t[name][:, -ragged:] = t[name][:, -ragged:].roll(1, -1)


def one_past_the_end(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    write_all(t, case, made)
    for name in made:
        t[name].as_strided((1,), (1,), t[name].storage_offset() + t[name].numel()).fill_(1.0)


def input_changed(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    """Normalises, rotates or scales where it should have copied."""
    write_all(t, case, made)
    t["hidden_states"].mul_(2)


def read_intermediate_changed(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    """Queries scaled in place."""
    write_all(t, case, made)
    t["qkv"].mul_(0.5)


class CachedOutput:
    """Computes once and gives the same answer ever after."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def __call__(self, t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
        for name, value in made.items():
            t[name].copy_(self._kept.setdefault((case.key, name), value.clone()))

    def forget(self) -> None:
        self._kept.clear()


CACHED_OUTPUT = CachedOutput()


def scratch_like_context(values: Values, case: WorkloadCase) -> Mapping[str, Scratch]:
    return {"partial": Scratch(case.shape("context") or (), torch.float32)}


def scratch_taken_for_cleared(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    """Accumulates into memory that nobody set to zero."""
    t["context"].copy_(t["partial"].add_(made["context"]))


def scratch_taken_for_kept(t: Tensors, case: WorkloadCase, made: Mapping[str, Tensor]) -> None:
    """Computes what it keeps in scratch only where it finds nothing there."""
    if not bool(torch.isfinite(t["partial"]).all()):
        t["partial"].copy_(made["context"])
    t["context"].copy_(t["partial"])


def _template(
    name: str,
    covers: tuple[str, ...],
    *,
    ops: ReferenceOps = MappingProxyType({}),
    write: Writer = write_all,
    scratch: Callable[[Values, WorkloadCase], Mapping[str, Scratch]] = no_scratch,
) -> Template:
    """The reference ops, `ops` in place of the true ones."""

    @torch.no_grad()
    def launch(t: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
        chain = [op for op in case.problem.ops if op.name in covers]
        state = run_ops({**reference.OPS, **ops}, [op.name for op in chain], t, case)
        write(t, case, {written: state[written] for op in chain for written in op.writes})

    return Template(
        name=name,
        kind="library",
        covers=covers,
        choices=lambda case, limits: (),
        constraints=(),
        default=_no_values,
        launch=launch,
        scratch=scratch,
        optional=("qk_norm", "rope"),
        module=__name__,
    )


def _no_values(case: WorkloadCase, limits: Limits) -> Values:
    return {}


def _wrong_op(op: str, function: Callable[[Tensors, WorkloadCase], Mapping[str, Tensor]], reason: str) -> Seeded:
    return Seeded(_template(function.__name__, (op,), ops={op: function}), function.__name__.replace("_", " "), reason)


def _wrong_write(op: str, write: Writer, reason: str, *, strict: bool = False, scratch: bool = False) -> Seeded:
    name = getattr(write, "__name__", "cached_output")
    template = _template(name, (op,), write=write, scratch=scratch_like_context if scratch else no_scratch)
    return Seeded(template, name.replace("_", " "), reason, strict)


SECOND = "second call"
SEEDED: tuple[Seeded, ...] = (
    _wrong_op("attention", no_causal_mask, "context: relative error"),
    _wrong_op("attention", mask_off_by_one, "context: relative error"),
    _wrong_op("attention", half_of_the_keys, "context: relative error"),
    _wrong_op("attention", scale_left_out, "context: relative error"),
    _wrong_op("attention", wrong_kv_head, "context: relative error"),
    _wrong_op("qkv_projection", k_tail_dropped, "qkv: relative error"),
    _wrong_op("qkv_projection", bias_left_out, "qkv: relative error"),
    _wrong_op("qk_norm", epsilon_outside_the_root, SECOND),
    _wrong_op("qk_norm", norm_weight_left_out, SECOND),
    _wrong_op("rope", rope_halves_swapped, "qkv: relative error"),
    _wrong_op("rope", rope_of_adjacent_pairs, "qkv: relative error"),
    _wrong_op("rope", keys_not_rotated, "qkv: relative error"),
    _wrong_write("output_projection", CACHED_OUTPUT, SECOND),
    _wrong_write("output_projection", even_rows_only, "values are not finite"),
    _wrong_write("output_projection", last_row_wrong, "error"),
    _wrong_write("attention", scratch_taken_for_cleared, "values are not finite", scratch=True),
    _wrong_write("attention", scratch_taken_for_kept, SECOND, scratch=True),
    _wrong_write("attention", whole_tiles_only, "neighbour", strict=True),
    _wrong_write("attention", one_past_the_end, "writes outside context"),
    _wrong_write("attention", read_intermediate_changed, "changes its input qkv"),
    _wrong_write("qkv_projection", input_changed, "changes its input hidden_states"),
)
# The same machinery with nothing wrong: rejected, it would prove the gate wrong and not the candidates.
CONTROLS = tuple(_template(f"true_{op}", (op,)) for op in reference.OPS)
HARMFUL = tuple(seeded_faults.template(fault, ("output_projection",), "output") for fault in seeded_faults.FAULTS)
FAMILY = Family(Registry((*CONTROLS, *(seeded.template for seeded in SEEDED), *HARMFUL)), reference.OPS, baselines={})


def register() -> None:
    """In this process the family's name stands for these."""
    register_family("gqa_attention", __name__)


def plan_with(template: Template, case: WorkloadCase) -> FusionPlan:
    """The template, and true ops for the rest of the chain."""
    covered = template.segment(case.problem.op_names)
    before = case.problem.op_names.index(covered[0])
    names = [f"true_{op}" for op in case.problem.op_names]
    names[before : before + len(covered)] = [template.name]
    return FusionPlan(tuple(Stage(name, {}) for name in names))
