"""Runs one solution against the definition's own reference. A script of its own: torch, Triton, standard library.

`python runner.py JOB` in a folder that holds the solution's sources; JOB is JSON, one line of JSON per case comes back
on the descriptor that was stdout, whatever the solution prints.
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

BLOCKED = ("tilewright", "optuna", "sqlalchemy", "alembic")
MATCHED, ABSOLUTE, RELATIVE = 0.99, 1e-2, 1e-2  # SOL-ExecBench's tolerance where a workload states none
SETS = 2  # calls, each with other values at other addresses


class Blocked:
    """The solution stands on its own: what it must not need is not to be had."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"a solution must not import {name}")


def main(job: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.meta_path.insert(0, Blocked())
    if job["device"] == "cuda":
        # As the benchmark's references run; float32 references are to be float32.
        torch.backends.cuda.matmul.allow_tf32 = False
    function, module = load(job["file"], job["function"])
    reference: dict[str, Any] = {}
    exec(compile(job["reference"], "reference.py", "exec"), reference)
    for case in job["cases"]:
        try:
            answer = run_case(case, job, function, module, reference["run"])
        except Exception as error:
            frames = traceback.format_exception_only(error)
            answer = {"ok": False, "reason": " ".join("".join(frames).split())[:500]}
        print(json.dumps({"name": case["name"], **answer}), file=answers, flush=True)


def load(file: str, function: str) -> tuple[Any, Any]:
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, function), module


def run_case(case: dict[str, Any], job: dict[str, Any], function: Any, module: Any, reference: Any) -> dict[str, Any]:
    """Right for two input sets, inputs untouched, and the same launches both times."""
    if "plan" in case and hasattr(
        module, "PLANS"
    ):  # interpreted, a tuned plan is tried at a shape that is small enough
        module.PLANS.clear()
        module.PLANS[tuple(case["axes"])] = [(name, values) for name, values in case["plan"]]
    if "constants" in case:
        getattr(module, "CONSTANTS", {}).update(case["constants"])
    launches: list[list[str]] = []
    ratios = []
    for number in range(SETS):
        values = [draw(entry, number, job["device"]) for entry in case["inputs"]]
        before = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        outputs = [empty(entry, job["device"]) for entry in case["outputs"]]
        launches.append(call(function, module, values, outputs, job))
        for name, old, new in zip((e["name"] for e in case["inputs"]), before, values, strict=True):
            if isinstance(old, torch.Tensor) and not torch.equal(old, new):
                return {"ok": False, "reason": f"changes its input {name}"}
        reason, ratio = judge(values, outputs, reference, job)
        if reason:
            return {"ok": False, "reason": f"input set {number}: {reason}"}
        ratios.append(ratio)
    if launches[0] != launches[1]:
        return {"ok": False, "reason": f"launches {launches[0]} first and {launches[1]} then"}
    return {"ok": True, "reason": "", "error_ratio": max(ratios), "launches": launches[0]}


def call(function: Any, module: Any, values: list[Any], outputs: list[torch.Tensor], job: dict[str, Any]) -> list[str]:
    """Names and grids of the launches, where the solution has our launcher."""
    seen: list[str] = []
    plain = getattr(module, "launch_kernel", None)
    if plain is not None:

        def noted(kernel: Any, grid: Any, /, *args: Any, **options: Any) -> Any:
            seen.append(f"{getattr(kernel, 'fn', kernel).__name__}{list(grid)}")
            return plain(kernel, grid, *args, **options)

        module.launch_kernel = noted
    try:
        made = function(*values, *outputs) if job["dps"] else function(*values)
    finally:
        if plain is not None:
            module.launch_kernel = plain
    if not job["dps"]:
        for target, source in zip(outputs, made if isinstance(made, (tuple, list)) else [made], strict=True):
            if (source.shape, source.dtype) != (target.shape, target.dtype):
                raise ValueError(
                    f"returns {source.dtype} {list(source.shape)}, not {target.dtype} {list(target.shape)}"
                )
            target.copy_(source)
    if job["device"] == "cuda":
        torch.cuda.synchronize()
    return seen


def draw(entry: dict[str, Any], number: int, device: str) -> Any:
    """The protocol's inputs first; then norm weights that are not one."""
    if entry["shape"] is None:
        return entry["value"]
    generator = torch.Generator(device=device).manual_seed(1000 * number + entry["seed"])
    values = torch.randn(entry["shape"], generator=generator, device=device)
    if entry["draw"] == "norm":
        values = 1 + 0.5 * values * number
    elif entry["draw"] == "weight":
        values *= entry["shape"][-1] ** -0.5
    elif entry["draw"] == "clamped":
        values = values.clamp(-1, 1)
    return values.to(getattr(torch, entry["dtype"]))


def empty(entry: dict[str, Any], device: str) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    return torch.full(entry["shape"], float("nan"), dtype=dtype, device=device)


def judge(values: list[Any], outputs: list[torch.Tensor], reference: Any, job: dict[str, Any]) -> tuple[str, float]:
    """The benchmark's own tolerance against the reference, and ours against it in wide precision."""
    wide_dtype = torch.float32 if job["device"] == "cuda" else torch.float64
    widened = [v.to(wide_dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
    plain, wide = (made if isinstance(made, tuple) else (made,) for made in (reference(*values), reference(*widened)))
    worst = 0.0
    for output, eager, exact in zip(outputs, plain, wide, strict=True):
        if not bool(torch.isfinite(output).all()):
            return f"{int((~torch.isfinite(output)).sum())} of {output.numel()} values are not finite", 0.0
        close = (output.float() - eager.float()).abs() <= ABSOLUTE + RELATIVE * eager.float().abs()
        matched = float(close.float().mean())
        error, eager_error = (float((t.to(exact.dtype) - exact).norm() / exact.norm()) for t in (output, eager))
        ratio = error / max(eager_error, job["smallest_error"])
        if ratio > job["most_ratio"]:
            return f"relative error {error:.2e}, the reference's own {eager_error:.2e}", ratio
        if matched < MATCHED:
            return f"{matched:.2%} of the values are within tolerance, {MATCHED:.0%} are asked for", ratio
        worst = max(worst, ratio)
    return "", worst


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
