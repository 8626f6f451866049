"""Code of the user that a run names: imported before the run begins, so that what is missing or wrong is found first.

`problem_order` and `own_filter` choose what a step trains on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from agents.rollout.rewards import RewardSum
from agents.types import TrajectoryGroup
from envs.datasets.samples import epoch_order
from envs.execution.watchdog import watched
from envs.spec import EnvSpec
from envs.types import SampleSource
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.importance_sampling import find_correction
from trainer.algorithms.policy_loss import find_policy_loss
from trainer.config.algorithm import ADVANTAGE, AlgorithmConfig
from trainer.config.rollout import GROUP_FILTER, SAMPLER, RolloutConfig


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise `UserError` if advantage, policy loss or correction is a user's and cannot be used."""
    find_policy_loss(config.policy_loss)
    find_correction(config.correction)
    if config.advantage not in ADVANTAGES:
        ADVANTAGE.load("--advantage", config.advantage)


def check_rollout(config: RolloutConfig, spec: EnvSpec) -> None:
    """Raise `UserError` if a reward function, the sampler or the group filter cannot be used."""
    RewardSum.load(spec.reward)
    own_filter(config.group_filter)
    if config.sampler:
        SAMPLER.load("--sampler", config.sampler)


def problem_order(samples: SampleSource, sampler: str, seed: int, epoch: int) -> list[int]:
    """Return the indices of an epoch's problems in order: by the user's `sampler`, or a seeded shuffle without one.

    A resumed run asks again, so a sampler must depend on its arguments alone.

    Raises:
        UserError: the sampler raises, or does not return as many indices as there are samples.
    """
    if not sampler:
        return epoch_order(len(samples), seed, epoch)
    function = SAMPLER.load("--sampler", sampler)
    with watched(f"--sampler '{sampler}'"):
        found = SAMPLER.call("--sampler", sampler, function, samples, seed, epoch)
    with SAMPLER.result_of("--sampler", sampler, found):
        order = [operator.index(index) for index in found]
        if len(order) != len(samples) or not set(order) <= set(range(len(samples))):
            raise ValueError(f"it must be {len(samples)} indices from 0 to {len(samples) - 1}")
    return order


def own_filter(reference: str) -> Callable[[TrajectoryGroup], bool] | None:
    """Return the user's filter of groups, checked; None where the settings name none.

    Raises:
        UserError: it cannot be imported, or takes other parameters.
    """
    if not reference:
        return None
    function: Callable[[TrajectoryGroup], bool] = GROUP_FILTER.load("--group-filter", reference)

    def keeps(group: TrajectoryGroup) -> bool:
        with watched(f"--group-filter '{reference}'"):
            found = GROUP_FILTER.call("--group-filter", reference, function, group)
        with GROUP_FILTER.result_of("--group-filter", reference, found):
            if not isinstance(found, bool | np.bool_):
                raise TypeError("it must be True or False")
        return bool(found)

    return keeps
