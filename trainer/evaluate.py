"""Accuracy of a policy on held-out problems: episodes in, counts out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.episode import Episode
from agents.rollout import rollout_groups
from agents.types import Trajectory
from envs.runner import EpisodeEnv
from envs.types import Sample


@dataclass(frozen=True)
class Evaluation:
    """What one pass over a set of problems gave; broken episodes count as wrong, and
    not in the mean reward.

    Example: `Evaluation(accuracy=0.61, num_problems=256, ...)`; `by_tag["level"]["3"]` is the accuracy on level 3.
    """

    accuracy: float
    mean_reward: float
    num_problems: int
    mean_turns: float
    mean_tokens: float
    end_reasons: Mapping[str, int]
    by_tag: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


async def evaluate(
    episode: Episode,
    samples: Sequence[Sample],
    build_env: Callable[..., EpisodeEnv],
    args: Any,
    seed: int,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    tags: Sequence[str] = ("family", "level"),
    right_reward: float = 1.0,
    max_concurrent: int = 1024,
) -> Evaluation:
    """Play every problem once; an episode is right when its reward is `right_reward` or more."""
    groups = await rollout_groups(
        episode,
        samples,
        build_env,
        args,
        group_size=1,
        seed=seed,
        on_episode=on_episode,
        max_concurrent=max_concurrent,
    )
    trajectories = [group.trajectories[0] for group in groups]
    right = [t.end_reason.is_valid and t.reward >= right_reward for t in trajectories]
    scores: dict[str, dict[str, list[bool]]] = {tag: defaultdict(list) for tag in tags}
    for trajectory, correct in zip(trajectories, right, strict=True):
        for tag in tags:
            if tag in trajectory.metadata:
                scores[tag][str(trajectory.metadata[tag])].append(correct)
    count, rewards = max(1, len(trajectories)), [t.reward for t in trajectories if t.end_reason.is_valid]
    return Evaluation(
        accuracy=sum(right) / count,
        mean_reward=sum(rewards) / max(1, len(rewards)),
        num_problems=len(trajectories),
        mean_turns=sum(len(t.turns) for t in trajectories) / count,
        mean_tokens=sum(t.num_model_tokens for t in trajectories) / count,
        end_reasons=dict(Counter(t.end_reason.value for t in trajectories)),
        by_tag={
            tag: {value: sum(marks) / len(marks) for value, marks in sorted(values.items())}
            for tag, values in scores.items()
            if values
        },
    )
