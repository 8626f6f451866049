"""What the training loop asks of its rollouts, live or recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agents.rollout.groups import ManagerState, StepRollout
from agents.types import Trajectory, TrajectoryGroup
from trainer.evaluation.results import Evaluation
from trainer.metrics.console import Display

#: What a mixture loses without the engine's experts.
FREE_ROUTING = (
    "the trainer chooses again, so expect a rollout_train_kl several times as large, growing with the turns; "
    "see docs/rollouts.md, Experts of a mixture"
)

OnEpisode = Callable[[Trajectory], None]
#: Called with each episode of an evaluation: the way it is played ("with_tool"), and the episode.
OnEvaluated = Callable[[str, Trajectory], None]


class Rollouts(Protocol):
    """Gives each step its groups of episodes.

    Example::

        await rollouts.start(0, ManagerState(), on_episode)
        groups = (await rollouts.collect(8)).groups
        unfinished = await rollouts.drain()
        await rollouts.close()
    """

    @property
    def events(self) -> Sequence[str]:
        """What has happened to servers so far, as lines to print."""
        ...

    async def start(self, version: int, state: ManagerState, on_episode: OnEpisode) -> None:
        """Start the engine with the learner's weights of `version`, and continue from `state`.

        `on_episode` is called as each episode ends.
        """
        ...

    async def collect(self, num_groups: int) -> StepRollout:
        """Return the groups of the next step: `num_groups`, or what there is."""
        ...

    def idle_fracs(self) -> Mapping[str, float]:
        """Return the metrics of who waited since the last call of `collect`, as far as the rollouts know."""
        ...

    def state(self) -> ManagerState:
        """Return what a checkpoint needs to continue, between two calls of `collect`."""
        ...

    async def drain(self) -> tuple[TrajectoryGroup, ...]:
        """Stop all episodes and return the groups that were begun and never handed out."""
        ...

    async def evaluate(self, name: str, display: Display, on_episode: OnEvaluated) -> dict[str, Evaluation]:
        """Return the accuracy on held-out problems by way of playing; nothing where there are none.

        `name` is shown while it runs: "evaluate step 10".
        """
        ...

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the run's summary says of its rollouts, given the run's metrics."""
        ...

    async def close(self) -> None:
        """Free what `start` started."""
        ...
