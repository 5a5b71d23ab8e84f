"""Checks and times the Gluon projections on a Hopper GPU: one child process a config, one JSON line a result.

    PYTHONPATH=.src python benchmarks/try_gluon_gemm.py

Ends within 100 s. A config that hangs or faults costs itself alone. `error_ratio` is the relative Frobenius error
against float32 over that of the eager bfloat16 ops; `cublas_us` is torch.mm alone on packed weights, interleaved.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

TOTAL_S = 96.0
CONFIG_S = 40.0
ROUNDS = 20
FLUSH_BYTES = 256 << 20
GUARD_ROWS = 64

SHAPE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "CONSUMERS", "GROUP_M")
# stage, config, cases to check and time; the targets first. Ragged cases end inside a tile and inside a batch.
PLANS: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
    ("qkv", (128, 256, 64, 4, 2, 8), ("b8s512", "b4s293", "b1s512", "b3s67")),
    ("output", (128, 256, 64, 4, 2, 8), ("b8s512", "b4s293", "b1s512", "b3s67")),
    ("qkv", (128, 256, 64, 4, 2, 16), ("b8s512", "b4s293")),
    ("output", (128, 256, 64, 4, 2, 16), ("b8s512", "b4s293")),
    ("qkv", (128, 128, 64, 6, 2, 8), ("b1s512", "b4s293", "b1s128", "b1s7")),
    ("output", (128, 128, 64, 6, 2, 8), ("b1s512", "b4s293", "b1s128", "b1s7")),
    ("qkv", (256, 128, 64, 3, 2, 8), ("b8s512", "b1s512")),
    ("output", (64, 128, 128, 4, 1, 8), ("b1s128", "b1s512")),
    ("qkv", (64, 128, 128, 4, 1, 8), ("b1s128", "b1s512")),
    ("qkv", (128, 256, 64, 3, 2, 8), ("b8s512",)),
    ("output", (256, 128, 64, 3, 2, 8), ("b8s512",)),
    ("output", (64, 64, 128, 6, 1, 8), ("b1s128",)),
)


def main() -> None:
    started = time.monotonic()
    # All children import at once and wait for their turn, so that only one at a time holds the GPU.
    command = [sys.executable, __file__, "--child"]
    children = [
        subprocess.Popen([*command, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for i in range(len(PLANS))
    ]
    for (stage, shape, _), child in zip(PLANS, children, strict=True):
        left = min(CONFIG_S, TOTAL_S - (time.monotonic() - started))
        began = time.monotonic()
        try:
            printed, _ = child.communicate(b"go\n", timeout=max(left, 0.01))
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
            print(json.dumps({"stage": stage, "config": shape, "error": f"no end within {left:.0f} s"}), flush=True)
        lines = printed.decode(errors="replace").splitlines()
        print("\n".join(lines if child.returncode == 0 else [*lines[:6], *lines[6:][-12:]]), flush=True)
        print(json.dumps({"rc": child.returncode, "wall_s": round(time.monotonic() - began, 1)}), flush=True)


def child(index: int) -> None:
    import torch  # noqa: F401
    import triton  # noqa: F401

    stage, shape, cases = PLANS[index]
    sys.stdin.readline()
    for name in cases:
        answer: dict[str, Any] = {"stage": stage, "case": name, "config": shape}
        try:
            answer |= measured(stage, dict(zip(SHAPE, shape, strict=True)), name)
        except Exception as error:
            answer["failed"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(answer), flush=True)
        if "failed" in answer:
            sys.exit(1)


def measured(stage: str, values: dict[str, int], name: str) -> dict[str, Any]:
    import torch

    from tilewright.kernel_templates.base import run_kernel
    from tilewright.kernel_templates.device import cuda_limits
    from tilewright.kernel_templates.gqa_attention import gluon_output, gluon_qkv
    from tilewright.kernel_templates.inputs import InputOptions, make_inputs
    from tilewright.problem import load_problem

    template = gluon_qkv.TEMPLATE if stage == "qkv" else gluon_output.TEMPLATE
    case = load_problem().parse_case(name)
    reason = template.rejection(values, case, cuda_limits())
    if reason is not None:
        return {"rejected": reason}
    tensors: dict[str, Any] = make_inputs(case, "cuda", InputOptions(seed=3, random_norm_weights=True))
    source, target = ("hidden_states", "qkv") if stage == "qkv" else ("context", "output")
    if stage == "output":
        tensors["context"] = torch.randn(case.shape("context") or (), device="cuda").bfloat16()
    tensors[source] = guarded(tensors[source])
    out = guarded(torch.full(case.shape(target) or (), float("nan"), device="cuda", dtype=torch.bfloat16))
    weights = [tensors[f"{n}_proj_weight"] for n in ("qkv" if stage == "qkv" else "o")]
    packed = torch.cat(weights).T
    flat, plain = tensors[source].flatten(0, 1), torch.empty_like(out.flatten(0, 1))

    def ours() -> None:
        template.launch({**tensors, target: out}, values, case, run_kernel)

    ours()
    torch.cuda.synchronize()
    first = out.clone()
    answer = errors(stage, tensors, case, out)
    for _ in range(3):
        ours()
    torch.cuda.synchronize()
    storage = out.untyped_storage()
    whole = torch.empty(0, dtype=out.dtype, device="cuda").set_(storage)
    answer["repeats_equal"] = bool(torch.equal(first, out))
    answer["guard_intact"] = bool(whole[out.numel() :].isnan().all())
    ours_us, cublas_us = timed(ours, lambda: torch.mm(flat, packed, out=plain))
    flops = 2 * flat.shape[0] * packed.shape[0] * packed.shape[1]
    return {**answer, "us": ours_us, "cublas_us": cublas_us, "tflops": round(flops / ours_us / 1e6)}


def guarded(x: Any) -> Any:
    """The same values with NaN rows behind them in memory."""
    import torch

    size = x.numel()
    memory = torch.full((size + GUARD_ROWS * x.shape[-1],), float("nan"), device="cuda", dtype=x.dtype)
    memory[:size] = x.flatten()
    return memory[:size].view(x.shape)


def errors(stage: str, tensors: dict[str, Any], case: Any, out: Any) -> dict[str, float]:
    """Relative Frobenius errors of `out` and of the eager ops, their ratio; NaN where an element is not written."""
    import torch

    from tilewright.kernel_templates.gqa_attention.reference import OPS

    names = ("qkv_projection", "qk_norm", "rope") if stage == "qkv" else ("output_projection",)
    target = "qkv" if stage == "qkv" else "output"

    def chain(values: dict[str, Any]) -> Any:
        for name in names:
            values = {**values, **OPS[name](values, case)}
        return values[target]

    wide = chain({k: v.float() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()})
    eager = (chain(tensors).float() - wide).norm() / wide.norm()
    error = (out.float() - wide).norm() / wide.norm()
    worst = (out.float() - wide).abs().max()
    return {
        "error": float(error),
        "eager_error": float(eager),
        "error_ratio": round(float(error / eager), 3),
        "worst": float(worst),
    }


def timed(*functions: Callable[[], object]) -> Iterator[float]:
    """Median microseconds of each, as CUDA graphs, L2 flushed before each replay, in turn."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    graphs = []
    for function in functions:
        graph = torch.cuda.CUDAGraph()
        function()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            function()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, taken in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
    return (round(median(taken), 1) for taken in times)


if __name__ == "__main__":
    child(int(sys.argv[2])) if sys.argv[1:2] == ["--child"] else main()
