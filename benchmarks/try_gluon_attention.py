"""Checks and times the Gluon attention on a Hopper GPU: one child process a config, one JSON line a result.

    PYTHONPATH=.src python benchmarks/try_gluon_attention.py

Ends within 100 s. A config that hangs or faults costs itself alone. `error_ratio` is the relative Frobenius error
against float32 over that of bfloat16 SDPA on the same views, interleaved with it when timed. qkv and context lie inside
NaN-filled memory; `stray_writes` counts elements beside context that changed.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, Queue
from statistics import median
from typing import Any

TOTAL_S = 96.0
CONFIG_S = 40.0
ROUNDS = 20
FLUSH_BYTES = 256 << 20
GUARD = 1 << 16  # elements of NaN before and behind each tensor

NAMES = ("BLOCK_N", "STAGES", "HEADS_PER_TILE", "PING_PONG", "PDL")
# Cases (batch, seq_len) to check; the last three are too small to be worth a timing.
TIMED = ((2, 2048), (8, 512), (4, 293), (1, 128))
CHECKED = ((2, 67), (3, 1), (2, 1000))
CONFIGS: tuple[tuple[int | bool, ...], ...] = (
    (128, 2, 1, True, True),
    (128, 2, 1, False, True),
    (64, 4, 1, False, True),
    (64, 4, 2, False, True),
    (64, 4, 2, True, True),
    (64, 3, 4, False, True),
    (128, 2, 1, True, False),
    (128, 2, 2, True, True),
    (64, 4, 4, True, True),
    (64, 4, 1, False, False),
)


def main() -> None:
    """All children import and compile at once, and wait for their turn: only one at a time holds the GPU."""
    started = time.monotonic()
    children = [_start(i) for i in range(len(CONFIGS))]
    for config, child in zip(CONFIGS, children, strict=True):
        began = time.monotonic()
        deadline = began + min(CONFIG_S, max(TOTAL_S - (began - started), 0.0))
        _relay(child, deadline)
        label = dict(zip(NAMES, config, strict=True))
        if child.poll() is None:
            child.kill()
            print(json.dumps({"config": label, "error": "killed at its time limit"}), flush=True)
        print(
            json.dumps({"config": label, "rc": child.wait(), "wall_s": round(time.monotonic() - began, 1)}), flush=True
        )


def _start(i: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, "--child", str(i)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _relay(child: "subprocess.Popen[str]", deadline: float) -> None:
    """Lets the child go, and prints its lines as they come until it ends or the deadline passes."""
    lines: Queue[str | None] = Queue()

    def read() -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    assert child.stdin is not None
    try:
        child.stdin.write("go\n")
        child.stdin.flush()
        while (line := lines.get(timeout=max(deadline - time.monotonic(), 0.01))) is not None:
            print(line[:400].rstrip(), flush=True)
        child.wait(timeout=max(deadline - time.monotonic(), 0.01))
    except (Empty, BrokenPipeError, subprocess.TimeoutExpired):
        return


def child(i: int) -> None:
    """Compiles, waits for its turn, then checks every case and times the larger ones."""
    from tilewright.kernel_templates.compile import compile_stage
    from tilewright.kernel_templates.device import named_limits
    from tilewright.kernel_templates.gqa_attention.gluon_attention import TEMPLATE
    from tilewright.problem import load_problem

    values: dict[str, Any] = dict(zip(NAMES, CONFIGS[i], strict=True))
    problem = load_problem()
    limits = named_limits(90, 132)
    reason = TEMPLATE.rejection(values, problem.case(batch_size=2, seq_len=2048), limits)
    compile_stage(TEMPLATE, values, problem.case(batch_size=2, seq_len=2048), limits)
    sys.stdin.readline()
    if reason is not None:
        print(json.dumps({"config": values, "rejected": reason}), flush=True)
        return
    for batch, seq_len in (*CHECKED, *TIMED):
        case = problem.case(batch_size=batch, seq_len=seq_len)
        print(json.dumps({**one_case(case, values, (batch, seq_len) in TIMED), "config": CONFIGS[i]}), flush=True)


def one_case(case: Any, values: dict[str, Any], timed: bool) -> dict[str, Any]:
    import torch

    from tilewright.kernel_templates.base import run_kernel
    from tilewright.kernel_templates.gqa_attention.gluon_attention import launch

    batch, seq_len, dim = case["batch_size"], case["seq_len"], case["head_dim"]
    heads, kv_heads = case["num_attention_heads"], case["num_key_value_heads"]
    torch.manual_seed(0)
    _, qkv = guarded(batch, seq_len, (heads + 2 * kv_heads) * dim)
    qkv.normal_()
    around, context = guarded(batch, seq_len, heads * dim)

    def ours() -> None:
        launch({"qkv": qkv, "context": context}, values, case, run_kernel)

    ours()
    torch.cuda.synchronize()
    q, k, v = qkv.unflatten(-1, (-1, dim)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    libraries = {"cudnn": cudnn, "flash": flash} if seq_len > 1 else {"flash": flash}
    expected = reference(q, k, v)
    got = context.float()
    theirs = libraries[next(iter(libraries))](q, k, v).transpose(1, 2).flatten(2).float()
    error, their_error = (float((x - expected).norm() / expected.norm()) for x in (got, theirs))
    stray = int((~around.isnan()).sum()) - context.numel()
    first = context.clone()
    ours()
    repeatable = bool(torch.equal(first, context))
    result: dict[str, Any] = {
        "case": f"b{batch}s{seq_len}", "ok": error <= 2 * their_error and stray == 0 and repeatable,
        "error": float(f"{error:.3g}"), "error_ratio": round(error / max(their_error, 1e-12), 3),
        "worst": float(f"{float((got - expected).abs().max()):.3g}"), "stray_writes": stray,
        "nan": int(got.isnan().sum()), "repeatable": repeatable,
    }  # fmt: skip
    if timed and result["nan"] == 0:
        run: dict[str, Callable[[], Any]] = {"ours": ours}
        run |= {name: partial(op, q, k, v) for name, op in libraries.items()}
        for name, median_us in times_us(run).items():
            result[f"{name}_us"] = round(median_us, 1)
            result[f"{name}_tflops"] = round(2 * batch * seq_len**2 * heads * dim / median_us / 1e6, 1)
    return result


def guarded(batch: int, seq_len: int, features: int) -> tuple[Any, Any]:
    """NaN-filled memory, and a tensor in the middle of it."""
    import torch

    count = batch * seq_len * features
    around = torch.full((count + 2 * GUARD,), float("nan"), dtype=torch.bfloat16, device="cuda")
    return around, around[GUARD : GUARD + count].view(batch, seq_len, features)


def cudnn(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, False, 0.0, True, False)[0]


def flash(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True, False)[0]


def reference(q: Any, k: Any, v: Any) -> Any:
    """float32 [B, S, Hq * D], one batch row at a time so that the scores fit."""
    import torch

    seq_len = q.shape[2]
    hidden = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
    rows = []
    for b in range(q.shape[0]):
        grouped = q[b].float().unflatten(0, (k.shape[1], -1))  # [Hkv, group, S, D]
        scores = grouped @ k[b].float()[:, None].transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        rows.append((weights @ v[b].float()[:, None]).flatten(0, 1).transpose(0, 1).flatten(1))
    return torch.stack(rows)


def times_us(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median of graph replays, interleaved, the L2 flushed before each."""
    import torch

    graphs = dict(captured(runs))
    event: Callable[..., Any] = torch.cuda.Event
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[Any]] = {name: [] for name in graphs}
    for _ in range(ROUNDS + 2):
        for name, graph in graphs.items():
            flush.zero_()
            begin, end = (event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: median(b.elapsed_time(e) * 1000 for b, e in pairs[2:]) for name, pairs in events.items()}


def captured(runs: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, Any]]:
    import torch

    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        yield name, graph


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]))
    else:
        main()
