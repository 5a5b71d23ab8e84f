"""Optuna's part: which candidate comes next, given what is known. Deterministic for a seed and an order of answers."""

import json
import random
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from tilewright.errors import UsageError

Point = Mapping[str, Any]
ORDINAL = ("cmaes", "qmc")  # know no categories: they see the rank of a value, and fell back to chance before
SAMPLERS = ("auto", "tpe", "gp", "cmaes", "qmc", "random", "brute")
ENUMERATE_UP_TO = 256
_TURN = threading.RLock()
_ATTEMPTS = 24  # proposals that may be invalid or known before a random unseen point is taken


def key_of(point: Point) -> str:
    """Identity of a point, independent of the order of its names."""
    return json.dumps(dict(point), sort_keys=True)


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Raises UsageError for a name that is not in SAMPLERS, or whose optional package is missing."""
    try:
        with quiet():
            return _sampler(name, seed)
    except ImportError as error:
        raise UsageError(
            f"sampler {name} needs a package that is not installed ({error}); pip install 'tilewright[samplers]'"
        ) from error


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    match name:
        case "auto" | "tpe":
            return optuna.samplers.TPESampler(
                seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=8
            )
        case "gp":
            return optuna.samplers.GPSampler(seed=seed)
        case "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed)
        case "qmc":
            return optuna.samplers.QMCSampler(seed=seed)
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "brute":
            return optuna.samplers.BruteForceSampler(seed=seed)
    raise UsageError(f"sampler must be one of {', '.join(SAMPLERS)}, got {name!r}")


class PointStudy:
    """Search over an explicit set of valid points; each is proposed at most once.

    Seeds come first, in order. Where the whole set fits the budget it is enumerated in shuffled order; else the
    sampler proposes, and a proposal that is invalid or already known is replaced.
    """

    def __init__(
        self,
        points: Sequence[Point],
        *,
        budget: int,
        sampler: str = "auto",
        seed: int = 0,
        study: optuna.Study | None = None,
    ) -> None:
        self._points = {key_of(point): point for point in points}
        self._ordinal = sampler in ORDINAL
        self._choices = _choices(points, ordered=self._ordinal)
        self._budget = budget
        self._rng = random.Random(seed)
        self._seen: set[str] = set()
        self._asked = 0
        self._queue: list[str] = []
        with quiet():
            self._study = study or optuna.create_study(sampler=make_sampler(sampler, seed))
        self._open: dict[str, optuna.Trial] = {}
        self._enumerated = sampler == "brute" or len(self._points) <= budget
        if self._enumerated:
            self._queue = list(self._points)
            self._rng.shuffle(self._queue)

    def enqueue(self, points: Iterable[Point]) -> None:
        """Seeds: proposed before anything else; raises UsageError for a point that is not valid here."""
        keys = [key_of(point) for point in points]
        for key in keys:
            if key not in self._points:
                raise UsageError(f"seed {key} is not among the {len(self._points)} valid points")
        self._queue = [*dict.fromkeys(keys), *(key for key in self._queue if key not in set(keys))]

    def holds(self, point: Point) -> bool:
        """Whether it is one of the valid points."""
        return key_of(point) in self._points

    def add_known(self, point: Point, value: float | None) -> None:
        """A result of an earlier run: never proposed again; None for a failure. Counts towards the budget."""
        key = key_of(point)
        if key not in self._points or key in self._seen:
            return
        if value is not None:
            params = self._encoded(self._points[key])
            trial = optuna.trial.create_trial(params=params, distributions=self._distributions(params), value=value)
            self._study.add_trial(trial)
        self._seen.add(key)
        self._asked += 1

    def ask(self) -> Point | None:
        """The next point; None when the budget or the space is used up. May be asked again after it failed."""
        if self._asked >= self._budget or len(self._seen) >= len(self._points):
            return None
        for key in self._queue:  # stays queued: a point that is seen now may be free again when its board is gone
            if key not in self._seen:
                return self._begin(key, self._fixed_trial(key))
        return self._propose()

    def tell(self, point: Point, value: float | None) -> None:
        """The point's time; None when it failed."""
        trial = self._open.pop(key_of(point))
        with quiet():
            if value is None:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, value)

    def leave(self) -> None:
        """What was asked and not told will not be told."""

    def waits(self) -> bool:
        """Whether somebody else measures a point of this study."""
        return False

    @property
    def optuna_study(self) -> optuna.Study:
        return self._study

    def _begin(self, key: str, trial: optuna.Trial) -> Point:
        self._seen.add(key)
        self._asked += 1
        self._open[key] = trial
        return self._points[key]

    def _fixed_trial(self, key: str) -> optuna.Trial:
        point = self._points[key]
        with quiet():
            self._study.enqueue_trial(self._encoded(point))
            trial = self._study.ask()
            for name in point:
                self._suggest_one(trial, name)
        return trial

    def _propose(self) -> Point:
        for _ in range(_ATTEMPTS):
            with quiet():
                trial = self._study.ask()
                point = self._suggest(trial)
            key = key_of(point)
            if key in self._points and key not in self._seen:
                return self._begin(key, trial)
            with quiet():
                self._study.tell(trial, state=TrialState.FAIL)
        unseen = [key for key in self._points if key not in self._seen]
        key = self._rng.choice(unseen)
        return self._begin(key, self._fixed_trial(key))

    def _suggest(self, trial: optuna.Trial) -> Point:
        """Names are suggested in order; one that no remaining point has, given those so far, is left out."""
        remaining = list(self._points.values())
        point: dict[str, Any] = {}
        for name in self._choices:
            if not any(name in candidate for candidate in remaining):
                continue
            point[name] = self._suggest_one(trial, name)
            remaining = [c for c in remaining if name not in c or c[name] == point[name]]
        return point

    def _distributions(self, params: Mapping[str, Any]) -> dict[str, optuna.distributions.BaseDistribution]:
        if self._ordinal:
            return {name: IntDistribution(0, len(self._choices[name]) - 1) for name in params}
        return {name: CategoricalDistribution(self._choices[name]) for name in params}

    def _suggest_one(self, trial: optuna.Trial, name: str) -> Any:
        values = self._choices[name]
        if self._ordinal:
            return values[trial.suggest_int(name, 0, len(values) - 1)]
        return trial.suggest_categorical(name, values)

    def _encoded(self, point: Point) -> dict[str, Any]:
        """As Optuna is told of it."""
        if self._ordinal:
            return {name: self._choices[name].index(value) for name, value in point.items()}
        return dict(point)


def _choices(points: Sequence[Point], *, ordered: bool) -> dict[str, tuple[Any, ...]]:
    """Values of each name over all points, by size where that is asked for, else in order of first appearance."""
    choices: dict[str, dict[Any, None]] = {}
    for point in points:
        for name, value in point.items():
            choices.setdefault(name, {})[value] = None
    if ordered:
        return {name: tuple(sorted(values, key=_size)) for name, values in choices.items()}
    return {name: tuple(values) for name, values in choices.items()}


def _size(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, (int, float)) else (0.0, str(value))


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna's log lines would mix with ours, and the arguments it calls experimental are chosen on purpose.

    Both settings are the process's, so that threads that tune take turns.
    """
    with _TURN:
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=UserWarning, module="optuna")
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                yield
        finally:
            optuna.logging.set_verbosity(before)
