"""Imports everything of the user that a run names, so that what is missing or wrong is found before the run begins."""

from __future__ import annotations

from agents.rollout.rewards import RewardSum
from envs.spec import EnvSpec
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.importance_sampling import find_correction
from trainer.algorithms.policy_loss import find_policy_loss
from trainer.config.algorithm import ADVANTAGE, AlgorithmConfig
from trainer.config.rollout import SAMPLER, RolloutConfig
from trainer.rollouts.own_code import own_filter


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
