"""Which parameters mattered: Optuna's PED-ANOVA over trials that are already there."""

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution

from tilewright.search.study import quiet

FEWEST_TRIALS = 8  # below, shares are an accident of what was tried


def parameter_importance(trials: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """Share of each parameter in what sets fast configs apart, largest first; empty where too little was tried.

    `trials` are configs with their times; parameters that never changed have no share.
    """
    names = [name for name in (trials[0][0] if trials else ()) if len({_hashable(c.get(name)) for c, _ in trials}) > 1]
    if len(trials) < FEWEST_TRIALS or not names:
        return {}
    choices: dict[str, Any] = {
        name: CategoricalDistribution(sorted({_hashable(config.get(name)) for config, _ in trials}, key=repr))
        for name in names
    }
    with quiet():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        study.add_trials(
            optuna.trial.create_trial(
                params={name: _hashable(config.get(name)) for name in names}, distributions=choices, value=time_us
            )
            for config, time_us in trials
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in sorted(found.items(), key=lambda item: -item[1])}


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else repr(value)
