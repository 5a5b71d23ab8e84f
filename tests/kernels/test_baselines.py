"""The eager baseline is the published definition."""

from typing import Any

import pytest
import torch

from tilewright.kernel_templates.base import allocate
from tilewright.kernel_templates.gqa_attention.baselines import BASELINES, CPU_BASELINES, baselines_for
from tilewright.kernel_templates.inputs import InputOptions, make_inputs
from tilewright.problem import WorkloadCase, load_problem


@pytest.mark.parametrize("case", load_problem().suite("smoke"), ids=lambda case: case.name)
def test_eager_equals_the_definition(case: WorkloadCase) -> None:
    inputs = make_inputs(case, "cpu", InputOptions(random_norm_weights=True))
    scope: dict[str, Any] = {}
    exec(case.problem.reference, scope)
    expected = scope["run"](**inputs)
    output = allocate(case, ["output"], "cpu")["output"].fill_(float("nan"))
    BASELINES["eager"](case)({**inputs, "output": output})
    assert torch.equal(output, expected)


def test_without_a_gpu_eager_stands_alone() -> None:
    assert tuple(baselines_for("interpret")) == CPU_BASELINES


def test_with_a_gpu_every_baseline_runs() -> None:
    assert baselines_for("cuda") == BASELINES
