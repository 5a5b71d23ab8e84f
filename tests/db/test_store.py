"""What the store promises to its one caller."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from db_factories import a_case, a_record, a_run, a_trial, an_env, fill

from tilewright.db.engine import JournalMode
from tilewright.db.reader import Reader
from tilewright.db.rows import Level, RunStatus, Status
from tilewright.db.store import Store
from tilewright.errors import DiskFull, NothingFound, StoreLocked, UsageError
from tilewright.search.outcome import PROTOCOL
from tilewright.search.run_records import RunRecords


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.sqlite"


def test_a_trial_comes_back_as_it_was_stored(path: Path) -> None:
    now = datetime.now(UTC)
    trial = a_trial(status=Status.TIMEOUT, reason="compile limit", started_at=now, finished_at=now)
    with Store.open(path) as store:
        store.add_trial(store.begin_run(a_run(), an_env()), a_case(), an_env(), trial)
        assert store.trials() == [trial]


def test_a_trial_is_stored_once_however_often_it_is_sent(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        ids = {store.add_trial(run, a_case(), an_env(), a_trial()) for _ in range(3)}
        assert len(ids) == len(store.trials()) == 1


@pytest.mark.parametrize(
    "changes",
    [{"attempt": 2}, {"regime": "eager"}, {"source_hash": "other"}, {"level": Level.PLAN}, {"digest": "other"}],
)
def test_a_trial_that_differs_in_its_identity_is_another_one(path: Path, changes: dict[str, Any]) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.add_trial(run, a_case(), an_env(), a_trial())
        store.add_trial(run, a_case(), an_env(), a_trial(**changes))
        assert len(store.trials()) == 2


def test_two_runs_may_measure_the_same_candidate(path: Path) -> None:
    with Store.open(path) as store:
        for _ in range(2):
            store.add_trial(store.begin_run(a_run(), an_env()), a_case(), an_env(), a_trial())
        assert len(store.trials()) == 2


def test_trials_are_filtered_by_everything_that_is_asked(path: Path) -> None:
    other = an_env(gpu_name="NVIDIA H100")
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.add_trial(run, a_case(), an_env(), a_trial(0))
        store.add_trial(run, a_case(), other, a_trial(1))
        store.add_trial(run, a_case("b1s128"), an_env(), a_trial(2, a_case("b1s128")))
        store.add_trial(run, a_case(), an_env(), a_trial(3, template="rope", status=Status.WRONG, source_hash="s3"))

        def numbers(**asked: object) -> list[int]:
            return [trial.config["number"] for trial in store.trials(**asked)]  # type: ignore[arg-type]

        assert numbers(case_key=a_case().key) == [0, 1, 3]
        assert numbers(env=other) == [1]
        assert numbers(template="rope") == [3]
        assert numbers(source_hash="s3") == [3]
        assert numbers(statuses=[Status.OK]) == [0, 1, 2]
        assert numbers(statuses=[]) == []
        assert numbers(level=Level.PLAN) == []
        assert numbers(limit=2) == [2, 3]


def test_trials_of_an_older_protocol_can_be_left_out(path: Path) -> None:
    with Store.open(path) as store:
        for number, protocol in enumerate(["1", "2", "2"]):
            run = store.begin_run(a_run(protocol=protocol), an_env())
            store.add_trial(run, a_case(), an_env(), a_trial(number))
        assert [trial.config["number"] for trial in store.trials(protocol="2")] == [1, 2]
        assert [trial.config["number"] for trial in store.trials(protocol="1")] == [0]


def test_a_run_knows_only_what_was_checked_and_timed_as_it_would_be_now(path: Path) -> None:
    with Store.open(path) as store:
        for number, protocol in enumerate(["an older one", PROTOCOL]):
            run = store.begin_run(a_run(protocol=protocol), an_env())
            store.add_trial(run, a_case(), an_env(), a_trial(number))
        records = RunRecords(store, store.begin_run(a_run(), an_env()), an_env(), "graph")
        assert [trial.config["number"] for trial in records.known_trials(a_case())] == [1]


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_the_journal_mode_of_a_file_is_a_choice(path: Path, mode: JournalMode) -> None:
    Store.open(path, journal_mode=mode).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma journal_mode").fetchone() == (mode,)


def test_a_server_has_no_journal_mode() -> None:
    with pytest.raises(UsageError, match="journal_mode is wal, and postgresql"):
        Store.open("postgresql://nobody@localhost/nothing", journal_mode="wal")


def test_a_trial_of_another_case_is_refused(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        with pytest.raises(UsageError, match="case_key"):
            store.add_trial(run, a_case("b1s128"), an_env(), a_trial())


def test_a_trial_of_a_run_that_never_began_is_refused(path: Path) -> None:
    with Store.open(path) as store, pytest.raises(NothingFound, match="row 7 in runs"):
        store.add_trial(7, a_case(), an_env(), a_trial())


def test_times_that_are_no_numbers_are_stored_as_none(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.add_trial(
            run, a_case(), an_env(), a_trial(median_us=float("nan"), q1_us=float("inf"), config=[float("nan")])
        )
        (trial,) = store.trials()
    assert (trial.median_us, trial.q1_us, trial.config) == (None, None, [None])


def test_a_new_record_replaces_the_active_one_and_keeps_it_as_history(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        first = store.activate(run, a_case(), an_env(), a_record(100.0))
        second = store.activate(run, a_case(), an_env(), a_record(90.0))
        incumbent = store.active_record(a_case(), an_env())
    with Reader.open(path) as reader:
        history = reader.record_history(a_case().key)
        active = reader.active_records()
    assert incumbent is not None
    assert [incumbent.id, *(r.id for r in active)] == [second, second]
    assert [(r.id, r.active) for r in history] == [(second, True), (first, False)]


def test_environments_and_regimes_have_records_of_their_own(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.activate(run, a_case(), an_env(), a_record())
        store.activate(run, a_case(), an_env(triton="3.9.0"), a_record())
        store.activate(run, a_case(), an_env(), a_record(regime="eager"))
    with Reader.open(path) as reader:
        assert len(reader.active_records()) == 3


def test_the_database_itself_refuses_a_second_active_record(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as other:
        columns = ", ".join(row[1] for row in other.execute("PRAGMA table_info(records)") if row[1] != "id")
        with pytest.raises(sqlite3.IntegrityError):
            other.execute(f"INSERT INTO records ({columns}) SELECT {columns} FROM records")


def test_a_quarantined_record_is_served_no_more_and_says_why(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        record = store.activate(run, a_case(), an_env(), a_record())
        store.quarantine(record, "wrong at seq_len 1000")
        assert store.active_record(a_case(), an_env()) is None
    with Reader.open(path) as reader:
        (kept,) = reader.record_history(a_case().key)
    assert kept.quarantine_reason == "wrong at seq_len 1000"


def test_clocks_and_ceilings_make_no_new_environment_and_are_kept_up_to_date(path: Path) -> None:
    with Store.open(path) as store:
        first = store.environment(an_env(sm_clock_mhz=1500, peak_flops_per_s=7e14))
        second = store.environment(an_env(sm_clock_mhz=1980))
    with Reader.open(path) as reader:
        (env,) = reader.environments()
    assert first == second
    assert (env.sm_clock_mhz, env.peak_flops_per_s) == (1980, 7e14)


def test_a_run_says_how_it_ended(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(seed=7), an_env())
        store.add_trial(run, a_case(), an_env(), a_trial())
        store.finish_run(run, RunStatus.FAILED, "every candidate failed")
    with Reader.open(path) as reader:
        (stored,) = reader.runs()
    assert (stored.run.seed, stored.status, stored.note, stored.trials) == (7, "failed", "every candidate failed", 1)
    assert stored.finished_at is not None
    assert stored.finished_at.tzinfo == UTC


def test_a_run_in_a_live_process_is_left_alone_by_the_next(path: Path) -> None:
    with Store.open(path) as store, Store.open(path) as other:
        store.begin_run(a_run(), an_env())
        other.begin_run(a_run(), an_env())
    with Reader.open(path) as reader:
        assert [run.status for run in reader.runs()] == [RunStatus.RUNNING, RunStatus.RUNNING]


@pytest.mark.parametrize(("change", "status"), [("pid = 1", "interrupted"), ("host = 'elsewhere'", "running")])
def test_a_run_is_closed_only_if_its_process_is_known_to_be_gone(path: Path, change: str, status: str) -> None:
    """Process 1 lives, but it is not the one that began the run; of another host nothing is known."""
    with Store.open(path) as store:
        first = store.begin_run(a_run(), an_env())
        with closing(sqlite3.connect(path)) as other, other:
            other.execute(f"UPDATE runs SET {change}, process_started_s = process_started_s - 1e6")
        store.begin_run(a_run(), an_env())
    with Reader.open(path) as reader:
        assert {run.id: run.status for run in reader.runs()}[first] == status


def test_a_full_disk_is_one_clear_error_and_what_was_stored_stays(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(a_run(), an_env())
        store.add_trial(run, a_case(), an_env(), a_trial(0))
        with store.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 1")  # the size that it has already
        with pytest.raises(DiskFull, match=r"disk is full; free some space and run again"):
            store.add_trial(run, a_case(), an_env(), a_trial(1, reason="x" * 100_000))
        with store.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 100000")
        store.add_trial(run, a_case(), an_env(), a_trial(2))
        assert [trial.config["number"] for trial in store.trials()] == [0, 2]


@pytest.mark.parametrize("mode", ["wal", "delete", "truncate"])
def test_the_journal_mode_is_a_choice(path: Path, mode: str) -> None:
    with Store.open(path, journal_mode=mode) as store, store.engine.connect() as connection:  # type: ignore[arg-type]
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == mode


def test_a_file_keeps_the_journal_mode_that_was_chosen_for_it(path: Path) -> None:
    Store.open(path, journal_mode="delete").close()
    with Store.open(path) as store, store.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"


def test_the_journal_mode_of_a_file_can_be_changed(path: Path) -> None:
    fill(path)
    with Store.open(path, journal_mode="delete") as store:
        assert len(store.trials()) == 3
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_the_journal_mode_of_a_file_in_use_is_one_clear_error(path: Path) -> None:
    with Store.open(path), pytest.raises(StoreLocked, match=r"cannot change its journal mode to delete while others"):
        Store.open(path, journal_mode="delete", busy_timeout_s=0.1)


def test_the_views_answer_people_with_other_tools(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as other:
        best = other.execute("SELECT problem, case_name, gpu_name, median_us FROM v_best").fetchall()
        trials = other.execute("SELECT case_name, status, median_us FROM v_trials ORDER BY median_us").fetchall()
    assert best == [("gqa_attention_with_qk_norm", "b4s512", "NVIDIA H200", 100.0)]
    assert trials == [("b4s512", "ok", 100.0), ("b4s512", "ok", 101.0), ("b4s512", "ok", 102.0)]
