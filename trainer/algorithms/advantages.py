"""Computes advantages from the rewards of every group of a step.

To add an algorithm: write a function like `grpo`, add it to `ADVANTAGES` and its name to `AdvantageName`; or bring one
from outside, which sees whole trajectories and may give each turn an advantage of its own (`OwnAdvantage`).

Legend: G samples of one group, P groups of a step. The callers pass the rewards of valid episodes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agents.types import Trajectory, TrajectoryGroup
from envs.contract import MAX_REWARD
from envs.execution.watchdog import watched
from trainer.config.algorithm import ADVANTAGE, AdvantageName, AlgorithmConfig
from trainer.types import Advantage

Rewards = Sequence[Sequence[float]]
#: The advantage of every trajectory of every group; None for a broken episode.
Advantages = Sequence[Sequence[Advantage | None]]
#: A user's function: for each group an advantage for each of its valid trajectories (`group.valid`), which is a number
#: or one for each turn.
OwnAdvantage = Callable[[Sequence[TrajectoryGroup], AlgorithmConfig], Sequence[Sequence[Any]]]
#: Added to a standard deviation before dividing by it.
EPS = 1e-6


def group_advantages(rewards_G: Sequence[float], scale_by_std: bool = True, eps: float = EPS) -> NDArray[np.float64]:
    """Return A_i = (r_i - mean r) / (std r + eps), with the sample std; without dividing if not `scale_by_std`.

    GRPO, arXiv 2402.03300, section 4.1.2; without std: Dr. GRPO, arXiv 2503.20783. Equal rewards give exactly 0, which
    the formula alone does not: eight times 0.9 has a mean that is not 0.9 in float32.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], scale_by_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + eps) if scale_by_std else centred


def grpo(rewards: Rewards, config: AlgorithmConfig) -> list[NDArray[np.float64]]:
    """Return each group's `group_advantages`, scaled by its standard deviation if `config.scale_by_std`."""
    return [group_advantages(rewards_G, config.scale_by_std) for rewards_G in rewards]


def rloo(rewards: Rewards, config: AlgorithmConfig) -> list[NDArray[np.float64]]:
    """Return A_i = r_i - mean of the group's other rewards, which is (r_i - mean r) G / (G - 1).

    REINFORCE leave-one-out, arXiv 2402.14740: the baseline does not depend on the sample, so the gradient
    is unbiased. Nothing is divided by a standard deviation. Equal rewards give exactly 0.

    >>> rloo([[1.0, 0.0, 0.0]], AlgorithmConfig())[0].tolist()
    [1.0, -0.5, -0.5]
    """
    return [
        group_advantages(rewards_G, scale_by_std=False) * (len(rewards_G) / max(1, len(rewards_G) - 1))
        for rewards_G in rewards
    ]


def reinforce_plus_plus(rewards: Rewards, config: AlgorithmConfig) -> list[NDArray[np.float64]]:
    """Return A = (r - mean r of the group) / (std over the step of the numerators + eps), with the sample std.

    REINFORCE++ in its variant with a baseline, arXiv 2501.03262, section 3: one scale for all groups, so that a group
    that is nearly solved weighs no more than others. The numerators' mean over the step is 0, so it is not subtracted.
    A group of equal rewards has advantage 0 and counts in the deviation; a group of one sample does not.
    """
    centred = [group_advantages(rewards_G, scale_by_std=False) for rewards_G in rewards]
    everything = np.concatenate([*(group for group in centred if len(group) > 1), np.zeros(0)])
    scale = everything.std(ddof=1) + EPS if len(everything) > 1 else 1.0
    return [group / scale for group in centred]


#: Every advantage function, by its value of `--advantage`.
ADVANTAGES: Mapping[AdvantageName, Callable[[Rewards, AlgorithmConfig], list[NDArray[np.float64]]]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
}


def step_advantages(rewards: Rewards, config: AlgorithmConfig) -> list[NDArray[np.float64]]:
    """Return the advantages of all P groups of a step, one array of G numbers per group, by `--advantage`.

    A group of one sample has advantage 0: there is nothing to compare it with.
    """
    return ADVANTAGES[cast(AdvantageName, config.advantage)](rewards, config)


def compute_advantages(groups: Sequence[TrajectoryGroup], config: AlgorithmConfig) -> list[list[Advantage | None]]:
    """Return the advantage of each trajectory of each group; None for broken episodes, which no statistic counts.

    Raises:
        UserError: `--advantage` is a user's function, and it raises or returns something else.
    """
    by_group: Sequence[Sequence[Advantage]]
    if config.advantage in ADVANTAGES:
        rewards = [[t.reward for t in group.valid] for group in groups]
        by_group = [advantages_G.tolist() for advantages_G in step_advantages(rewards, config)]
    else:
        by_group = own_advantages(groups, config)
    result: list[list[Advantage | None]] = []
    for group, advantages_G in zip(groups, by_group, strict=True):
        valid = iter(advantages_G)
        result.append([next(valid) if t.end_reason.is_valid else None for t in group.trajectories])
    return result


def own_advantages(groups: Sequence[TrajectoryGroup], config: AlgorithmConfig) -> list[list[Advantage]]:
    """Return the advantages by a user's function, checked."""
    reference = config.advantage
    function: OwnAdvantage = ADVANTAGE.load("--advantage", reference)
    with watched(f"--advantage '{reference}'"):
        found = ADVANTAGE.call("--advantage", reference, function, groups, config)
    with ADVANTAGE.result_of("--advantage", reference, found):
        return [
            [_checked(t, value) for t, value in zip(group.valid, values_G, strict=True)]
            for group, values_G in zip(groups, found, strict=True)
        ]


def _checked(trajectory: Trajectory, value: Any) -> Advantage:
    """Return an advantage as a number, or one for each turn. Raises ValueError or TypeError where it is neither."""
    numbers = np.asarray(value, dtype=np.float64)
    if not (np.abs(numbers) <= MAX_REWARD).all():
        raise ValueError(f"{value} is {'over float32' if np.isfinite(numbers).all() else 'not finite'}")
    if numbers.ndim == 0:
        return float(numbers)
    if numbers.shape != (len(trajectory.turns),):
        raise ValueError(f"{len(trajectory.turns)} turns have advantages of shape {numbers.shape}")
    return tuple(numbers.tolist())
