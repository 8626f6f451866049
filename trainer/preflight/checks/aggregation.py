"""Checks that the aggregation of token losses pays for no turns."""

from __future__ import annotations

from envs.checks import Verdict, ok, warning
from trainer.config.algorithm import AlgorithmConfig


def check_aggregation(algorithm: AlgorithmConfig, max_turns: int) -> Verdict:
    """Return a warning if an episode of several turns is divided by its own length; docs/turn-rewards.md says why.

    >>> check_aggregation(AlgorithmConfig(aggregation="seq-mean-token-mean"), max_turns=1).status
    'ok'
    """
    # Each token of a long episode weighs less, so a policy can write less a turn and take more turns for nothing.
    if algorithm.aggregation == "seq-mean-token-mean" and max_turns > 1:
        found = f"seq-mean-token-mean pays for more turns with less text in each, and an episode may take {max_turns}"
        return warning(found, "give --aggregation token-mean, or watch turns and tokens_per_episode")
    return ok(f"{algorithm.aggregation} pays for no turns")
