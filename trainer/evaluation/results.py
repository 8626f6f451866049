"""Summarises the results of all problems of an evaluation: accuracies with intervals, by end reason and by tag.

Where the environment knows no success there is no accuracy: the mean reward takes its place everywhere.

Legend: P problems.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from agents.types import EndReason
from trainer.evaluation.judges import JudgeAgreement, agreements
from trainer.evaluation.statistics import Estimate, Intervals, estimate_mean, estimate_pass

#: The figures that policies are compared by, as fields of an `Evaluation`.
Figure = Literal["accuracy", "mean_reward"]
#: How far other rewards may lie from those seen, where a bound of the rewards is unknown.
UNKNOWN_REACH = 1.0


@dataclass(frozen=True)
class EvaluatedEpisode:
    """The result of one episode.

    `is_right`: it is a success, see `agents.types.is_success`; None where the environment knows none. `outcomes` lists
    the outcomes of its tool calls, "none" for a turn without a call. `verdicts` has the value of
    each judge.
    """

    reward: float
    is_right: bool | None
    end_reason: EndReason
    num_turns: int
    num_tokens: int
    outcomes: tuple[str, ...] = ()
    verdicts: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        """How many tool calls it made, broken ones included."""
        return sum(outcome != "none" for outcome in self.outcomes)


@dataclass(frozen=True)
class ProblemResult:
    """All episodes of one problem; `number` is its index in the set, `tags` the metadata to show accuracy by.

    `env` is the id of its environment in a mixture, else empty.
    """

    number: int
    sample_id: str
    tags: Mapping[str, str]
    episodes: tuple[EvaluatedEpisode, ...]
    env: str = ""

    @property
    def knows_success(self) -> bool:
        """Whether its environment says what a success is."""
        return self.episodes[0].is_right is not None

    @property
    def num_right(self) -> int:
        """How many episodes are right."""
        return sum(map(bool, (episode.is_right for episode in self.episodes)))

    @property
    def valid_rewards(self) -> list[float]:
        """The rewards of the valid episodes."""
        return [episode.reward for episode in self.episodes if episode.end_reason.is_valid]


@dataclass(frozen=True)
class EndReasonStats:
    """The episodes that ended for one reason; `accuracy`, `mean_turns` and `mean_reward` are over these episodes."""

    num_episodes: int
    share: float
    accuracy: float | None
    mean_turns: float
    mean_reward: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Statistics of a policy on a set of problems, with `num_samples` episodes of each problem.

    - `accuracy`: pass@1, the mean over problems of the share of right samples. Broken episodes count as wrong. None
      where the environment knows no success; `pass_at` is then empty.
    - `mean_reward`: over valid episodes; None if all broke.
    - `num_broken`, `num_truncated`: episodes that broke, and episodes that a limit cut off.
    - `tool_outcomes`: counts over `num_turns` turns; `mean_tool_calls`: calls in an episode.
    - `judges`: how each judge among the reward functions agrees with the grader.
    - `by_tag["level"]["3"]`: the main figure on problems of level 3.
    - `by_env["geo3k"]`: the same statistics on the problems of one environment of a mixture. Accuracies of a mixture
      are over the problems whose environments know a success.

    Example: `Evaluation(num_problems=256, num_samples=1, accuracy=Estimate(0.61, 0.55, 0.67, 256, "wilson"), ...)`.
    """

    num_problems: int
    num_samples: int
    accuracy: Estimate | None
    pass_at: Mapping[int, Estimate]
    mean_reward: Estimate | None
    num_broken: int
    num_truncated: int
    num_turns: int
    mean_turns: float
    mean_tokens: float
    ends: Mapping[str, EndReasonStats]
    tool_outcomes: Mapping[str, int]
    by_tag: Mapping[str, Mapping[str, Estimate]]
    mean_tool_calls: float = 0.0
    judges: Mapping[str, JudgeAgreement] = field(default_factory=dict)
    by_env: Mapping[str, Evaluation] = field(default_factory=dict)

    @property
    def main(self) -> Figure:
        """The figure that stands for the policy: the accuracy, or where there is none the mean reward."""
        if self.accuracy is None:
            return "mean_reward"
        return "accuracy"

    def estimate(self, figure: Figure) -> Estimate | None:
        """Return a figure; None where it is not known."""
        if figure == "accuracy":
            return self.accuracy
        return self.mean_reward


def summarise(results_P: Sequence[ProblemResult], ks: Sequence[int], how: Intervals) -> Evaluation:
    """Return the statistics of at least one problem, all with the same number of samples.

    `ks` lists the k of pass@k.
    """
    assert results_P, "statistics need at least one problem"
    episodes = [episode for result in results_P for episode in result.episodes]
    by_env: dict[str, list[ProblemResult]] = defaultdict(list)
    for result in results_P:
        by_env[result.env].append(result)
    # One environment alone would show every row twice.
    envs = sorted(by_env) if len(by_env) > 1 else ()
    return Evaluation(
        num_problems=len(results_P),
        num_samples=len(results_P[0].episodes),
        accuracy=_pass_at(1, results_P, how),
        pass_at={k: estimate for k in ks if (estimate := _pass_at(k, results_P, how))},
        mean_reward=_mean_reward(results_P, how),
        num_broken=sum(not episode.end_reason.is_valid for episode in episodes),
        num_truncated=sum(episode.end_reason.is_truncated for episode in episodes),
        num_turns=sum(episode.num_turns for episode in episodes),
        mean_turns=fmean(episode.num_turns for episode in episodes),
        mean_tokens=fmean(episode.num_tokens for episode in episodes),
        ends=_ends(episodes),
        tool_outcomes=dict(Counter(outcome for e in episodes for outcome in e.outcomes).most_common()),
        by_tag=_by_tag(results_P, how),
        mean_tool_calls=fmean(episode.num_calls for episode in episodes),
        judges=agreements(episodes),
        by_env={env: summarise(by_env[env], ks, how) for env in envs},
    )


