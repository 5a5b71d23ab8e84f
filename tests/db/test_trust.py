"""How a number earns its trust."""

import socket
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from db_factories import a_case, a_record, a_run, an_env

from tilewright.db.rows import StoredRecord, Trust
from tilewright.db.store import Store
from tilewright.db.trust import Marked, Repetition, mark_reproduced
from tilewright.errors import NothingFound, UsageError

MADE = datetime(2026, 1, 1, 12, tzinfo=UTC)
NEXT_DAY = datetime(2026, 1, 2, 12, tzinfo=UTC)


def record_id(store: Store, median_us: float | None = 100.0) -> int:
    row = replace(a_record(), median_us=median_us, low_us=99.9, high_us=100.1, created_at=MADE)
    store.activate(store.begin_run(a_run(), an_env()), a_case(), an_env(), row)
    stored = the_record(store)
    assert stored.id is not None
    return stored.id


def the_record(store: Store) -> StoredRecord:
    (stored,) = store.active_records(a_case().problem.name, an_env(), "graph")
    return stored


@pytest.mark.parametrize(
    ("again", "trust"),
    [
        (Repetition(100.4, 100.0, 100.8, measured_at=NEXT_DAY), Trust.REPRODUCED),
        (Repetition(103.0, 100.05, 105.0, measured_at=NEXT_DAY), Trust.REPRODUCED),  # intervals overlap
        (Repetition(100.9, 100.8, 101.0, measured_at=NEXT_DAY), Trust.REPRODUCED),  # medians within 1 %
        (Repetition(110.0, 108.0, 112.0, measured_at=NEXT_DAY), Trust.MEASURED),
        (Repetition(90.0, 89.0, 91.0, measured_at=NEXT_DAY), Trust.MEASURED),
        (Repetition(100.0, 99.0, 101.0, host=socket.gethostname(), measured_at=MADE), Trust.MEASURED),
        (Repetition(100.0, 99.0, 101.0, host="another", measured_at=MADE), Trust.REPRODUCED),
    ],
    ids=str,
)
def test_within_noise_on_another_day_or_host_is_reproduced(again: Repetition, trust: Trust, tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.sqlite") as store:
        assert mark_reproduced(store, record_id(store), again).trust is trust
        assert the_record(store).trust is trust


def test_a_later_deviation_takes_nothing_back(tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.sqlite") as store:
        record = record_id(store)
        mark_reproduced(store, record, Repetition(100.0, 99.0, 101.0, measured_at=NEXT_DAY))
        assert mark_reproduced(store, record, Repetition(150.0, 149.0, 151.0)) == Marked("differs", Trust.REPRODUCED)


def test_what_is_not_there_or_has_no_time_cannot_be_reproduced(tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.sqlite") as store:
        record = record_id(store, None)
        with pytest.raises(UsageError, match="no measured time"):
            mark_reproduced(store, record, Repetition(1.0, 1.0, 1.0))
        with pytest.raises(NothingFound, match="no record 99"):
            mark_reproduced(store, 99, Repetition(1.0, 1.0, 1.0))
