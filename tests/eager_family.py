"""The gqa_attention family in plain PyTorch: stands in for the real kernels where only serving is under test."""

import dataclasses
from collections.abc import Mapping

from triton.runtime.errors import OutOfResources

from tilewright.kernel_templates.base import Choice, Limits, Run, Template, Tensors, Value, Values
from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.gqa_attention import reference
from tilewright.kernel_templates.plan import Registry
from tilewright.kernel_templates.reference import run_ops
from tilewright.problem import WorkloadCase

LAUNCHES: list[str] = []  # names of the templates launched, in order


def long_enough_for_128_rows(values: Values, case: WorkloadCase, limits: Limits) -> bool:
    return values.get("BLOCK_M") != 128 or case["seq_len"] >= 128


def _does_not_build(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    raise OutOfResources(300_000, 232_448, "shared memory")


def _is_wrong(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
    LAUNCHES.append("wrong")
    tensors["output"].fill_(1.0)


def _template(
    name: str, covers: tuple[str, ...], optional: tuple[str, ...] = (), **choices: tuple[Value, ...]
) -> Template:
    def launch(tensors: Tensors, values: Values, case: WorkloadCase, run: Run) -> None:
        LAUNCHES.append(name)
        ops = [op for op in case.problem.ops if op.name in covers]
        state = run_ops(reference.OPS, [op.name for op in ops], tensors, case)
        for op in ops:
            for written in op.writes:
                tensors[written].copy_(state[written])

    def default(case: WorkloadCase, limits: Limits) -> Mapping[str, Value]:
        return {choice: values[0] for choice, values in choices.items()}

    return Template(
        name=name,
        kind="library",
        covers=covers,
        optional=optional,
        choices=lambda case, limits: tuple(Choice(choice, values) for choice, values in choices.items()),
        constraints=(long_enough_for_128_rows,),
        default=default,
        launch=launch,
        module=__name__,
    )


CHAIN = ("qkv_projection", "qk_norm", "rope", "attention", "output_projection")
UNBUILDABLE = dataclasses.replace(_template("unbuildable", CHAIN, ("qk_norm",)), launch=_does_not_build)
WRONG = dataclasses.replace(_template("wrong", CHAIN, ("qk_norm",)), launch=_is_wrong)

FAMILY = Family(
    registry=Registry(
        (
            _template("projection", ("qkv_projection",), BLOCK_M=(32, 64, 128)),
            _template("norm_rope", ("qk_norm", "rope"), optional=("qk_norm",)),
            _template("attention", ("attention",)),
            _template("output", ("output_projection",)),
            _template("whole", CHAIN, optional=("qk_norm",)),
            UNBUILDABLE,
            WRONG,
        )
    ),
    ops=reference.OPS,
    baselines={},
)
