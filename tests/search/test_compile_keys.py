"""Compiling ahead pays only if a launch on the card asks Triton's cache for the same keys."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own: kernels are interpreted in this one. Host memory stands for the card's: Triton looks at
# types, shapes and addresses alone.
PROGRAM = """
import json
import torch
from tilewright.kernel_templates.base import allocate
from tilewright.kernel_templates.compile import compiling_for
from tilewright.kernel_templates.device import named_limits
from tilewright.kernel_templates.families import load_family
from tilewright.problem import load_problem

case, limits = load_problem().parse_case("b1s128"), named_limits(90, 132)
names = [spec.name for spec in case.problem.tensors.values() if spec.shape is not None]


def keys(template, device, offset=0):
    found = []

    def run(kernel, grid, /, *args, **options):
        found.append(kernel.warmup(*args, grid=grid, **options).hash)

    values = template.default(case, limits)
    tensors = {**case.problem.scalars, **allocate(case, names, device)}
    for name, scratch in template.scratch(values, case).items():
        tensors[name] = torch.empty(scratch.shape, dtype=scratch.dtype, device=device)
    if offset:
        whole = torch.empty(tensors["qkv"].numel() + offset, dtype=tensors["qkv"].dtype, device=device)
        tensors["qkv"] = whole[offset:].view(tensors["qkv"].shape)
    with compiling_for(90):
        template.launch(tensors, values, case, run)
    return found


registry = load_family("gqa_attention").registry
ahead = {t.name: [keys(t, "meta"), keys(t, "cpu")] for t in registry.values() if t.kind == "triton"}
print(json.dumps({"ahead": ahead, "unaligned": keys(registry["norm_rope"], "cpu", offset=1)}))
"""


def test_keys_compiled_over_meta_tensors_are_those_of_aligned_real_ones() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / ".src")}
    child = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout)
    assert found["ahead"]
    for name, (meta, real) in found["ahead"].items():
        assert meta, name
        assert meta == real, name
    # An address that is no multiple of 16 does show, so equality above says something.
    assert found["unaligned"] != found["ahead"]["norm_rope"][0]
