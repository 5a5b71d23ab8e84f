"""How far a result can be believed on this card: isolation overhead, twins, noise floor, repeated tunes.

    python benchmarks/trust.py --out benchmarks/results/FILE.json [--twins 100] [--tunes 3] [--case b1s128 ...]

Isolation: the same candidates through the worker process and in this process. Twins: one plan entered twice in a
final; how often the two are called different. Noise floor: medians of one plan, measured again and again. Tunes: the
same cases tuned from empty databases with different seeds, and their winners timed against each other in one final.
"""

import argparse
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tilewright.kernel_templates.families import load_family
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.problem import WorkloadCase, load_problem
from tilewright.search.final import ratio_interval
from tilewright.search.outcome import FinalEntry
from tilewright.search.progress import Silent
from tilewright.search.repeatability import OPTIONS, noise_floor, twins
from tilewright.search.run import TuneRequest, environment_json, run_tune
from tilewright.search.session import DeviceSession
from tilewright.search.worker import Desk


class Unwatched(Silent):
    def __enter__(self) -> "Unwatched":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NoPipe:
    """Takes what a worker would send to its parent."""

    def send(self, reply: object) -> None:
        pass


def candidates(case: WorkloadCase, limits: Any, count: int) -> list[Stage]:
    template = load_family(case.problem.family).registry["norm_rope"]
    return [Stage(template.name, values) for values in template.valid_configs(case, limits)[:count]]


def isolation(session: DeviceSession, case: WorkloadCase, limits: Any) -> dict[str, float]:
    """Seconds a candidate through the worker and here, kernels compiled and the case open in both."""
    stages = candidates(case, limits, 20)
    desk = Desk(NoPipe(), session.device)  # type: ignore[arg-type]

    def through_worker(stage: Stage) -> None:
        session.evaluate(case, stage, OPTIONS, run_limit_s=30)

    def in_process(stage: Stage) -> None:
        desk.evaluate(case, stage, OPTIONS)

    seconds = {}
    for name, run in (("worker", through_worker), ("in_process", in_process)):
        for stage in stages:
            run(stage)
        begun = time.perf_counter()
        for stage in stages:
            run(stage)
        seconds[name] = (time.perf_counter() - begun) / len(stages)
    return {**seconds, "ratio": seconds["worker"] / seconds["in_process"]}


def repeated_tunes(
    cases: list[str], count: int, device: str, effort: str
) -> tuple[dict[str, dict[str, FusionPlan]], list[float]]:
    """Winners by case and seed, each tune from an empty database; and the seconds that each took."""
    winners: dict[str, dict[str, FusionPlan]] = {name: {} for name in cases}
    seconds = []
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            request = TuneRequest(
                "gqa_attention_with_qk_norm", cases, None, device, effort, seed=seed, db=f"{folder}/t.sqlite"
            )
            report = run_tune(request, lambda measures: Unwatched())
        seconds.append(report.seconds)
        for result in report.results:
            if result.record is not None:
                winners[result.case.name][f"seed {seed}"] = FusionPlan.from_json(result.record.plan)
    return winners, seconds


def joint_final(session: DeviceSession, case: WorkloadCase, plans: dict[str, FusionPlan]) -> dict[str, Any]:
    entries = [FinalEntry(name, plan, "candidate") for name, plan in plans.items()]
    samples = session.final(case, entries, rounds=100, options=OPTIONS, time_budget_s=20)
    medians = {name: median(times) for name, times in samples.rounds.items()}
    best = min(medians, key=lambda name: medians[name])
    ratios = {name: ratio_interval(times, samples.rounds[best]).median for name, times in samples.rounds.items()}
    return {
        "case": case.name,
        "medians_us": medians,
        "ratio_to_best": ratios,
        "labels": {n: p.label for n, p in plans.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--twins", type=int, default=100)
    parser.add_argument("--tunes", type=int, default=3)
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--case", action="append")
    chosen = parser.parse_args()
    names = chosen.case or ["b1s128", "b4s293", "b4s512", "b1s2048"]
    problem = load_problem()
    registry = load_family(problem.family).registry
    content: dict[str, Any] = {
        "schema": "tilewright.trust/1",
        "command": f"benchmarks/trust.py --twins {chosen.twins} --tunes {chosen.tunes} --effort {chosen.effort}",
    }
    winners, seconds = repeated_tunes(names, chosen.tunes, chosen.device, chosen.effort) if chosen.tunes else ({}, [])
    with DeviceSession(chosen.device) as session:
        described = session.describe()
        small = problem.parse_case("b1s128")
        plan = registry.default_plan(small, described.limits)
        content["environment"] = environment_json(described.environment)
        content["finished_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        content["tunes"] = {
            "seconds": seconds,
            "joint_finals": [joint_final(session, problem.parse_case(n), p) for n, p in winners.items()],
        }
        content["twins"] = [twins(session, small, plan, chosen.twins)]
        content["noise_floor"] = [
            noise_floor(session, problem.parse_case(n), registry.default_plan(problem.parse_case(n), described.limits))
            for n in names
        ]
        content["isolation"] = isolation(session, problem.parse_case("b4s512"), described.limits)
    chosen.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: content[name] for name in ("twins", "noise_floor", "isolation", "tunes")}))


if __name__ == "__main__":
    main()