def _pass_at(k: int, results_P: Sequence[ProblemResult], how: Intervals) -> Estimate | None:
    """Return pass@k over the problems that can be right or wrong, of a mixture perhaps not all; None without any."""
    right_P = [result.num_right for result in results_P if result.knows_success]
    if not right_P:
        return None
    return estimate_pass(right_P, len(results_P[0].episodes), k, how)


def by_environment(ways: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Return evaluations by way of playing, each followed by those of its environments, such as `with_tool/geo3k`."""
    found: dict[str, Evaluation] = {}
    for way, evaluation in ways.items():
        found[way] = evaluation
        found |= {f"{way}/{env}": part for env, part in evaluation.by_env.items()}
    return found


def compare(first_P: Sequence[ProblemResult], second_P: Sequence[ProblemResult], how: Intervals) -> Estimate | None:
    """Return the main figure of the first way minus that of the second, paired by problem.

    None if they have no problem in common.
    """
    others = {result.number: result for result in second_P}
    pairs = [(result, others[result.number]) for result in first_P if result.number in others]
    if not any(result.knows_success for result in first_P):
        return _compare_rewards(pairs, how)
    # A mixture may also have problems whose environments know no success.
    gains_P = [(one.num_right - other.num_right) / len(one.episodes) for one, other in pairs if one.knows_success]
    if not gains_P:
        return None
    return estimate_mean(gains_P, how, bounds=(-1.0, 1.0))


def _compare_rewards(pairs: Sequence[tuple[ProblemResult, ProblemResult]], how: Intervals) -> Estimate | None:
    gains_P = []
    every: list[float] = []
    for pair in pairs:
        one, other = (result.valid_rewards for result in pair)
        if one and other:
            gains_P.append(sum(one) / len(one) - sum(other) / len(other))
            every += [*one, *other]
    if not every:
        return None
    # The bounds of the rewards may be unknown: no gain seen can be larger than their spread.
    reach = max(every) - min(every)
    return estimate_mean(gains_P, how, bounds=(-reach, reach))


def _mean_reward(results_P: Sequence[ProblemResult], how: Intervals) -> Estimate | None:
    """Return the mean over all valid episodes; None if there is none."""
    rewards_P = [result.valid_rewards for result in results_P]
    rewards = [reward for valid in rewards_P for reward in valid]
    if not rewards:
        return None
    # A problem whose episodes all broke has weight 0; its value does not matter.
    means_P = [sum(valid) / len(valid) if valid else 0.0 for valid in rewards_P]
    # A reward beyond its declared bounds moves them: the interval must hold what was seen.
    low = min(how.reward_bounds[0], *rewards)
    high = max(how.reward_bounds[1], *rewards)
    # Nothing is known of rewards that were not seen.
    if not math.isfinite(high - low):
        low = min(rewards) - UNKNOWN_REACH
        high = max(rewards) + UNKNOWN_REACH
    return estimate_mean(means_P, how, (low, high), weights_P=[len(valid) for valid in rewards_P])


def _ends(episodes: Sequence[EvaluatedEpisode]) -> dict[str, EndReasonStats]:
    """Return the statistics of each end reason, the most frequent one first."""
    of_reason: dict[str, list[EvaluatedEpisode]] = defaultdict(list)
    for episode in episodes:
        of_reason[episode.end_reason.value].append(episode)
    stats = {}
    # The most frequent first; names decide among equals, so that two runs print alike.
    for reason, ended in sorted(of_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        # None is not wrong: nobody says what right is.
        known = [episode.is_right for episode in ended if episode.is_right is not None]
        is_valid = ended[0].end_reason.is_valid
        stats[reason] = EndReasonStats(
            num_episodes=len(ended),
            share=len(ended) / len(episodes),
            accuracy=fmean(known) if known else None,
            mean_turns=fmean(episode.num_turns for episode in ended),
            mean_reward=fmean(episode.reward for episode in ended) if is_valid else None,
        )
    return stats


def _by_tag(results_P: Sequence[ProblemResult], how: Intervals) -> dict[str, dict[str, Estimate]]:
    """Return the main figure for each value of each tag; a value whose episodes all broke may have none."""
    tagged: dict[tuple[str, str], list[ProblemResult]] = defaultdict(list)
    for result in results_P:
        for pair in result.tags.items():
            tagged[pair].append(result)
    found: dict[str, dict[str, Estimate]] = {tag: {} for tag, _ in tagged}
    # By size and not by text: level 10 comes after level 9.
    for tag, value in sorted(tagged, key=lambda pair: _natural(pair[1])):
        results = tagged[tag, value]
        # A tag may be shared by environments with and without a success.
        if estimate := _pass_at(1, results, how) or _mean_reward(results, how):
            found[tag][value] = estimate
    return found


def _natural(value: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, then words."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value
