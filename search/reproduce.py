"""`tilewright verify --record`: what was measured again is stored beside its record, which may earn more trust."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tilewright.db.paths import locate
from tilewright.db.rows import StoredRecord, Trust
from tilewright.db.store import Store
from tilewright.db.trust import Repetition, mark_reproduced, stored_id
from tilewright.errors import UsageError
from tilewright.search.recheck import RECORD, Verified
from tilewright.search.recheck_run import VerifyReport


@dataclass(frozen=True)
class Again:
    """One case measured again; without a trust nothing was stored, and the note says why."""

    case: str
    trust: Trust | None
    note: str
    verdict: str | None = None  # agrees | differs | same day and host

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def record_again(
    report: VerifyReport, db: str | Path | None, *, host: str = "", now: datetime | None = None
) -> list[Again]:
    """Every case of a report. Only records of this very database are marked; one that is not there is not made."""
    if str(db or "").endswith(".json"):
        raise UsageError(f"{db} holds records alone, and --record has nowhere to write; pass a database with --db")
    location = locate(db)
    if location.path is not None and not location.path.exists():
        return [_judged(report, one) or _not_here(one, location.shown) for one in report.cases]
    with Store.open(db) as store:
        return list(_recorded(report, store, host, now))


def _recorded(report: VerifyReport, store: Store, host: str, now: datetime | None) -> Iterator[Again]:
    for one in report.cases:
        refused = _judged(report, one)
        record = one.subject.record
        if refused is not None or record is None:
            yield refused or _not_here(one, store.location.shown)
            continue
        found = _id_of(store, record)
        if found is None:
            yield _not_here(one, store.location.shown)
            continue
        time = one.times[RECORD]
        marked = mark_reproduced(store, found, Repetition(time.median, time.low, time.high, host, now))
        note = f"{marked.verdict}: {time.median:.1f} us now, {record.record.median_us:.1f} us recorded"
        yield Again(one.case.name, marked.trust, note, marked.verdict)


def _id_of(store: Store, record: StoredRecord) -> int | None:
    return store.change(lambda session: stored_id(session, record))


def _judged(report: VerifyReport, one: Verified) -> Again | None:
    """Why a case's times say nothing of its record's time."""
    record = one.subject.record
    why = (
        "there is no record" if record is None
        else "the interpreter's times are no measurements" if not report.measures
        else "it was not timed" if RECORD not in one.times
        else f"noisy: {one.noisy}" if one.noisy
        else "stale: made with another compiler or source" if one.subject.stale
        else "the record has no time" if record.record.median_us is None
        else "the plan that serves it is another case's" if record.record.case_key != one.case.key
        else ""
    )  # fmt: skip
    return Again(one.case.name, None, why) if why else None


def _not_here(one: Verified, shown: str) -> Again:
    return Again(one.case.name, None, f"the record is not in {shown}; `tilewright merge` brings shipped ones in")
