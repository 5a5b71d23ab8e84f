"""Databases of machines that never met become one, whatever the order, and as often as one likes."""

import dataclasses
import hashlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from alembic import command
from db_factories import a_case, a_record, a_run, a_trial, an_env
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright import cli
from tilewright.db import mapping, schema
from tilewright.db.environment import Environment
from tilewright.db.merge import MergeReport, merge
from tilewright.db.models import EnvironmentTable, RecordTable, RunTable, TrialTable
from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus, StoredRecord
from tilewright.db.store import Store
from tilewright.errors import DatabaseError, MissingDatabase, UsageError

DAY = datetime(2026, 12, 1, tzinfo=UTC)
CASES = ("b1s128", "b4s512")
ENVS = (an_env(), an_env(gpu_name="NVIDIA H100"))


@dataclasses.dataclass(frozen=True)
class Made:
    """A record of one of the runs, as a file may hold it."""

    run: int
    number: int
    median_us: float
    default_us: float | None = 120.0
    met: tuple[int, ...] = ()  # numbers of the records whose plans stood in its final
    quarantined: str = ""


@dataclasses.dataclass(frozen=True)
class File:
    """What a database holds of a world in which runs, trials and records are the same wherever they are seen."""

    trials: frozenset[tuple[int, int]] = frozenset()  # run and number
    records: frozenset[Made] = frozenset()
    ended: frozenset[int] = frozenset()
    clock_mhz: int | None = None


def write(path: Path, content: File) -> Path:
    """Rows as a store of that machine would have made them; which record is active is as arbitrary as it may be."""
    with Store.open(path) as store:
        runs = {run for run, _ in content.trials} | {made.run for made in content.records} | content.ended
        for run in sorted(runs):
            env = dataclasses.replace(ENVS[run % 2], sm_clock_mhz=content.clock_mhz)
            run_id = store.begin_run(a_run(seed=run), env)
            for number in sorted(number for owner, number in content.trials if owner == run):
                trial = a_trial(number, a_case(CASES[number % 2]), finished_at=DAY + timedelta(minutes=number))
                store.add_trial(run_id, a_case(CASES[number % 2]), env, trial)
            for made in sorted((made for made in content.records if made.run == run), key=lambda made: made.number):
                _record(store, run_id, env, made)
            store.finish_run(run_id, RunStatus.DONE if run in content.ended else RunStatus.RUNNING)
    with closing(sqlite3.connect(path)) as raw, raw:  # what differs from machine to machine, said to be the same
        raw.execute("UPDATE runs SET started_at = '2026-12-01 00:00:00.000000', pid = seed, process_started_s = 1.0")
        raw.execute("UPDATE runs SET finished_at = CASE status WHEN 'done' THEN '2026-12-02 00:00:00.000000' END")
        raw.execute("UPDATE environments SET created_at = '2026-12-01 00:00:00.000000'")
    return path


def _record(store: Store, run_id: int, env: Environment, made: Made) -> None:
    record = a_record(
        made.median_us,
        a_case(),
        digest=f"plan{made.number % 3}",
        default_us=made.default_us,
        created_at=DAY + timedelta(hours=made.number),
        evidence={"finalists": [{"name": f"plan{other % 3}"} for other in made.met]},
    )
    record_id = store.activate(run_id, a_case(), env, record)
    if made.quarantined:
        store.quarantine(record_id, made.quarantined)


MADE = st.builds(
    Made,
    run=st.integers(0, 3),
    number=st.integers(0, 5),
    median_us=st.sampled_from([90.0, 95.0, 100.0, 100.5]),
    default_us=st.sampled_from([120.0, 110.0]),
    met=st.lists(st.integers(0, 2), max_size=2).map(tuple),
)
WORLD = st.lists(MADE, max_size=6, unique_by=lambda made: (made.run, made.number))


@st.composite
def files(draw: st.DrawFn, count: int) -> list[File]:
    world = draw(WORLD)
    trials = st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6)

    def one() -> File:
        seen = [made for made in world if draw(st.booleans())]
        reason = st.sampled_from(["", "", "wrong at seq_len 1000"])
        records = frozenset(dataclasses.replace(made, quarantined=draw(reason)) for made in seen)
        ended = draw(st.frozensets(st.integers(0, 3), max_size=4))
        return File(draw(trials), records, ended, draw(st.sampled_from([None, 1700, 1980])))

    return [one() for _ in range(count)]


