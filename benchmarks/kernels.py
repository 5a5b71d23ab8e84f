"""Every stage alone against cuBLAS, cuDNN and the roofline, interleaved in one run on this GPU.

    python benchmarks/kernels.py --out benchmarks/results/FILE.json [--case b8s512 ...] [--candidates FILE]

A stage is each template at its default and at the config of this card's record, where there is one; FILE adds others,
one JSON object a line: {"case": "b8s512", "stages": [["gluon_qkv", {...}], ...]}. What covers the same ops is timed in
the same shuffled rounds. Nothing is timed before it is verified. References: `cublas` is torch.mm alone (the three
weights packed, no bias, norm or rotation), `cudnn` is SDPA alone, its result left where it is.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from tilewright.db.rows import Status
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.gqa_attention.library_attention import attend, heads
from tilewright.kernel_templates.inputs import InputOptions
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import WorkloadCase, load_problem
from tilewright.runtime.serving import lookup
from tilewright.search.case_state import CaseState
from tilewright.search.compile_pool import PooledCompiler
from tilewright.search.describe import Described, describe
from tilewright.search.measure import CudaTimer, Prepared, interleaved, prepare
from tilewright.search.outcome import Candidate, MeasureOptions
from tilewright.search.run import environment_json
from tilewright.search.verify import quick_check, replay_check

OPTIONS = MeasureOptions(input_sets=2)
CASES = ("b1s128", "b1s512", "b4s293", "b8s373", "b8s512", "b2s2048")
MOST_CONTESTANTS = 12  # of a round; captured graphs and their buffers stay alive together


class Reference:
    """A library call over one input set; its result is checked by nobody, it only shows what the hardware gives."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def restore(self) -> None:
        pass

    def run(self) -> None:
        self._call()


def references(state: CaseState, first: int, last: int) -> dict[str, Callable[[InputOptions], Reference]]:
    """Library calls that do the heavy part of ops first..last."""
    names = state.case.problem.op_names[first : last + 1]

    def cublas_qkv(options: InputOptions) -> Reference:
        tensors = state.inputs(options)
        packed = torch.cat([tensors[f"{n}_proj_weight"] for n in "qkv"]).T
        rows = tensors["hidden_states"].flatten(0, 1)
        return Reference(lambda: torch.mm(rows, packed))

    def cublas_output(options: InputOptions) -> Reference:
        tensors = state.outside(options, first)
        rows, weight = tensors["context"].flatten(0, 1), tensors["o_proj_weight"].T
        return Reference(lambda: torch.mm(rows, weight))

    def cudnn(options: InputOptions) -> Reference:
        q, k, v = heads(state.outside(options, first)["qkv"], state.case)
        return Reference(lambda: attend(q, k, v, "cudnn" if state.case["seq_len"] > 1 else "auto"))

    if names == ("attention",):
        return {"cudnn": cudnn}
    if names == ("output_projection",):
        return {"cublas": cublas_output}
    return {"cublas": cublas_qkv} if "qkv_projection" in names and "attention" not in names else {}


def flops(case: WorkloadCase, names: Sequence[str]) -> int:
    """Multiplications and additions of the matrix products of these ops; causal attention counts half its square."""
    tokens, width = case["batch_size"] * case["seq_len"], case["q_out_features"]
    projected = 2 * tokens * case["hidden_size"] * (width + 2 * case["kv_out_features"])
    counts = {
        "qkv_projection": projected,
        "attention": 2 * tokens * case["seq_len"] * width,
        "output_projection": 2 * tokens * case["hidden_size"] * width,
    }
    return sum(counts.get(name, 0) for name in names)


def size_bytes(case: WorkloadCase, names: Sequence[str]) -> int:
    """What the ops must read and write once: rows in and out, weights."""
    tokens, hidden, width = case["batch_size"] * case["seq_len"], case["hidden_size"], case["q_out_features"]
    every = width + 2 * case["kv_out_features"]
    weights = {"qkv_projection": hidden * every, "output_projection": hidden * width}
    inside = {"qkv_projection": hidden, "qk_norm": every, "rope": every, "attention": every, "output_projection": width}
    outside = {
        "qkv_projection": every,
        "qk_norm": every,
        "rope": every,
        "attention": width,
        "output_projection": hidden,
    }
    moved = tokens * (inside[names[0]] + outside[names[-1]])
    return 2 * (moved + sum(weights.get(name, 0) for name in names))


def candidates(
    case: WorkloadCase, limits: Limits, extra: Sequence[dict[str, Any]], bare: bool
) -> Iterator[tuple[str, Candidate]]:
    """Label and candidate: defaults, the record's stages, the record, and what the file adds."""
    registry = load_family(case.problem.family).registry
    if not bare:
        for template in registry.values():
            values = template.default(case, limits)
            if template.rejection(values, case, limits) is None:
                yield f"{template.name} default", Stage(template.name, values)
        plan = lookup(case).plan
        for stage in plan.stages:
            yield f"{stage.template} record", stage
        yield f"record: {plan.label}", plan
    for entry in extra:
        if entry["case"] == case.name:
            stages = tuple(Stage(name, values) for name, values in entry["stages"])
            label = " | ".join(f"{s.template} {json.dumps(s.values)}" for s in stages)
            yield label, stages[0] if len(stages) == 1 else FusionPlan(stages)


