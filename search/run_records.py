"""The store as one run sees it: what it writes, and what earlier runs left for it."""

from tilewright.db.environment import Environment
from tilewright.db.rows import RecordRow, Status, StoredRecord, TrialRow
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.kernel_templates.plan import FusionPlan
from tilewright.problem import WorkloadCase
from tilewright.search.outcome import PROTOCOL


class RunRecords:
    """Written under one run; read from all."""

    def __init__(self, store: Store, run_id: int, environment: Environment, regime: str) -> None:
        self._store, self.run_id, self._environment, self._regime = store, run_id, environment, regime
        self.gpu_seconds = 0.0

    def record_trial(self, case: WorkloadCase, row: TrialRow) -> None:
        self.gpu_seconds += row.gpu_s or 0.0
        self._store.add_trial(self.run_id, case, self._environment, row)

    def known_trials(self, case: WorkloadCase) -> list[TrialRow]:
        """What ended for a reason that would come again, checked and timed as it would be now."""
        rows = self._store.trials(case_key=case.key, env=self._environment, protocol=PROTOCOL)
        return [row for row in rows if row.status is not Status.ERROR]

    def activate(self, case: WorkloadCase, record: RecordRow) -> None:
        self._store.activate(self.run_id, case, self._environment, record)

    def active(self, case: WorkloadCase) -> RecordRow | None:
        stored = self._store.active_record(case, self._environment, self._regime)
        return None if stored is None or stored.invalid else stored.record

    def winners(self, case: WorkloadCase) -> list[tuple[WorkloadCase, FusionPlan]]:
        """Plans of records of other cases on this GPU model, the newest of each, of whatever sources: seeds."""
        found: dict[str, tuple[WorkloadCase, FusionPlan]] = {}
        for stored in self._store.active_records(case.problem.name, None, self._regime):
            there = stored.environment
            if (there.kind, there.gpu_name) == (self._environment.kind, self._environment.gpu_name):
                other = _winner(case, stored)
                if other is not None and other[0] != case:
                    found.setdefault(other[0].key, other)
        return list(found.values())


def _winner(case: WorkloadCase, stored: StoredRecord) -> tuple[WorkloadCase, FusionPlan] | None:
    """None for a record that cannot be read, or whose case is of another variant than the one that is tuned."""
    if stored.invalid or stored.record.case_key.rpartition("|")[0] != case.variant_key:
        return None
    try:
        other = case.problem.case(weight_mode=case.weight_mode, **stored.axes)
        return other, FusionPlan.from_json(stored.record.plan)
    except UsageError:
        return None