def content(path: Path) -> dict[str, list[str]]:
    """Everything that the file says, without its ids."""
    with Reader.open(path) as reader:
        environments = {env.digest: (env.digest, env.sm_clock_mhz) for env in reader.environments()}
        runs = {run.id: (run.environment.digest, run.run, run.status, run.pid, run.started_at, run.finished_at)
                for run in reader.runs()}  # fmt: skip
        history = [record for case in CASES for record in reader.record_history(a_case(case).key)]
        return {
            "environments": sorted(map(str, environments.values())),
            "runs": sorted(map(str, runs.values())),
            "trials": sorted(str((runs[t.run_id], t.environment.digest, t.trial)) for t in reader.trials()),
            "records": sorted(
                str((runs[r.run_id or 0], r.record, r.active, r.quarantine_reason, r.case_name)) for r in history
            ),
        }


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "empty.sqlite"
    Store.open(path, journal_mode="delete").close()
    return path


class Bench:
    """A folder of its own for each example."""

    def __init__(self, folder: Path, empty: Path) -> None:
        self._folder, self._empty, self._count = folder, empty, 0

    def new(self) -> Path:
        self._count += 1
        return Path(shutil.copyfile(self._empty, self._folder / f"{self._count}.sqlite"))

    def file(self, made: File) -> Path:
        return write(self.new(), made)

    def merged(self, *sources: Path) -> Path:
        output = self.new()
        merge(sources, output)
        return output


@pytest.fixture
def bench(empty: Path) -> Iterator[Callable[[], Any]]:
    folders: list[TemporaryDirectory[str]] = []

    def make() -> Bench:
        folders.append(TemporaryDirectory())
        return Bench(Path(folders[-1].name), empty)

    yield make
    for folder in folders:
        folder.cleanup()


PROPERTY = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@PROPERTY
@given(files(2))
def test_order_does_not_matter(bench: Callable[[], Bench], made: list[File]) -> None:
    here = bench()
    one, two = map(here.file, made)
    assert content(here.merged(one, two)) == content(here.merged(two, one))


@PROPERTY
@given(files(3))
def test_grouping_does_not_matter(bench: Callable[[], Bench], made: list[File]) -> None:
    here = bench()
    one, two, three = map(here.file, made)
    all_at_once = content(here.merged(one, two, three))
    assert content(here.merged(here.merged(one, two), three)) == all_at_once
    assert content(here.merged(one, here.merged(two, three))) == all_at_once


@PROPERTY
@given(files(2))
def test_repetition_changes_nothing(bench: Callable[[], Bench], made: list[File]) -> None:
    here = bench()
    one, two = map(here.file, made)
    output = here.merged(one, two)
    before = content(output)
    again = merge([two, one, two], output)
    assert content(output) == before
    assert again.new.total() == 0


@PROPERTY
@given(files(2))
def test_nothing_is_lost_and_each_group_serves_at_most_one(bench: Callable[[], Bench], made: list[File]) -> None:
    here = bench()
    output = here.merged(*map(here.file, made))
    with Reader.open(output) as reader:
        assert len(reader.trials()) == len(made[0].trials | made[1].trials)
        history = reader.record_history(a_case().key)
        assert len(history) == len({(r.run, r.number) for file in made for r in file.records})
        active = [(r.environment.digest, r.record.regime) for r in reader.active_records()]
        assert len(active) == len(set(active))
        assert len(active) == len({r.environment.digest for r in history if not r.quarantine_reason})


def two_files(bench: Callable[[], Bench], one: Made, two: Made) -> tuple[Path, MergeReport]:
    here = bench()
    output = here.new()
    sources = [here.file(File(records=frozenset({made}))) for made in (one, two)]
    return output, merge(sources, output)


def served(path: Path) -> list[float | None]:
    with Reader.open(path) as reader:
        return [record.record.median_us for record in reader.active_records()]


def test_of_records_that_never_met_the_larger_gain_over_its_own_default_is_served(bench: Callable[[], Bench]) -> None:
    fast_board, slow_board = Made(0, 0, 90.0, default_us=95.0), Made(2, 1, 100.0, default_us=120.0)
    output, report = two_files(bench, fast_board, slow_board)
    assert served(output) == [100.0]
    [change] = report.changes
    assert (change.case, change.before_us, change.after_us) == ("b4s512", 90.0, 100.0)


def test_a_record_that_lost_a_later_paired_final_is_not_elected_for_its_time(bench: Callable[[], Bench]) -> None:
    output, _ = two_files(bench, Made(0, 0, 90.0), Made(2, 1, 100.0, met=(0,)))
    assert served(output) == [100.0]


def test_two_records_that_are_equal_but_for_their_run_are_told_apart_whatever_the_order(
    bench: Callable[[], Bench],
) -> None:
    here = bench()
    one, two = (here.file(File(records=frozenset({Made(run, 0, 90.0)}))) for run in (0, 2))
    assert content(here.merged(one, two)) == content(here.merged(two, one))


