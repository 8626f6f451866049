"""Computes advantages from the rewards of every group of a step.

To add an algorithm: write a function like `grpo`, or one like `by_turn` that gives each turn an advantage of its own;
add it to `ADVANTAGES` or `TURN_ADVANTAGES` and its name to `AdvantageName`. Or bring one from outside, which sees whole
trajectories (`OwnAdvantage`).

Legend: G samples of one group, P groups of a step, K turns of an episode. The callers pass valid episodes only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.types import Trajectory, TrajectoryGroup
from envs.contract import MAX_REWARD
from envs.execution.watchdog import watched
from envs.images import image_digest
from envs.types import content_parts
from trainer.config.algorithm import ADVANTAGE, AlgorithmConfig
from trainer.types import Advantage

Rewards = Sequence[Sequence[float]]
#: The advantage of every trajectory of every group; None for a broken episode.
Advantages = Sequence[Sequence[Advantage | None]]
#: A user's function: for each group an advantage for each of its valid trajectories (`group.valid`), which is a number
#: or one for each turn.
OwnAdvantage = Callable[[Sequence[TrajectoryGroup], AlgorithmConfig], Sequence[Sequence[Any]]]
#: Added to a standard deviation before dividing by it.
EPS = 1e-6
#: The key of a step's info that names the state after it.
STATE = "state"


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
    if scale_by_std:
        return centred / (rewards.std(ddof=1) + eps)
    return centred


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
    if len(everything) > 1:
        scale = everything.std(ddof=1) + EPS
    else:
        scale = 1.0
    return [group / scale for group in centred]


#: Every advantage function of an episode's reward, by its value of `--advantage`.
ADVANTAGES: Mapping[str, Callable[[Rewards, AlgorithmConfig], list[NDArray[np.float64]]]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
}


def returns_to_go(rewards_K: Sequence[float], discount: float) -> NDArray[np.float64]:
    """Return R_k = r_k + discount R_(k+1): what turn k and those after it earn.

    >>> returns_to_go([0.5, 0.0, 1.0], 0.5).tolist()
    [0.75, 0.5, 1.0]
    """
    returns = np.zeros(len(rewards_K))
    later = 0.0
    for k in reversed(range(len(rewards_K))):
        later = rewards_K[k] + discount * later
        returns[k] = later
    return returns


def by_turn(episodes_G: Sequence[Trajectory], config: AlgorithmConfig) -> list[Advantage]:
    """Return A_ik = R_ik - mean over the group's other episodes j of R_j,min(k, K_j), with `returns_to_go` R.

    An episode of fewer turns thus counts with the return of its last one. The baseline depends on other episodes alone,
    so the gradient is unbiased, however the policy chooses when to stop; a baseline of turn k for every reward of turn
    k is not (docs/turn-rewards.md has the proof and a counterexample). Without rewards on the way and with discount 1
    this is `rloo`. Nothing is divided by a standard deviation.
    """
    returns_GK = [returns_to_go(episode.turn_rewards, config.discount) for episode in episodes_G]
    played_GK = [returns_K for returns_K in returns_GK if len(returns_K)]
    if len(played_GK) < 2:
        return [(0.0,) * len(returns_K) for returns_K in returns_GK]
    advantages: list[Advantage] = []
    for returns_K in returns_GK:
        if not len(returns_K):  # a prompt without room for a turn: there is no token to learn from
            advantages.append(0.0)
            continue
        # What every episode counts at each turn of this one. Subtracting before the mean gives equal returns exactly 0.
        at_turn_GK = np.array(
            [other_K[np.minimum(np.arange(len(returns_K)), len(other_K) - 1)] for other_K in played_GK]
        )
        advantage_K = (returns_K - at_turn_GK).sum(axis=0) / (len(played_GK) - 1)
        advantages.append(tuple(advantage_K.tolist()))
    return advantages


def gigpo(episodes_G: Sequence[Trajectory], config: AlgorithmConfig) -> list[Advantage]:
    """Return A_ik = the episode's advantage + that of turn k among all turns of the group from the same state.

    GiGPO, arXiv 2505.10978, equations 2, 6 and 7 with omega = 1: the first is `group_advantages` of the episodes'
    rewards, the second that of the `returns_to_go` of the turns whose `state_before` is equal, in whichever episode and
    at whichever turn. A state met once adds 0. The authors take discount 0.95. The group of a state holds an episode's
    own later turns, and its size depends on how episodes go on, so the gradient is biased.
    """
    of_episodes_G = group_advantages([episode.reward for episode in episodes_G], config.scale_by_std)
    places: dict[str, list[tuple[int, int]]] = {}
    for i, episode in enumerate(episodes_G):
        for k in range(len(episode.turns)):
            places.setdefault(state_before(episode, k), []).append((i, k))
    returns_GK = [returns_to_go(episode.turn_rewards, config.discount) for episode in episodes_G]
    advantages_GK = [np.full(len(returns_K), of_episodes_G[i]) for i, returns_K in enumerate(returns_GK)]
    for same in places.values():
        of_state = group_advantages([returns_GK[i][k] for i, k in same], config.scale_by_std)
        for (i, k), advantage in zip(same, of_state, strict=True):
            advantages_GK[i][k] += advantage
    return [tuple(advantages_K.tolist()) for advantages_K in advantages_GK]


def state_before(episode: Trajectory, k: int) -> str:
    """Return a key of the state in which turn k, from 0, was taken; equal keys are equal states of one problem.

    It is ``info["state"]`` of the step before, where the environment gives one, else a hash of its observation. All
    episodes of a problem begin in the same state.
    """
    if k == 0:
        return ""
    before = episode.turns[k - 1]
    if STATE in before.info:
        return f"state {before.info[STATE]!r}"
    digest = hashlib.blake2b(digest_size=16)
    for message in before.observations:
        for part in content_parts(dict(message)):
            image = part.get("image")
            if image is not None:
                seen = image_digest(image.convert("RGB"))
            else:
                seen = part.get("text")
            # The same words of a tool and of a user are different states.
            digest.update(repr((message["role"], seen)).encode())
    return digest.hexdigest()


#: Every advantage function that gives each turn its own, by its value of `--advantage`.
TURN_ADVANTAGES: Mapping[str, Callable[[Sequence[Trajectory], AlgorithmConfig], list[Advantage]]] = {
    "turn": by_turn,
    "gigpo": gigpo,
}


def is_own(name: str) -> bool:
    """Return whether a value of `--advantage` names a user's function."""
    return name not in ADVANTAGES and name not in TURN_ADVANTAGES


