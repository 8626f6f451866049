"""Plays every problem of a set with the agent loop, and makes a result of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agents.rollout.episode import Episode
from agents.rollout.groups import GroupProblem, RolloutOptions
from agents.rollout.manager import RolloutManager
from agents.types import EndReason, Trajectory, TrajectoryGroup, is_success
from envs.contract import EpisodeEnv
from envs.env import EnvArgs
from envs.errors import UserError, did_you_mean
from envs.spec import EnvSpec
from envs.types import SampleSource
from trainer.config.inputs import Tools
from trainer.evaluation.results import EvaluatedEpisode, Evaluation, ProblemResult, summarise
from trainer.evaluation.statistics import Intervals
from trainer.metrics.log import tool_outcomes

TAGS = ("family", "level")
WITH_TOOL = "with_tool"
WITHOUT_TOOL = "without_tool"
NO_TOOLS = "no_tools"


@dataclass(frozen=True)
class Way:
    """One way to play the problems: with how many turns, and with tools or not. Tables and files use the `name`."""

    name: str
    max_turns: int
    use_tools: bool


def ways(max_turns: int, has_tools: bool, tools: Tools = "both", required: bool = False) -> tuple[Way, ...]:
    """Return the ways to evaluate: over all turns and, if there are tools, without them in one turn.

    `required`: nothing can be done without tools, so there is no way without them.

    >>> [way.name for way in ways(3, has_tools=True)]
    ['with_tool', 'without_tool']
    >>> [way.name for way in ways(3, has_tools=True, tools="on")]
    ['with_tool']
    >>> [way.name for way in ways(3, has_tools=False)]
    ['no_tools']

    Raises:
        UserError: only the way without tools is wanted, and they are required.
    """
    if not has_tools:
        # The environment may still answer with text, so all turns are played.
        return (Way(NO_TOOLS, max_turns, True),)
    if required and tools == "off":
        rule = "cannot be off where the environment's entry says tools: required"
        raise UserError("--tools", rule, tools, "leave it out, or change the entry")
    with_tool = Way(WITH_TOOL, max_turns, True)
    # One turn: without a tool nobody answers, so a second turn would have nothing to go on.
    without_tool = Way(WITHOUT_TOOL, 1, False)
    if required or tools == "on":
        return (with_tool,)
    if tools == "off":
        return (without_tool,)
    return (with_tool, without_tool)


@dataclass(frozen=True)
class EvaluationOptions:
    """How to play a set of problems."""

    num_samples: int = 1
    seed: int = 0
    max_concurrent: int = 1024
    tags: tuple[str, ...] = TAGS


@dataclass(eq=False)
class ProblemPlayer:
    """Plays every problem of a set. `results` grows as problems are done, and keeps them if the playing is stopped.

    At most `max_concurrent` problems are in memory with their images. With the embedded engine, the same seed gives
    the same episodes.

    Example::

        player = ProblemPlayer(episode, samples, build_env, args, spec, EvaluationOptions(num_samples=4))
        await player.run()
        summarise(player.results, (1, 4), Intervals()).accuracy      # Estimate(0.262, 0.221, 0.305, 256, "bootstrap")
    """

    episode: Episode
    samples: SampleSource
    build_env: Callable[..., EpisodeEnv]
    args: EnvArgs
    spec: EnvSpec
    options: EvaluationOptions
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None
    results: list[ProblemResult] = field(default_factory=list)
    _info_keys: set[str] = field(default_factory=set)

    async def evaluate(self) -> Evaluation:
        """Play all problems, at least one, and return their statistics."""
        await self.run()
        return summarise(self.results, (1,), Intervals(reward_bounds=self.spec.total_bounds))

    async def run(self) -> None:
        """Play all problems. Raises what the engine raises; a broken episode is a result too."""
        options = RolloutOptions(self.options.num_samples, max_concurrent=self.options.max_concurrent)
        manager = RolloutManager(
            self.episode, self.build_env, self.args, self._problem, options, on_episode=self.on_episode
        )
        try:
            # In portions: so the images of a large set are never in memory all at once.
            while (num_left := len(self.samples) - len(self.results)) > 0:
                first = len(self.results)
                groups = (await manager.collect(min(num_left, self.options.max_concurrent))).groups
                self.results += [self._result(number, group) for number, group in enumerate(groups, first)]
        finally:
            # Also after an error or Ctrl-C: what was played whole is reported.
            left = enumerate(await manager.close(), len(self.results))
            self.results += [self._result(number, group) for number, group in left if self._is_whole(group)]

    def _problem(self, number: int) -> GroupProblem:
        return GroupProblem(self.samples[number], self.options.seed, number)

    def _is_whole(self, group: TrajectoryGroup) -> bool:
        """Return whether a group that was not collected is complete, with no aborted episode."""
        ends = [t.end_reason for t in group.trajectories]
        # With fewer samples than the others, a problem would weigh in wrongly.
        return len(ends) == self.options.num_samples and EndReason.ABORTED not in ends

    def _result(self, number: int, group: TrajectoryGroup) -> ProblemResult:
        metadata = group.trajectories[0].metadata
        # Text, since a file and a table have to show it, whatever an author puts there.
        tags = {tag: str(metadata[tag]) for tag in self.options.tags if tag in metadata}
        env = self.spec.part(metadata).id if self.spec.parts else ""
        return ProblemResult(number, group.sample_id, tags, tuple(map(self._episode_result, group.trajectories)), env)

    def doubt(self, found: Evaluation) -> str:
        """Return why the environment's success is perhaps not what its author means; empty if nothing says so."""
        spec = self.spec
        rule = spec.success_rule
        reward = found.mean_reward
        if rule and rule.key and rule.key not in self._info_keys:
            fix = did_you_mean(rule.key, self._info_keys)
            return f"no episode is a success: the entry names '{rule.key}', a key that no episode's info has; {fix}"
        # Whoever has written down what a success is, means it.
        if spec.parts or spec.success is not None or spec.reward or not (found.accuracy and reward):
            return ""
        low, high = spec.reward_bounds
        # Rewards beyond the declared ones, or some reward and never a success: a slip in the entry.
        if reward.value > high or (found.accuracy.value == 0 and reward.value > low):
            return (
                f"the mean reward is {reward.value:.3g}, and a success is {rule}: if that is not what you mean, write "
                "success: 0.9 (a reward), success: KEY (of the episode's info) or success: none in the entry"
            )
        return ""

    def _episode_result(self, t: Trajectory) -> EvaluatedEpisode:
        self._info_keys.update(str(key) for turn in t.turns for key in turn.info)
        return EvaluatedEpisode(
            reward=t.reward,
            is_right=is_success(t, self.spec.success_rule),
            end_reason=t.end_reason,
            num_turns=len(t.turns),
            num_tokens=t.num_model_tokens,
            outcomes=tuple(outcome for turn in t.turns for outcome in tool_outcomes(turn)),
            verdicts={judge: t.rewards[judge] for judge in t.verdicts},
        )