def test_a_record_taken_out_anywhere_is_served_nowhere(bench: Callable[[], Bench]) -> None:
    out = Made(0, 0, 90.0, quarantined="wrong at seq_len 1000")
    output, _ = two_files(bench, dataclasses.replace(out, quarantined=""), out)
    assert served(output) == []


def test_stale_records_give_way_to_current_ones(bench: Callable[[], Bench]) -> None:
    here = bench()
    output = here.new()
    sources = [here.file(File(records=frozenset({made}))) for made in (Made(0, 0, 90.0), Made(2, 1, 100.0))]

    def usable(stored: StoredRecord) -> bool:
        return stored.record.median_us == 100.0

    merge(sources, output, usable)
    assert served(output) == [100.0]


def test_a_run_that_ended_anywhere_has_ended(bench: Callable[[], Bench]) -> None:
    here = bench()
    running, done = here.file(File(frozenset({(0, 0)}))), here.file(File(ended=frozenset({0})))
    for sources in ((running, done), (done, running)):
        with Reader.open(here.merged(*sources)) as reader:
            assert [run.status for run in reader.runs()] == [RunStatus.DONE]


def test_the_same_trial_with_another_time_is_a_conflict_and_nothing_is_merged(bench: Callable[[], Bench]) -> None:
    here = bench()
    one, two = (here.file(File(frozenset({(0, 0)}))) for _ in range(2))
    with closing(sqlite3.connect(two)) as raw, raw:
        raw.execute("UPDATE trials SET median_us = 1.0")
    output = here.new()
    with pytest.raises(DatabaseError, match="with other content; nothing was merged"):
        merge([one, two], output)
    with Reader.open(output) as reader:
        assert (reader.runs(), reader.trials()) == ([], [])


@pytest.mark.parametrize("revision", schema.REVISIONS[:-1])
def test_an_older_source_is_upgraded_on_a_copy(bench: Callable[[], Bench], revision: str) -> None:
    here = bench()
    path = here.file(File(frozenset({(0, 0), (1, 1)}), frozenset({Made(0, 0, 90.0)})))
    expected = content(here.merged(path))
    with Store.open(path) as store, store.engine.begin() as connection:
        command.downgrade(schema.alembic_config(connection), revision)
    before = hashlib.sha256(path.read_bytes()).digest()
    assert content(here.merged(path)) == expected
    assert hashlib.sha256(path.read_bytes()).digest() == before


def test_a_server_can_take_in_what_a_file_holds(bench: Callable[[], Bench], server_url: str) -> None:
    here = bench()
    path = here.file(File(frozenset({(0, 0), (1, 1)}), frozenset({Made(0, 0, 90.0)})))
    for _ in range(2):
        merge([path], server_url)
    with Reader.open(server_url) as reader:
        assert (len(reader.trials()), len(reader.active_records())) == (2, 1)


def test_a_source_that_is_missing_or_is_the_output_is_refused(bench: Callable[[], Bench], tmp_path: Path) -> None:
    path = bench().file(File())
    with pytest.raises(MissingDatabase):
        merge([tmp_path / "none.sqlite"], tmp_path / "all.sqlite")
    assert not (tmp_path / "all.sqlite").exists()
    with pytest.raises(UsageError, match="is one of the sources"):
        merge([path], path)


def test_the_command_prints_what_changed(
    bench: Callable[[], Bench], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = bench()
    one = here.file(File(frozenset({(0, 0)}), frozenset({Made(0, 0, 90.0, default_us=95.0)})))
    two = here.file(File(frozenset({(0, 0), (1, 1)}), frozenset({Made(2, 1, 100.0)})))
    assert cli.run(["merge", str(one), str(two), "-o", str(tmp_path / "all.sqlite")]) == 0
    told = capsys.readouterr().out
    assert "trials 2 new, 1 known" in told
    assert "served: 1 changed, 0 kept" in told
    assert "b4s512 on NVIDIA H200 (graph): gemm, 90.0 us -> gemm, 100.0 us" in told


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (EnvironmentTable, mapping.ENVIRONMENT_FIELDS),
        (RunTable, mapping.RUN_FIELDS),
        (TrialTable, mapping.TRIAL_FIELDS),
        (RecordTable, mapping.RECORD_FIELDS),
    ],
)
def test_every_column_takes_part(table: Any, names: tuple[str, ...]) -> None:
    """A column added later must be given a rule here too."""
    apart = {"id", "digest", "created_at", "run_id", "case_id", "environment_id", "active", "quarantine_reason"}
    process = {"status", "note", "host", "pid", "process_started_s", "started_at", "finished_at", "job_id", "device"}
    assert {column.name for column in table.__table__.columns} <= set(names) | apart | process
