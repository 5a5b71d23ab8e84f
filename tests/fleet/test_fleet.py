"""A fleet on a real PostgreSQL server: workers come, die, sleep and go, and the sum is that of one process."""

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import fake_fleet
import psycopg
import pytest
from fake_fleet import CASES, ENV, FAMILY, FakeSession, cases
from postgres_server import Server
from toys import MemoryStore, a_context

from tilewright import cli
from tilewright.db.environment import Environment
from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus
from tilewright.kernel_templates import families
from tilewright.search.effort import effort_named
from tilewright.search.fleet import FleetReport, run_fleet
from tilewright.search.fleet_worker import WorkerOptions, run_worker
from tilewright.search.progress import Silent
from tilewright.search.run import TuneRequest
from tilewright.search.tune import Tuner

pytestmark = pytest.mark.timeout(180)
Summary = dict[str, Any]


@pytest.fixture(autouse=True)
def _family() -> Iterator[None]:
    before = families.FAMILIES["gqa_attention"]
    fake_fleet.register()
    yield
    families.register_family("gqa_attention", before)


def a_request(url: str, **changes: Any) -> TuneRequest:
    return TuneRequest("gqa_attention_with_qk_norm", **{"cases": CASES, "effort": "quick", "db": url, **changes})


def enqueue(url: str, gpu: str = ENV.gpu_name, **changes: Any) -> FleetReport:
    return run_fleet(a_request(url, **changes), gpu=gpu, detach=True, says=lambda text: None)


def expected() -> Summary:
    """What one process finds."""
    store = MemoryStore()
    context = a_context(
        FakeSession(), store, family=FAMILY, effort=effort_named("quick"), environment=ENV, baselines=()
    )
    Tuner(context, store).run(cases())
    return {
        "trials": Counter((row.case_key, row.level, row.digest) for row in store.trials),
        "best": {key: (record.digest, record.median_us) for key, record in store.records.items()},
    }


def found(url: str) -> Summary:
    with Reader.open(url) as reader:
        return {
            "trials": Counter((t.trial.case_key, t.trial.level, t.trial.digest) for t in reader.trials()),
            "best": {r.record.case_key: (r.record.digest, r.record.median_us) for r in reader.active_records()},
        }


def assert_settled(url: str) -> None:
    """Every job succeeded once, no run is open, every trial that one process makes is there once."""
    assert found(url) == expected()
    with Reader.open(url) as reader:
        runs = reader.runs()
    assert RunStatus.RUNNING not in {run.status for run in runs}
    assert sum(run.status is RunStatus.DONE for run in runs) == len(CASES)
    assert statuses(url) == {"succeeded": len(CASES)}


def statuses(url: str) -> dict[str, int]:
    return dict(
        asked(url, "SELECT status::text, count(*) FROM tilewright_jobs.procrastinate_jobs GROUP BY status")  # type: ignore[arg-type]
    )


