"""Several GPUs of one host: one worker process and one thread each, longest case first, a case stays on one GPU."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tilewright.db.environment import Environment
from tilewright.db.rows import TrialRow
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.interrupt import Interrupt
from tilewright.search.progress import CaseResult
from tilewright.search.request import gpu_count
from tilewright.search.run import (
    Parts,
    RunRecords,
    TuneReport,
    TuneRequest,
    Watcher,
    compiler_for,
    context_for,
    headline,
    run_outcome,
    run_row,
)
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
        store = stack.enter_context(Store.open(request.db))
        sessions = {device: stack.enter_context(session_for(device)) for device in devices}
        described = {device: session.describe() for device, session in sessions.items()}
        refuse_unequal({device: found.environment for device, found in described.items()})
        first = described[devices[0]]
        progress = stack.enter_context(watch(first.limits.kind != "interpret"))
        interrupt = stack.enter_context(Interrupt(progress.says))
        abandoned = threading.Event()
        for warning in store.warnings:
            progress.says(f"warning: {warning}")
        progress.says(f"{headline(first.environment, store, selection)} | {len(devices)} devices")
        learned: list[tuple[WorkloadCase, FusionPlan]] = []
        tuners: dict[str, Tuner] = {}
        every: list[RunRecords] = []
        for device, session in sessions.items():
            records = _begin(request, device, store, described[device], abandoned)
            stack.enter_context(run_outcome(store, records.run_id))
            compiler = compiler_for(first.limits, selection.problem.family, len(devices))
            parts = Parts(
                session,
                described[device],
                stack.enter_context(compiler),
                records,
                progress,
                stopping=lambda: interrupt.requested,
                devices=len(devices),
            )
            context = context_for(request, selection.problem.family, parts)
            tuners[device] = Tuner(context, records, refinal=request.refinal, learned=learned)
            every.append(records)

        def abandon() -> None:
            abandoned.set()
            for session in sessions.values():
                session.close()

        results = tune_longest_first(tuners, selection.cases, budget, lambda: interrupt.requested, abandon)
        interrupt.raise_if_requested()
        database = store.location.shown
    seconds, held = time.monotonic() - begun, sum(records.gpu_seconds for records in every)
    return TuneReport(selection.problem.name, first.environment, database, tuple(results), seconds, held)


def _begin(
    request: TuneRequest, device: str, store: Store, described: "Described", abandoned: threading.Event
) -> "_Records":
    """A run of the device's own."""
    run_id = store.begin_run(run_row(request), described.environment, device=device)
    return _Records(store, run_id, described.environment, request.resolved_effort.measure.regime_name, abandoned)


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
