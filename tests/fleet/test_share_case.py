"""One case on several boards: the winner of one board, nothing measured twice, one final."""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import fake_fleet
import psycopg
import pytest
from fake_fleet import CASES, ENV, FAMILY, FakeSession
from postgres_server import Server
from toys import MemoryStore, a_context

from tilewright.db.reader import Reader
from tilewright.db.rows import RunStatus
from tilewright.errors import UsageError
from tilewright.kernel_templates import families
from tilewright.search.effort import EFFORTS, effort_named
from tilewright.search.fleet import FleetReport, run_fleet
from tilewright.search.run import TuneRequest
from tilewright.search.tune import Tuner

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _family() -> Iterator[None]:
    before = families.FAMILIES["gqa_attention"]
    fake_fleet.register()
    yield
    families.register_family("gqa_attention", before)


def enqueue(url: str, boards: int, **changes: Any) -> FleetReport:
    settings = {"cases": CASES[:1], "effort": "quick", "db": url, **changes}
    request = TuneRequest("gqa_attention_with_qk_norm", **settings)
    return run_fleet(request, gpu=ENV.gpu_name, detach=True, share_case=boards, says=lambda text: None)


def asked(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


def trials_by_run(url: str) -> list[int]:
    return [row[0] for row in asked(url, "SELECT count(*) FROM trials GROUP BY run_id")]


def wait_for_trials(url: str, count: int, boards: int = 1) -> None:
    deadline = time.monotonic() + 60
    while sum(found := trials_by_run(url)) < count or len(found) < boards:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def of_one_board() -> tuple[Counter[str], str, str]:
    """Its trials, the default plan, and the winner."""
    case = fake_fleet.cases()[0]
    store = MemoryStore()
    effort = effort_named("quick")
    context = a_context(FakeSession(), store, family=FAMILY, effort=effort, environment=ENV, baselines=())
    Tuner(context, store).run([case])
    default = FAMILY.registry.default_plan(case, context.limits)
    return Counter(row.digest for row in store.trials), default.digest, store.records[case.key].digest


def assert_as_one_board(url: str, measured_again: int = 0) -> None:
    """Every point once, the default plan once a run, one record; but for the points that a dead board had in hand."""
    expected, default, winner = of_one_board()
    with Reader.open(url) as reader:
        found = Counter(stored.trial.digest for stored in reader.trials())
        assert {run.status for run in reader.runs()} <= {RunStatus.DONE, RunStatus.INTERRUPTED}
        [record] = reader.record_history(fake_fleet.cases()[0].key)
    assert record.record.digest == winner
    assert set(found) == set(expected)
    assert (found - Counter({default: found[default]})).total() - (expected.total() - 1) <= measured_again
    assert asked(url, "SELECT status::text, count(*) FROM tilewright_jobs.procrastinate_jobs GROUP BY status") == [
        ("succeeded", 3)
    ]


@pytest.mark.parametrize("slower", [1.05, 2.0])
def test_three_boards_of_which_one_is_slower_find_what_one_board_finds(server_url: str, slower: float) -> None:
    enqueue(server_url, 3)
    sessions = [FakeSession(trial_s=0.05, slower=factor) for factor in (1.0, 1.0, slower)]
    fake_fleet.work_on(server_url, 20.0, sessions)
    assert_as_one_board(server_url)
    assert sum(session.finals for session in sessions) == 1
    assert min(len(session.evaluated) for session in sessions) > 1
    assert len(trials_by_run(server_url)) == 3


def test_a_space_larger_than_the_budget_is_sampled_by_all_boards_within_it(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = dataclasses.replace(EFFORTS["quick"], stage_trials=5, plan_trials=4)
    monkeypatch.setitem(EFFORTS, "quick", few)
    enqueue(server_url, 3)
    sessions = [FakeSession(trial_s=0.02, slower=slower) for slower in (1.0, 1.0, 1.05)]
    fake_fleet.work_on(server_url, 20.0, sessions)
    assert sum(session.finals for session in sessions) == 1
    counted = "SELECT template, count(*), count(DISTINCT digest) FROM trials WHERE level = 'stage' GROUP BY 1"
    assert sorted(asked(server_url, counted)) == [(name, 5, 5) for name in ("attention", "fused_projection", "output")]


def test_a_shared_case_that_is_known_costs_only_the_yardsticks(server_url: str) -> None:
    for _ in range(2):
        enqueue(server_url, 2)
        fake_fleet.work_on(server_url, 20.0, [FakeSession(), FakeSession(slower=1.05)])
    expected, _, winner = of_one_board()
    assert sum(trials_by_run(server_url)) == expected.total() - 1 + 4
    assert set(asked(server_url, "SELECT digest FROM records")) == {(winner,)}


def test_a_server_that_is_killed_costs_a_shared_case_nothing(own_server: Server) -> None:
    url = own_server.new_database()
    enqueue(url, 3)
    boards = [fake_fleet.start(url, 2.0, 0.2, slower) for slower in (1.05, 1.0, 1.0)]
    wait_for_trials(url, 8, boards=3)
    own_server.kill()
    time.sleep(0.5)
    own_server.start()
    said = [board.communicate(timeout=120)[0] for board in boards]
    assert [board.returncode for board in boards] == [0, 0, 0], said
    assert_as_one_board(url)


def test_fewer_boards_than_parts_end_the_case(server_url: str) -> None:
    enqueue(server_url, 3)
    session = FakeSession(slower=1.05)
    fake_fleet.work_on(server_url, 20.0, [session])
    assert_as_one_board(server_url)
    assert session.finals == 1


def test_a_board_that_is_killed_costs_what_it_had_in_hand(server_url: str) -> None:
    enqueue(server_url, 3)
    boards = [fake_fleet.start(server_url, 1.0, 0.3, slower) for slower in (1.05, 1.0, 1.0)]
    wait_for_trials(server_url, 8, boards=3)
    boards[0].kill()
    said = [board.communicate(timeout=120)[0] for board in boards]
    assert [board.returncode for board in boards[1:]] == [0, 0], said
    assert_as_one_board(server_url, measured_again=1)


def test_an_unequal_board_leaves_its_part_to_the_others(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    enqueue(server_url, 3)
    first = fake_fleet.start(server_url, 20.0, 0.1)
    wait_for_trials(server_url, 1)
    unequal = FakeSession(power_limit_w=350.0)
    fake_fleet.work_on(server_url, 20.0, [unequal])
    assert "differ in model, power limit" in capsys.readouterr().out
    assert unequal.evaluated == []
    first.communicate(timeout=120)
    assert_as_one_board(server_url)


def test_a_shared_case_under_way_is_not_enqueued_again(server_url: str) -> None:
    first = enqueue(server_url, 2)
    assert [state.id for state in enqueue(server_url, 2).states] == [state.id for state in first.states]
    assert len(first.states) == 2


def test_a_case_shared_by_one_board_is_refused(server_url: str) -> None:
    with pytest.raises(UsageError, match="at least 2 boards, got 1"):
        enqueue(server_url, 1)
