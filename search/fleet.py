"""`tilewright tune --db postgresql://...`: cases become jobs of a fleet, which is then watched to its end."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import log2
from typing import Any
from uuid import uuid4

from procrastinate.exceptions import AlreadyEnqueued
from procrastinate.schema import SchemaManager

from tilewright.db import jobs
from tilewright.db.rows import StoredRecord
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.problem import WorkloadCase
from tilewright.search.fleet_job import FleetJob, Part
from tilewright.search.fleet_queue import TASK, make_app
from tilewright.search.fleet_records import patiently
from tilewright.search.fleet_share import create_studies
from tilewright.search.request import INTERPRET, Selection, gpu_name, resolve, resolve_device, sharded
from tilewright.search.run import TuneRequest
from tilewright.search.study import make_sampler
from tilewright.search.tune import Budget

POLL_S = 2.0


@dataclass(frozen=True)
class FleetReport:
    """Where the jobs of one request stand, with the records that their cases have by now."""

    problem: str
    gpu: str
    database: str
    states: tuple[jobs.JobState, ...]
    records: tuple[StoredRecord, ...]

    @property
    def all_done(self) -> bool:
        return all(state.status == "succeeded" for state in self.states)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "tilewright.fleet/1",
            "tool_version": version("tilewright"),
            "problem": self.problem,
            "gpu": self.gpu,
            "database": self.database,
            "jobs": [vars(state) for state in self.states],
            "records": [
                {
                    "case": stored.case_name,
                    "gpu": stored.environment.gpu_name,
                    "power_limit_w": stored.environment.power_limit_w,
                    "median_us": stored.record.median_us,
                    "verdict": stored.record.verdict,
                    "plan": stored.record.plan,
                }
                for stored in self.records
            ],
        }


def run_fleet(
    request: TuneRequest,
    *,
    gpu: str | None,
    detach: bool,
    says: Callable[[str], None],
    share_case: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> FleetReport:
    """Enqueues the cases and, unless detached, follows them to their end; an interrupt leaves them to the fleet."""
    Budget(request.budget, request.trials)
    if share_case is not None and share_case < 2:
        raise UsageError(f"share_case must be at least 2 boards, got {share_case}")
    queue = gpu or _model_here(request.device)
    selection = _selection(request, queue)
    with Store.open(request.db, journal_mode=request.journal_mode) as store:
        ids = enqueue(store, fleet_jobs(request, selection, share_case), queue)
        says(f"{len(ids)} jobs for {queue}, database {store.location.shown}")
        if not detach:
            _follow(store, ids, says, sleep)
        keys = {case.key for case in selection.cases}
        found = store.active_records(selection.problem.name, None, request.resolved_effort.measure.regime_name)
        records = tuple(stored for stored in found if stored.record.case_key in keys)
        states = tuple(jobs.states(store, ids))
        return FleetReport(selection.problem.name, queue, store.location.shown, states, records)


def enqueue(store: Store, work: Sequence[tuple[WorkloadCase, FleetJob]], queue: str) -> list[int]:
    """Ids of the jobs, longest first; a case that waits or runs already is not enqueued again, nor is a part of it."""
    assert store.location.url is not None
    jobs.create_tables(store, SchemaManager.get_schema())
    if any(job.part for _, job in work):
        create_studies(store)
    wanted = {job_key(job, queue): (case, job) for case, job in work}
    ids = jobs.open_jobs(store, list(wanted))
    under_way = {wanted[key][0].key for key in ids}
    with make_app(store.location.url).open() as app:
        for key, (case, job) in wanted.items():
            if case.key in under_way:
                continue
            lock = f"{queue}|{case.key}" + (f"|{job.part.number}" if job.part else "")
            settings = {"queue": queue, "lock": lock, "queueing_lock": key, "priority": priority(case)}
            try:
                ids[key] = app.configure_task(TASK, **settings).defer(**job.to_json())  # type: ignore[arg-type]
            except AlreadyEnqueued:  # by another head at the same moment
                ids |= jobs.open_jobs(store, [key])
    return [ids[key] for key in wanted if key in ids]


def fleet_jobs(
    request: TuneRequest, selection: Selection, share_case: int | None = None
) -> list[tuple[WorkloadCase, FleetJob]]:
    """A request's budgets are those of all cases together; each job gets its part.

    Boards that share a case share its trials; its seconds are wall time, which is the same for all of them.
    """
    count, boards = len(selection.cases), share_case or 1
    share = replace(
        request,
        trials=None if request.trials is None else -(-request.trials // (count * boards)),
        budget=None if request.budget is None else request.budget / count,
    )
    found = []
    for case in selection.cases:
        job = FleetJob(share, selection.suite, case.name, case.key)
        group = uuid4().hex
        parts = [None] if share_case is None else [Part(group, number, boards) for number in range(boards)]
        found += [(case, replace(job, part=part)) for part in parts]
    return found


def job_key(job: FleetJob, queue: str) -> str:
    """Equal for equal work in one queue, whatever its group."""
    alike = job if job.part is None else replace(job, part=replace(job.part, group=""))
    return hashlib.sha256(json.dumps([queue, alike.to_json()], sort_keys=True).encode()).hexdigest()[:32]


def priority(case: WorkloadCase) -> int:
    """Longer cases first, so that none is left alone at the end."""
    return round(1000 * log2(case.flops))


def _selection(request: TuneRequest, queue: str) -> Selection:
    """As request.select, for the fleet's device rather than this host's."""
    make_sampler(request.sampler, request.seed)
    suite = request.suite or ("smoke" if queue == INTERPRET else "full")
    found = resolve(request.problem, cases=request.cases, suite=suite, weights=request.weights, sizes_only=True)
    return found if request.shard is None else replace(found, cases=sharded(found.cases, request.shard))


def _model_here(device: str) -> str:
    chosen = resolve_device(device)
    if chosen == INTERPRET:
        if device == INTERPRET:
            return INTERPRET
        raise UsageError("no GPU is found here: name the model that the fleet tunes for, as in --gpu 'NVIDIA H200'")
    return gpu_name(int(chosen.partition(":")[2]))


def _follow(store: Store, ids: Sequence[int], says: Callable[[str], None], sleep: Callable[[float], None]) -> None:
    """Says what changed until no job is open."""
    told: dict[int, str] = {}
    while True:
        found = patiently(lambda: jobs.states(store, ids), says)
        changed = [state for state in found if state.status != told.get(state.id) and not state.open]
        for state in changed:
            says(f"{state.case:<10} {state.status}: {state.trials} trials{', ' + state.note if state.note else ''}")
        counts = Counter(state.status for state in found)
        if counts != Counter(told.values()):
            trials = sum(state.trials for state in found)
            done = len(found) - counts["todo"] - counts["doing"]
            says(f"{done}/{len(found)} done, {counts['doing']} running, {counts['todo']} waiting; {trials} trials")
        told = {state.id: state.status for state in found}
        if not any(state.open for state in found):
            return
        sleep(POLL_S)
