"""`verify --record`: a record earns `reproduced` by a time within noise on another day or host, and by nothing else."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from db_factories import a_case, a_record, a_run, an_env

from tilewright import cli
from tilewright.db.rows import StoredRecord, Trust
from tilewright.db.store import Store
from tilewright.errors import UsageError
from tilewright.kernel_templates.plan import FusionPlan, Stage
from tilewright.report.verified import verified_text
from tilewright.search.final import Interval
from tilewright.search.recheck import RECORD, Subject, Verified
from tilewright.search.recheck_run import VerifyReport
from tilewright.search.reproduce import Again, record_again

MADE, NEXT_DAY = (datetime(2026, 1, day, 12, tzinfo=UTC) for day in (1, 2))
PLAN = FusionPlan((Stage("gemm", {"BLOCK_M": 64}),))


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "t.sqlite"
    with Store.open(path) as store:
        row = a_record(100.0, low_us=99.5, high_us=100.5, created_at=MADE)
        store.activate(store.begin_run(a_run(), an_env()), a_case(), an_env(), row)
    return path


def the_record(path: Path) -> StoredRecord:
    with Store.open(path) as store:
        (stored,) = store.active_records(a_case().problem.name, an_env(), "graph")
    return stored


def a_report(record: StoredRecord, us: float = 100.3, measures: bool = True, **changes: Any) -> VerifyReport:
    subject = Subject(a_case(), PLAN, record, stale=changes.pop("stale", False))
    times = {RECORD: Interval(us, us * 0.999, us * 1.001)}
    verified = replace(Verified(subject, True, "as fast as it was", times), **changes)
    return VerifyReport("problem", an_env(), (verified,), 1.0, measures)


def once(report: VerifyReport, db: Path, now: datetime = NEXT_DAY, host: str = "") -> Again:
    (again,) = record_again(report, db, now=now, host=host)
    return again


def test_the_next_day_a_record_is_reproduced_and_results_say_so(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = once(a_report(the_record(db)), db)
    assert (again.trust, again.verdict) == (Trust.REPRODUCED, "agrees")
    assert the_record(db).trust is Trust.REPRODUCED
    assert cli.run(["results", "--db", str(db), "--own", "--trust", "reproduced"]) == 0
    assert "1 of 1 reproduced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("us", "host", "now", "verdict"),
    [(120.0, "", NEXT_DAY, "differs"), (100.0, "", MADE, "same day and host"), (80.0, "other", MADE, "differs")],
)
def test_another_time_or_the_same_day_reproduces_nothing(
    us: float, host: str, now: datetime, verdict: str, db: Path
) -> None:
    again = once(a_report(the_record(db), us), db, now, host)
    assert (again.trust, again.verdict) == (Trust.MEASURED, verdict)
    assert the_record(db).trust is Trust.MEASURED


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"measures": False}, "no measurements"),
        ({"times": {}}, "not timed"),
        ({"noisy": "power brake"}, "noisy: power brake"),
        ({"stale": True}, "stale"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_times_that_say_nothing_of_the_record_are_not_stored(changes: dict[str, Any], note: str, db: Path) -> None:
    again = once(a_report(the_record(db), **changes), db)
    assert again.trust is None
    assert note in again.note
    assert the_record(db).trust is Trust.MEASURED


def test_a_record_of_another_layer_marks_no_other_with_its_number(db: Path, tmp_path: Path) -> None:
    """Ids of one database mean nothing in another."""
    elsewhere = replace(the_record(db), record=replace(the_record(db).record, digest="another"))
    again = once(a_report(elsewhere), db)
    assert again.trust is None
    assert "is not in" in again.note
    assert the_record(db).trust is Trust.MEASURED
    missing = tmp_path / "none.sqlite"
    assert "is not in" in once(a_report(elsewhere), missing).note
    assert not missing.exists()


def test_a_file_of_records_cannot_be_written(db: Path) -> None:
    with pytest.raises(UsageError, match=r"records\.json holds records alone"):
        record_again(a_report(the_record(db)), "records.json")


def test_the_text_names_what_was_reproduced(db: Path) -> None:
    report = a_report(the_record(db))
    again = [one.to_json() for one in record_again(report, db, now=NEXT_DAY)]
    text = verified_text({**report.to_json(), "reproductions": again})
    assert "b4s512: reproduced, agrees: 100.3 us now, 100.0 us recorded" in text