def asked(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


def trials(url: str) -> int:
    return int(asked(url, "SELECT count(*) FROM trials")[0][0])


def wait_for_trials(url: str, count: int, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while trials(url) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def finish(workers: list["subprocess.Popen[str]"]) -> str:
    said = [worker.communicate(timeout=120)[0] for worker in workers]
    assert {worker.returncode for worker in workers} <= {0, -signal.SIGKILL}, said
    return "".join(said)


def test_eight_workers_find_what_one_process_finds(server_url: str) -> None:
    enqueue(server_url)
    fake_fleet.work(server_url, lease_s=20, trial_s=0.002, workers=8)
    assert_settled(server_url)
    with Reader.open(server_url) as reader:
        assert all(run.run.command.startswith("tilewright worker, job") for run in reader.runs())


def test_killed_workers_and_a_killed_server_lose_and_repeat_nothing(own_server: Server) -> None:
    url = own_server.new_database()
    enqueue(url)
    workers = [fake_fleet.start(url, 2.0, 0.01) for _ in range(8)]
    total = expected()["trials"].total()
    wait_for_trials(url, total // 6)
    for worker in workers[:3]:
        worker.kill()
    workers += [fake_fleet.start(url, 2.0, 0.01) for _ in range(2)]
    for worker in workers[3:]:
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith("worker for")
    wait_for_trials(url, total // 3)
    own_server.kill()
    time.sleep(0.5)
    own_server.start()
    wait_for_trials(url, total // 2)
    workers[3].kill()
    finish(workers)
    assert_settled(url)
    text = "".join(str(row) for table in ("runs", "trials", "records") for row in asked(url, f"SELECT * FROM {table}"))
    assert own_server.password not in text


def test_a_worker_that_sleeps_past_its_lease_writes_nothing_more_to_its_job(server_url: str) -> None:
    enqueue(server_url, cases=CASES[:1])
    sleeper = fake_fleet.start(server_url, 1.0, 0.1)
    wait_for_trials(server_url, 3)
    sleeper.send_signal(signal.SIGSTOP)
    kept = trials(server_url)
    fake_fleet.work(server_url, lease_s=1.0, trial_s=0.0)
    after = found(server_url)
    sleeper.send_signal(signal.SIGCONT)
    said = finish([sleeper])
    assert "was given to another worker" in said
    assert found(server_url) == after
    assert set(after["trials"].values()) == {1}
    assert kept < after["trials"].total() == expected()["trials"].total() // len(CASES)
    assert statuses(server_url) == {"succeeded": 1}
    with Reader.open(server_url) as reader:
        assert [run.status for run in reader.runs()] == [RunStatus.DONE, RunStatus.INTERRUPTED]


def test_a_slow_worker_that_lives_keeps_its_job(server_url: str) -> None:
    enqueue(server_url, cases=CASES[:1], trials=2)
    slow = fake_fleet.start(server_url, 1.0, 4.0)  # a trial lasts four leases
    deadline = time.monotonic() + 30
    while statuses(server_url) != {"doing": 1}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    fake_fleet.work(server_url, lease_s=1.0, trial_s=0.0)  # waits beside it and may not take the job
    assert "given to another" not in finish([slow])
    with Reader.open(server_url) as reader:
        [run] = reader.runs()
    assert (run.status, run.trials, run.pid) == (RunStatus.DONE, 2, slow.pid)


def test_a_worker_told_to_leave_gives_its_job_back_with_its_trials(server_url: str) -> None:
    enqueue(server_url, cases=CASES[:1])
    worker = fake_fleet.start(server_url, 20.0, 0.1)
    wait_for_trials(server_url, 3)
    worker.terminate()
    begun = time.monotonic()
    finish([worker])
    assert time.monotonic() - begun < 15
    assert statuses(server_url) == {"todo": 1}
    kept = trials(server_url)
    fake_fleet.work(server_url, lease_s=20.0, trial_s=0.0)
    assert found(server_url)["trials"].total() == expected()["trials"].total() // len(CASES) > kept
    with Reader.open(server_url) as reader:
        assert [run.status for run in reader.runs()] == [RunStatus.DONE, RunStatus.INTERRUPTED]


def test_a_worker_takes_only_the_jobs_of_its_gpu_model(server_url: str) -> None:
    enqueue(server_url, gpu="NVIDIA H100", cases=CASES[:1])
    fake_fleet.work(server_url, lease_s=20.0, trial_s=0.0)
    assert statuses(server_url) == {"todo": 1}
    options = WorkerOptions(server_url, device="cuda", until_done=True)
    session = FakeSession(gpu_name="NVIDIA H100")
    run_worker(options, Silent(), lambda device: session)  # type: ignore[arg-type, return-value]
    assert statuses(server_url) == {"succeeded": 1}


def test_a_case_that_waits_or_runs_is_not_enqueued_again(server_url: str) -> None:
    first = enqueue(server_url, cases=CASES[:2])
    assert [state.id for state in enqueue(server_url, cases=CASES[:2]).states] == [state.id for state in first.states]
    assert statuses(server_url) == {"todo": 2}


def test_a_job_that_this_host_understands_otherwise_fails_and_says_why(server_url: str) -> None:
    enqueue(server_url, cases=CASES[:1])
    changed = 'UPDATE tilewright_jobs.procrastinate_jobs SET args = args || \'{"case_key": "another"}\' RETURNING id'
    asked(server_url, changed)
    fake_fleet.work(server_url, lease_s=20.0, trial_s=0.0)
    assert statuses(server_url) == {"failed": 1}
    with Reader.open(server_url) as reader:
        [run] = reader.runs()
    assert run.status is RunStatus.FAILED
    assert "in the job" in run.note


def test_the_command_follows_its_jobs_and_prints_the_records(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", "--db", server_url, "--gpu", ENV.gpu_name, "--effort", "quick", "--json"]
    chosen = [part for case in CASES[:2] for part in ("--case", case)]
    assert cli.run([*arguments, *chosen, "--detach"]) == 0
    waiting = json.loads(capsys.readouterr().out)
    assert [job["status"] for job in waiting["jobs"]] == ["todo", "todo"]
    worker = fake_fleet.start(server_url, 20.0, 0.0)
    assert cli.run([*arguments, *chosen]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert {job["status"] for job in report["jobs"]} == {"succeeded"}
    assert {record["case"] for record in report["records"]} == set(CASES[:2])
    assert "2/2 done" in told.err
    assert "***" in report["database"]
    finish([worker])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tune", "--detach"], "--detach are for a fleet"),
        (["tune", "--gpu", "NVIDIA H200"], "are for a fleet"),
        (["tune", "--share-case", "2"], "--share-case and --detach are for a fleet"),
        (["tune", "--db", "postgresql://host/db", "--share-case", "1"], "--share-case"),
        (["tune", "--db", "postgresql://host/db", "--devices", "all"], "run one worker for each GPU"),
        (["tune", "--db", "mysql://host/db", "--gpu", "x"], "the database must be a file or a PostgreSQL server"),
        (["worker", "--device", "interpret", "--db", "tuned.sqlite"], "a worker's database is a PostgreSQL server"),
        (["worker", "--db", "postgresql://host/db", "--lease", "0"], "--lease"),
    ],
)
def test_what_no_fleet_can_do_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_head_without_a_gpu_is_asked_for_the_model(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tune", "--db", server_url]) == 2
    assert "name the model" in capsys.readouterr().err


def test_environment_of_another_power_limit_shares_no_trial(server_url: str) -> None:
    def tuned(**described: Any) -> tuple[Environment, int]:
        enqueue(server_url, cases=CASES[:1])
        session = FakeSession(**described)
        options = WorkerOptions(server_url, device="cuda", until_done=True)
        run_worker(options, Silent(), lambda device: session)  # type: ignore[arg-type, return-value]
        with Reader.open(server_url) as reader:
            run = reader.runs()[0]
        return run.environment, run.trials

    assert tuned()[1] == tuned(power_limit_w=350.0)[1] > 0
    assert tuned(power_limit_w=350.0)[1] == 0