def step_advantages(rewards: Rewards, config: AlgorithmConfig) -> list[NDArray[np.float64]]:
    """Return the advantages of all P groups of a step, one array of G numbers per group, by `--advantage`.

    A group of one sample has advantage 0: there is nothing to compare it with.
    """
    return ADVANTAGES[config.advantage](rewards, config)


def compute_advantages(groups: Sequence[TrajectoryGroup], config: AlgorithmConfig) -> list[list[Advantage | None]]:
    """Return the advantage of each trajectory of each group; None for broken episodes, which no statistic counts.

    Raises:
        UserError: `--advantage` is a user's function, and it raises or returns something else.
    """
    by_group: Sequence[Sequence[Advantage]]
    if config.advantage in ADVANTAGES:
        rewards = [[t.reward for t in group.valid] for group in groups]
        by_group = [advantages_G.tolist() for advantages_G in step_advantages(rewards, config)]
    elif config.advantage in TURN_ADVANTAGES:
        by_group = [TURN_ADVANTAGES[config.advantage](group.valid, config) for group in groups]
    else:
        by_group = own_advantages(groups, config)
    result: list[list[Advantage | None]] = []
    for group, advantages_G in zip(groups, by_group, strict=True):
        # The functions saw valid episodes alone: broken ones get their places back.
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
