"""The grants that the documentation gives to a worker are enough, and no more than enough."""

import re
from collections.abc import Iterator

import fake_fleet
import psycopg
import pytest
from child_processes import ROOT
from fake_fleet import CASES, ENV
from postgres_server import Server

from tilewright.kernel_templates import families
from tilewright.search.fleet import run_fleet
from tilewright.search.run import TuneRequest

ROLE, PASSWORD = "tilewright_worker", "only-for-this-test"


@pytest.fixture(scope="module")
def worker_url(shared_server: Server) -> Iterator[str]:
    """Of a database with one job for a whole case and two for a shared one, as the worker sees it."""
    before = families.FAMILIES["gqa_attention"]
    fake_fleet.register()
    url = shared_server.new_database()
    database = url.rpartition("/")[2]
    for case, boards in zip(CASES, (None, 2), strict=False):
        request = TuneRequest("gqa_attention_with_qk_norm", cases=[case], effort="quick", db=url, trials=20)
        run_fleet(request, gpu=ENV.gpu_name, detach=True, share_case=boards, says=lambda text: None)
    text = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    grants = "".join(re.findall(r"```sql\n(GRANT.*?)```", text, re.DOTALL))
    shared_server.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'")
    shared_server.execute(grants, database)
    yield shared_server.url(database, ROLE, PASSWORD)
    shared_server.execute(f"DROP OWNED BY {ROLE}", database)
    shared_server.execute(f"DROP ROLE {ROLE}")
    families.register_family("gqa_attention", before)


def asked(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def test_a_worker_with_these_grants_does_its_jobs(worker_url: str) -> None:
    fake_fleet.work(worker_url, lease_s=1.0, trial_s=0.002)
    assert asked(worker_url, "SELECT status::text FROM tilewright_jobs.procrastinate_jobs") == 3 * [("succeeded",)]
    assert asked(worker_url, "SELECT count(*) FROM records WHERE active") == [(2,)]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM trials",
        "UPDATE trials SET median_us = 1.0",
        "DELETE FROM records",
        "UPDATE cases SET name = 'x'",
        "DROP TABLE trials",
        "ALTER TABLE runs ADD COLUMN x int",
        "CREATE TABLE mine (x int)",
        "UPDATE alembic_version SET version_num = 'x'",
        "DELETE FROM tilewright_jobs.procrastinate_jobs",
        "DELETE FROM tilewright_studies.trials",
        "CREATE TABLE tilewright_studies.mine (x int)",
        "INSERT INTO tilewright_jobs.procrastinate_jobs (queue_name, task_name) VALUES ('q', 't')",
    ],
)
def test_a_worker_with_these_grants_can_do_nothing_else(worker_url: str, statement: str) -> None:
    with pytest.raises((psycopg.errors.InsufficientPrivilege,)):
        asked(worker_url, statement)
