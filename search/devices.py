"""Several GPUs of one host: one worker process and one thread each, longest case first, a case stays on one GPU."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.db.environment import Environment
from tilewright.db.rows import TrialRow
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.interrupt import Interrupt
from tilewright.search.progress import CaseResult, Progress
from tilewright.search.request import gpu_count
from tilewright.search.run import (
    Parts,
    TuneReport,
    TuneRequest,
    Watcher,
    compiler_for,
    context_for,
    headline,
    run_outcome,
    run_row,
)
from tilewright.search.run_records import RunRecords
from tilewright.search.session import DeviceSession
from tilewright.search.tune import Budget, Tuner

if TYPE_CHECKING:
    from tilewright.search.describe import Described


class Abandoned(KeyboardInterrupt):
    """The run was told twice to stop: what its devices still answer counts no more."""


def resolve_devices(text: str) -> tuple[str, ...]:
    """`all` is every GPU that the driver lists; else numbers, as in `0,1`."""
    count = gpu_count()
    if text == "all":
        numbers = list(range(count))
        if not numbers:
            raise UsageError("devices is all, and no GPU is found here; use --device interpret")
    else:
        parts = text.split(",")
        if not all(part.strip().isdigit() for part in parts):
            raise UsageError(f"devices must be all or numbers as in 0,1, got {text!r}")
        numbers = list(dict.fromkeys(int(part) for part in parts))
        if max(numbers) >= count:
            raise UsageError(f"devices names GPU {max(numbers)}, and {count} are found here")
    return tuple(f"cuda:{number}" for number in numbers)


def refuse_unequal(environments: Mapping[str, Environment]) -> None:
    """Raises UsageError unless all devices are of one model with one power limit: times must be comparable."""
    (first, expected), *others = environments.items()
    for device, found in others:
        if found.digest != expected.digest:
            differing = {
                name: (value, getattr(found, name))
                for name, value in vars(expected).items()
                if getattr(found, name) != value and not name.startswith(("sm_clock", "memory_clock", "peak_"))
            }
            what = ", ".join(f"{name} ({one} and {two})" for name, (one, two) in differing.items())
            raise UsageError(
                f"devices {first} and {device} differ in {what}: their times are not comparable; "
                "tune each kind by a run of its own"
            )


def run_devices(
    request: TuneRequest,
    devices: Sequence[str],
    watch: Callable[[bool], Watcher],
    session_for: Callable[[str], DeviceSession] = DeviceSession,
) -> TuneReport:
    """As run_tune, on several devices at once; each has a run of its own in the database."""
    selection = request.select()
    budget = Budget(request.budget, request.trials)
    begun = time.monotonic()
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(request.db, journal_mode=request.journal_mode))
        sessions = {device: stack.enter_context(session_for(device)) for device in devices}
        described = {device: session.describe() for device, session in sessions.items()}
        refuse_unequal({device: found.environment for device, found in described.items()})
        first = described[devices[0]]
        progress = stack.enter_context(watch(first.limits.kind != "interpret"))
        interrupt = stack.enter_context(Interrupt(progress.says))
        for warning in store.warnings:
            progress.says(f"warning: {warning}")
        progress.says(f"{headline(first.environment, store, selection)} | {len(devices)} devices")
        crew = _Crew(request, selection.problem.family, store, sessions, described)
        tuners = crew.staff(stack, progress, lambda: interrupt.requested)
        results = tune_longest_first(tuners, selection.cases, budget, lambda: interrupt.requested, crew.abandon)
        interrupt.raise_if_requested()
        database = store.location.shown
    seconds = time.monotonic() - begun
    problem = selection.problem.name
    return TuneReport(problem, first.environment, database, tuple(results), seconds, crew.gpu_seconds)


@dataclass
class _Crew:
    """The devices of one run with what works on them."""

    request: TuneRequest
    family: str
    store: Store
    sessions: Mapping[str, DeviceSession]
    described: Mapping[str, "Described"]
    records: list["_Records"] = field(default_factory=list)
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def gpu_seconds(self) -> float:
        return sum(records.gpu_seconds for records in self.records)

    def staff(self, stack: ExitStack, progress: Progress, stopping: Callable[[], bool]) -> dict[str, Tuner]:
        """A tuner for each device; `stack` ends their runs and compilers. Winners of one are seeds for all."""
        learned: list[tuple[WorkloadCase, FusionPlan]] = []
        count = len(self.sessions)
        tuners = {}
        for device, session in self.sessions.items():
            described = self.described[device]
            run_id = self.store.begin_run(run_row(self.request), described.environment, device=device)
            stack.enter_context(run_outcome(self.store, run_id))
            regime = self.request.resolved_effort.measure.regime_name
            records = _Records(self.store, run_id, described.environment, regime, self.abandoned)
            compiler = stack.enter_context(compiler_for(described.limits, self.family, count))
            parts = Parts(session, described, compiler, records, progress, stopping, count)
            context = context_for(self.request, self.family, parts)
            tuners[device] = Tuner(context, records, refinal=self.request.refinal, learned=learned)
            self.records.append(records)
        return tuners

    def abandon(self) -> None:
        """At once: whatever a device was busy with is not stored."""
        self.abandoned.set()
        for session in self.sessions.values():
            session.close()


class _Records(RunRecords):
    """Stores nothing more once the run is abandoned: a device that is being closed looks like a crash."""

    def __init__(
        self, store: Store, run_id: int, environment: Environment, regime: str, abandoned: threading.Event
    ) -> None:
        super().__init__(store, run_id, environment, regime)
        self._abandoned = abandoned

    def record_trial(self, case: WorkloadCase, row: TrialRow) -> None:
        if self._abandoned.is_set():
            raise Abandoned
        super().record_trial(case, row)


def tune_longest_first(
    tuners: Mapping[str, Tuner],
    cases: Sequence[WorkloadCase],
    budget: Budget = Budget(),
    stopping: Callable[[], bool] = lambda: False,
    abandon: Callable[[], None] = lambda: None,
    now_s: Callable[[], float] = time.monotonic,
) -> list[CaseResult]:
    """Each device takes the longest case that is left; results in the order of `cases`.

    An error on one device stops all of them after their trial. `abandon` is called when waiting is interrupted.
    """
    waiting = deque(sorted(cases, key=lambda case: (-case.flops, case.name)))
    results: dict[str, CaseResult] = {}
    errors: list[BaseException] = []
    turn = threading.Lock()
    begun = now_s()
    trials = None if budget.trials is None else -(-budget.trials // len(cases))

    def work(tuner: Tuner) -> None:
        while not stopping() and not errors:
            with turn:
                if not waiting:
                    return
                left = len(waiting)
                case = waiting.popleft()
            deadline = float("inf")
            if budget.seconds is not None:
                now = now_s()
                deadline = now + max(0.0, begun + budget.seconds - now) * min(len(tuners), left) / left
            try:
                number = len(cases) - left
                results[case.key] = tuner.tune_case(case, number, len(cases), deadline_s=deadline, trial_limit=trials)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(tuner,), name=device) for device, tuner in tuners.items()]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        abandon()
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
    return [results[case.key] for case in cases if case.key in results]
