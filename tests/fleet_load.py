"""Light workers that do nothing but end trials and store them: `python fleet_load.py URL WORKERS TRIALS TRIAL_S`."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from child_processes import ROOT, environment
from db_factories import a_case, a_run, a_trial, an_env
from sqlalchemy import text

from tilewright.db.jobs import Lease
from tilewright.db.store import Store
from tilewright.search.fleet_records import FleetRecords


def start(url: str, workers: int, trials: int, trial_s: float) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__)), url, str(workers), str(trials), str(trial_s)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def a_lease(store: Store) -> Lease:
    """On a job that is this worker's."""
    schema = "tilewright_jobs.procrastinate"
    with store.engine.begin() as connection:
        worker_id = connection.scalar(text(f"INSERT INTO {schema}_workers DEFAULT VALUES RETURNING id"))
        statement = (
            f"INSERT INTO {schema}_jobs (queue_name, task_name, status, worker_id) "
            "VALUES ('load', 'load', 'doing', :worker_id) RETURNING id"
        )
        connection.execute(text("SET LOCAL search_path TO tilewright_jobs"))
        job_id = connection.scalar(text(statement), {"worker_id": worker_id})
    assert job_id is not None
    assert worker_id is not None
    return Lease(job_id, worker_id, 0)


def one_worker(url: str, trials: int, trial_s: float, go: threading.Event, ready: threading.Semaphore) -> float:
    """Seconds that the database kept it waiting."""
    with Store.open(url) as store:
        lease = a_lease(store)
        ready.release()
        go.wait()
        begun = time.monotonic()
        store.guard = lease
        run_id = store.begin_run(a_run(), an_env(), job_id=lease.job_id)
        waited_s = time.monotonic() - begun
        with FleetRecords(store, run_id, an_env(), "graph", print) as records:
            for number in range(trials):
                time.sleep(trial_s)
                records.record_trial(a_case(), a_trial(number))
            begun = time.monotonic()
            records.flush()
            waited_s += time.monotonic() - begun
        return waited_s + records.waited_s


def main(url: str, workers: int, trials: int, trial_s: float) -> None:
    """Begins when it is told a line; prints what all of its workers together waited and lasted."""
    go, ready = threading.Event(), threading.Semaphore(0)
    waited: list[float] = []
    lasted: list[float] = []

    def work() -> None:
        waited.append(one_worker(url, trials, trial_s, go, ready))
        lasted.append(time.monotonic() - begun)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.acquire()
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.monotonic()
    go.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"waited_s": sum(waited), "lasted_s": sum(lasted), "wall_s": max(lasted)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
