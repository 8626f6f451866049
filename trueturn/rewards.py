"""Reward functions to use beside your own: each takes a finished `Trajectory` and returns a number.

Example::

    def brevity(trajectory: tt.Trajectory) -> float:
        return -trajectory.num_model_tokens / 256

    tt.train(env, reward_funcs=[tt.rewards.answer, brevity], reward_weights=[1.0, 0.1])
"""

from __future__ import annotations

from agents.types import Trajectory
from trueturn.arguments import public


@public()
def answer(trajectory: Trajectory) -> float:
    """Return the environment's own reward, which says whether the answer is right.

    Example: 1.0 for a right answer in `geo3k`, else 0.0.
    """
    return trajectory.env_reward
