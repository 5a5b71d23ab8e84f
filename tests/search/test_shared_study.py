"""A study that several boards share: what a server that goes away does to it."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import optuna
import pytest

from tilewright.search.fleet_share import FleetShare, SharedPointStudy
from tilewright.search.study import key_of

POINTS = [{"block_m": m, "block_n": n} for m, n in itertools.product((16, 32, 64), (32, 64, 128, 256))]
TIMES = {key_of(point): 1.0 + number for number, point in enumerate(POINTS)}


class UnreliableShare:
    """Of one board; what the server does not answer is asked once more."""

    abandoned_s = 60.0

    def __init__(self) -> None:
        self.records = self

    def turn(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def flush(self) -> None:
        pass

    def answered(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ConnectionError:
            return action()


@pytest.mark.parametrize("call", ["ask", "tell", "enqueue_trial", "get_trials"])
@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_goes_away_mixes_up_no_points(call: str, answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study = SharedPointStudy(
        POINTS, cast(FleetShare, UnreliableShare()), stored, budget=len(POINTS), sampler="random", seed=0
    )
    real, calls = getattr(stored, call), itertools.count()

    def unreliable(*args: Any, **kwargs: Any) -> Any:
        fails = next(calls) % 5 == 3
        if fails and not answers:
            raise ConnectionError
        answer = real(*args, **kwargs)
        if fails:
            raise ConnectionError
        return answer

    monkeypatch.setattr(stored, call, unreliable)
    asked = []
    while (point := study.ask()) is not None:
        asked.append(point)
        study.tell(point, TIMES[key_of(point)])
    monkeypatch.undo()
    assert sorted(map(key_of, asked)) == sorted(map(key_of, POINTS))
    told = {key_of(trial.params): trial.value for trial in stored.trials if trial.value is not None}
    assert told == TIMES
