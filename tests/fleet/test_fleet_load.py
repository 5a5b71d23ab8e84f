"""What the database costs a fleet whose trials are a hundred times shorter than real ones."""

import json

import fleet_load
import pytest
from procrastinate.schema import SchemaManager

from tilewright.db.jobs import create_tables
from tilewright.db.reader import Reader
from tilewright.db.store import Store

PROCESSES, THREADS, TRIALS, TRIAL_S = 4, 16, 250, 0.01


@pytest.mark.timeout(180)
def test_64_workers_with_10_ms_trials_wait_for_the_database_at_most_a_fifth_of_their_time(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(server_url) as store:
        create_tables(store, SchemaManager.get_schema())
    children = [fleet_load.start(server_url, THREADS, TRIALS, TRIAL_S) for _ in range(PROCESSES)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    told = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        told.append(json.loads(child.communicate(timeout=120)[0]))
    share = sum(each["waited_s"] for each in told) / sum(each["lasted_s"] for each in told)
    wall_s = max(each["wall_s"] for each in told)
    total = PROCESSES * THREADS * TRIALS
    with capsys.disabled():
        print(
            f"\n64 workers, {total} trials of 10 ms: {total / wall_s:.0f} trials/s, database {share:.1%} of wall time"
        )
    assert share <= 0.2
    with Reader.open(server_url) as reader:
        assert sum(reader.counts().values()) == total