def bench(
    case: WorkloadCase, described: Described, entered: dict[str, Candidate], rounds: int
) -> Iterator[dict[str, Any]]:
    """One row a contestant; groups of those that cover the same ops."""
    state = CaseState(case, load_family(case.problem.family), torch.device("cuda", torch.cuda.current_device()))
    timer = CudaTimer(state.device, OPTIONS)
    groups: dict[tuple[int, int], dict[str, Candidate]] = {}
    for label, candidate in entered.items():
        segment = state.segment(candidate)
        group = groups.setdefault((segment.first, segment.last), {})
        if candidate not in group.values():
            group[label] = candidate
    for (first, last), group in groups.items():
        for begin in range(0, len(group), MOST_CONTESTANTS):
            some = dict(list(group.items())[begin : begin + MOST_CONTESTANTS])
            yield from _group(state, described, timer, first, last, some, rounds)


def _group(
    state: CaseState,
    described: Described,
    timer: CudaTimer,
    first: int,
    last: int,
    group: dict[str, Candidate],
    rounds: int,
) -> Iterator[dict[str, Any]]:
    case, names = state.case, state.case.problem.op_names[first : last + 1]
    contestants: dict[str, list[Prepared]] = {}
    for label, candidate in group.items():
        try:
            contestants[label] = verified(state, candidate, timer)
        except Exception as error:
            yield {"case": case.name, "ops": names, "name": label, "failed": f"{type(error).__name__}: {error}"[:300]}
    for label, make in references(state, first, last).items():
        held = [make(InputOptions(seed)) for seed in range(OPTIONS.input_sets)]
        contestants[label] = [(each, timer.prepare(each)) for each in held]
    times, failures = interleaved(contestants, timer, rounds=rounds, least=rounds, time_budget_s=60, seed=0)
    work, moved = flops(case, names), size_bytes(case, names)
    for label, samples in sorted(times.items(), key=lambda item: median(item[1])):
        middle = median(samples)
        row = {"case": case.name, "ops": names, "name": label, "median_us": round(middle, 2)}
        row["iqr_us"] = round(quantiles(samples, n=4)[2] - quantiles(samples, n=4)[0], 2)
        row["tflops"] = round(work / middle / 1e6, 1)
        if described.ceilings is not None:
            row["percent_of_roofline"] = round(100 * described.ceilings.floor_us(work, moved) / middle, 1)
        yield row
    for label, reason in failures.items():
        yield {"case": case.name, "ops": names, "name": label, "failed": reason}


def verified(state: CaseState, candidate: Candidate, timer: CudaTimer) -> list[Prepared]:
    """Right before and as it is timed, or ValueError."""
    finding = quick_check(state, candidate)
    if finding.status is not Status.OK:
        raise ValueError(finding.reason)
    ready = prepare(state, candidate, OPTIONS.input_sets, timer)
    finding = replay_check(state, ready[0][0], ready[0][1], InputOptions())
    if finding.status is not Status.OK:
        raise ValueError(finding.reason)
    return list(ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problem", default="gqa_attention_with_qk_norm")
    parser.add_argument("--case", action="append")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--candidates", type=Path)
    parser.add_argument("--only-candidates", action="store_true", help="neither defaults nor records")
    chosen = parser.parse_args()
    problem = load_problem(chosen.problem)
    described = describe("cuda:0")
    extra = [json.loads(line) for line in chosen.candidates.read_text().splitlines()] if chosen.candidates else []
    cases = [problem.parse_case(name) for name in chosen.case or CASES]
    entered = {c.name: dict(candidates(c, described.limits, extra, chosen.only_candidates)) for c in cases}
    compile_ahead(problem.family, described.limits, cases, entered)
    rows = []
    for case in cases:
        for row in bench(case, described, entered[case.name], chosen.rounds):
            rows.append(row)
            print(line(row), flush=True)
        torch.cuda.empty_cache()
    content = {
        "schema": "tilewright.kernels/1",
        "command": f"benchmarks/kernels.py --rounds {chosen.rounds}",
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment_json(described.environment),
        "rows": rows,
    }
    chosen.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def compile_ahead(
    family: str, limits: Limits, cases: Sequence[WorkloadCase], entered: dict[str, dict[str, Candidate]]
) -> None:
    """Fills Triton's cache on all cores, so that the GPU does not wait for a compiler."""
    work = [
        (stage, case)
        for case in cases
        for candidate in entered[case.name].values()
        for stage in (candidate.stages if isinstance(candidate, FusionPlan) else (candidate,))
    ]
    with PooledCompiler(family, limits, processes=os.cpu_count() or 1) as pool:
        for stage, case in work:
            pool.submit(stage, case)
        for stage, case in work:
            pool.result(stage, case)


def line(row: dict[str, Any]) -> str:
    shown = row.get("failed") or f"{row['median_us']:9.1f} us {row['tflops']:6.0f} TFLOP/s"
    share = f"{row['percent_of_roofline']:5.1f} %" if "percent_of_roofline" in row else ""
    return f"{row['case']:8} {'+'.join(row['ops'])[:34]:34} {shown} {share}  {row['name']}"


if __name__ == "__main__":
    main()
