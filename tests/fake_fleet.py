"""A fleet's worker on a device that answers by the toys' formula: `fake_fleet.py URL LEASE_S TRIAL_S SLOWER`."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from child_processes import ROOT, environment
from toys import ENVIRONMENT, LIMITS, FormulaDevice, template

from tilewright.kernel_templates.families import Family, register_family
from tilewright.kernel_templates.plan import Registry
from tilewright.problem import Ceilings, WorkloadCase, load_problem
from tilewright.search.describe import Described
from tilewright.search.fleet_worker import WorkerOptions, run_worker
from tilewright.search.outcome import Candidate, FinalSamples, TrialOutcome
from tilewright.search.progress import Silent

ENV = dataclasses.replace(ENVIRONMENT, power_limit_w=700.0)
CASES = tuple(f"b1s{128 + 8 * number}" for number in range(12))
FAMILY = Family(
    Registry(
        [
            template("fused_projection", "qkv_projection", "qk_norm", "rope", tiles=(32, 64, 128)),
            template("attention", "attention", tiles=(32, 64, 128)),
            template("output", "output_projection", tiles=(32, 64, 128)),
        ]
    ),
    ops={},
    baselines={},
)


def register() -> None:
    register_family("gqa_attention", "fake_fleet")


def cases() -> tuple[WorkloadCase, ...]:
    return tuple(load_problem().parse_case(name) for name in CASES)


class FakeSession(FormulaDevice):
    """A GPU whose every trial takes a while, whose times are all so many times longer, and that needs no compiler."""

    def __init__(self, device: str = "cuda:0", trial_s: float = 0.0, slower: float = 1.0, **described: Any) -> None:
        super().__init__()
        self.device = device
        self.trial_s = trial_s
        self.slower = slower
        self.finals = 0
        self._environment = dataclasses.replace(ENV, **described)

    def __enter__(self) -> "FakeSession":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def describe(self) -> Described:
        limits = dataclasses.replace(LIMITS, kind="replay")
        return Described(self._environment, limits, Ceilings(790e12, 4.3e12))

    def evaluate(self, case: WorkloadCase, candidate: Candidate, *rest: Any, **named: Any) -> TrialOutcome:
        time.sleep(self.trial_s)
        outcome = super().evaluate(case, candidate, *rest, **named)
        return dataclasses.replace(outcome, samples_us=tuple(self.slower * us for us in outcome.samples_us))

    def final(self, *asked: Any, **named: Any) -> FinalSamples:
        self.finals += 1
        return super().final(*asked, **named)


class Says(Silent):
    """Talks on stdout, so that a test can listen."""

    def says(self, text: str) -> None:
        print(text, flush=True)


def start(url: str, lease_s: float, trial_s: float, slower: float = 1.0) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__)), url, *map(str, (lease_s, trial_s, slower))]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE)


def work(url: str, lease_s: float, trial_s: float, workers: int = 1) -> None:
    """In this process, until no job is open; several workers are threads."""
    work_on(url, lease_s, [FakeSession(trial_s=trial_s) for _ in range(workers)])


def work_on(url: str, lease_s: float, sessions: Sequence[FakeSession]) -> None:
    """As `work`, a worker for each of these devices."""
    register()
    options = WorkerOptions(url, device="cuda", lease_s=lease_s, until_done=True)

    def one(session: FakeSession) -> None:
        run_worker(options, Says(), lambda device: session)  # type: ignore[arg-type, return-value]

    threads = [threading.Thread(target=one, args=(session,)) for session in sessions[1:]]
    for thread in threads:
        thread.start()
    one(sessions[0])
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    work_on(sys.argv[1], float(sys.argv[2]), [FakeSession("cuda:0", float(sys.argv[3]), float(sys.argv[4]))])
