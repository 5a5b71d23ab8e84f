"""A tuning run from request to report: opens the store before the GPU, and closes both whatever happens."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.db.engine import JournalMode
from tilewright.db.environment import Environment
from tilewright.db.paths import without_password
from tilewright.db.rows import RecordRow, RunRow, RunStatus
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.kernel_templates.base import Limits
from tilewright.kernel_templates.families import load_family
from tilewright.problem import WeightMode
from tilewright.search.compile_pool import PooledCompiler
from tilewright.search.context import CompileAhead, Context, Device, NoCompiler
from tilewright.search.effort import Effort, effort_named
from tilewright.search.interrupt import Interrupt
from tilewright.search.outcome import PROTOCOL
from tilewright.search.progress import CaseResult, Progress
from tilewright.search.replay import ReplayDevice
from tilewright.search.request import REPLAY, Selection, resolve, resolve_recorded, resolve_wanted, sharded
from tilewright.search.run_records import RunRecords
from tilewright.search.session import DeviceSession
from tilewright.search.space import KINDS
from tilewright.search.study import make_sampler
from tilewright.search.tune import Budget, Tuner

if TYPE_CHECKING:
    from tilewright.search.describe import Described


@dataclass(frozen=True)
class TuneRequest:
    """The options of `tilewright tune`."""

    problem: str
    cases: Sequence[str] = ()
    suite: str | None = None
    device: str = "auto"
    effort: str = "standard"
    trials: int | None = None
    budget: float | None = None
    seed: int = 0
    sampler: str = "auto"
    min_gain: float = 0.01
    regime: str = "graph"
    warm_l2: bool = False
    weights: WeightMode = "separate"
    triton_only: bool = False
    refinal: bool = False
    wanted: str | None = None
    db: str | None = None
    journal_mode: JournalMode | None = None
    devices: str | None = None
    shard: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("triton",) if self.triton_only else KINDS

    @property
    def resolved_effort(self) -> Effort:
        effort = effort_named(self.effort)
        measure = replace(effort.measure, regime=self.regime, cold_l2=not self.warm_l2)
        return replace(effort, measure=measure)

    def select(self) -> Selection:
        make_sampler(self.sampler, self.seed)  # an unknown name is told before anything is opened
        found = self._selected()
        return found if self.shard is None else replace(found, cases=sharded(found.cases, self.shard))

    def _selected(self) -> Selection:
        if self.device.startswith(REPLAY):
            for option in ("suite", "wanted", "devices"):
                if getattr(self, option) is not None:
                    raise UsageError(f"--{option} cannot be used with --device replay, which names the cases itself")
            return resolve_recorded(self.device, cases=self.cases)
        if self.wanted is not None:
            if self.cases or self.suite:
                raise UsageError("--wanted names the cases itself; leave out --case and --suite")
            return resolve_wanted(self.wanted, self.problem, device=self.device)
        return resolve(self.problem, cases=self.cases, suite=self.suite, device=self.device, weights=self.weights)


class Watcher(Progress, Protocol):
    """Progress that is drawn between `with` and its end."""

    def __enter__(self) -> "Watcher": ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class TuneReport:
    """What a run found; `seconds` is wall time."""

    problem: str
    environment: Environment
    database: str
    results: tuple[CaseResult, ...]
    seconds: float
    gpu_seconds: float

    @property
    def all_found(self) -> bool:
        return bool(self.results) and all(result.record is not None for result in self.results)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "tilewright.tune/1",
            "tool_version": version("tilewright"),
            "problem": self.problem,
            "environment": environment_json(self.environment),
            "database": self.database,
            "seconds": round(self.seconds, 1),
            "gpu_seconds": round(self.gpu_seconds, 1),
            "cases": [_case_json(result) for result in self.results],
        }


def environment_json(environment: Environment) -> dict[str, Any]:
    return {name: value for name, value in vars(environment).items() if value not in (None, "")}


def _case_json(result: CaseResult) -> dict[str, Any]:
    record = result.record
    return {
        "case": result.case.name,
        "axes": dict(result.case.shape_axes),
        "trials": result.counts,
        "reused": result.reused,
        "seconds": round(result.seconds, 2),
        "message": result.message,
        "record": None if record is None else _record_json(record),
    }


def _record_json(record: RecordRow) -> dict[str, Any]:
    names = ("plan", "verdict", "regime", "weight_mode", "median_us", "low_us", "high_us", "default_us", "baseline")
    return {name: getattr(record, name) for name in (*names, "baseline_us", "floor_us", "deterministic")}


def run_tune(request: TuneRequest, watch: Callable[[bool], Watcher]) -> TuneReport:
    """Tunes what is asked; `watch(measures)` makes the view of the run. Raises Interrupted after saving."""
    selection = request.select()
    budget = Budget(request.budget, request.trials)
    effort = request.resolved_effort
    begun = time.monotonic()
    device = open_device(selection.device)
    with Store.open(request.db, journal_mode=request.journal_mode) as store, device as session:
        described = session.describe()
        environment, limits = described.environment, described.limits
        run_id = store.begin_run(run_row(request), environment, device=selection.device)
        records = RunRecords(store, run_id, environment, effort.measure.regime_name)
        with watch(limits.kind != "interpret") as progress, Interrupt(progress.says) as interrupt:
            for warning in store.warnings:
                progress.says(f"warning: {warning}")
            for note in selection.notes:
                progress.says(note)
            progress.says(headline(environment, store, selection))
            family = None if isinstance(session, ReplayDevice) else selection.problem.family
            with run_outcome(store, run_id), compiler_for(limits, family) as compiler:
                parts = Parts(session, described, compiler, records, progress, lambda: interrupt.requested)
                context = context_for(request, selection.problem.family, parts)
                if isinstance(session, ReplayDevice):
                    context = session.adapt(context)
                results = Tuner(context, records, refinal=request.refinal).run(selection.cases, budget)
                interrupt.raise_if_requested()
                share = records.gpu_seconds / (time.monotonic() - begun)
                if environment.kind == "replay":
                    progress.says(f"replayed {records.gpu_seconds:.0f} recorded GPU seconds, finals not counted")
                elif limits.kind == "cuda":
                    progress.says(f"GPU held for {records.gpu_seconds:.0f} s, {share:.0%} of the run")
        database = store.location.shown
    seconds = time.monotonic() - begun
    return TuneReport(selection.problem.name, environment, database, tuple(results), seconds, records.gpu_seconds)


@dataclass(frozen=True)
class Parts:
    """What a context is made of on one device."""

    session: Device
    described: "Described"
    compiler: CompileAhead
    records: RunRecords
    progress: Progress
    stopping: Callable[[], bool]
    devices: int = 1  # that share this host's cores


def context_for(request: TuneRequest, family_name: str, parts: Parts) -> Context:
    """The request on the device that is described."""
    family, limits = load_family(family_name), parts.described.limits
    return Context(
        family=family,
        device=parts.session,
        compiler=parts.compiler,
        environment=parts.described.environment,
        limits=limits,
        effort=request.resolved_effort,
        progress=parts.progress,
        record_trial=parts.records.record_trial,
        known_trials=parts.records.known_trials,
        ceilings=parts.described.ceilings,
        kinds=request.kinds,
        baselines=family.final_baselines if limits.kind == "cuda" else (),
        sampler=request.sampler,
        seed=request.seed,
        min_gain=request.min_gain,
        # More than the pool: a slow compile at the head of the queue must not idle the others.
        look_ahead=3 * compile_processes(parts.devices) // 2 + 1,
        stopping=parts.stopping,
        now_s=time.monotonic,
    )


def run_row(request: TuneRequest) -> RunRow:
    return RunRow(_command(), request.seed, request.resolved_effort.name, version("tilewright"), PROTOCOL)


@contextmanager
def run_outcome(store: Store, run_id: int) -> Iterator[None]:
    """The run's row ends as the run does."""
    try:
        yield
    except KeyboardInterrupt:
        store.finish_run(run_id, RunStatus.INTERRUPTED, "stopped by a signal")
        raise
    except BaseException as error:
        store.finish_run(run_id, RunStatus.FAILED, f"{type(error).__name__}: {error}"[:500])
        raise
    store.finish_run(run_id, RunStatus.DONE)


def open_device(device: str) -> DeviceSession | ReplayDevice:
    """The worker's session, or a recording."""
    return ReplayDevice.open(device) if device.startswith(REPLAY) else DeviceSession(device)


def compiler_for(limits: Limits, family: str | None, devices: int = 1) -> AbstractContextManager[CompileAhead]:
    """Compiles ahead on the device's share of the cores; nothing to compile in the interpreter or without a family."""
    if limits.kind != "cuda" or family is None:
        return _nothing_to_compile()
    return PooledCompiler(family, limits, processes=compile_processes(devices))


def compile_processes(devices: int = 1) -> int:
    """For each device; one core is left to its own process."""
    return max(1, (os.cpu_count() or 2) // devices - 1)


@contextmanager
def _nothing_to_compile() -> Iterator[CompileAhead]:
    yield NoCompiler()


def headline(environment: Environment, store: Store, selection: Selection) -> str:
    return (
        f"{environment.gpu_name} | Triton {environment.triton} | torch {environment.torch} | "
        f"{selection.problem.name}, {len(selection.cases)} cases | database {store.location.shown}"
    )


def _command() -> str:
    """As it was typed, but for passwords."""
    return shlex.join(["tilewright", *map(without_password, sys.argv[1:])])
