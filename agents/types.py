"""Frozen types of a rollout: images, requests to an engine, its completions, turns, trajectories and groups.

Legend of the shape suffixes: T tokens of one stream, N of them that the model wrote, K ids that one of them was drawn
from, G samples of one group, P patches of one image, D values of a patch.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from envs.spec import ENV_REWARD
from envs.success import ENVIRONMENT, Success

#: Why the engine ended a turn: at a stop id, at its budget, or for a reason of its own.
Finish = Literal["stop", "length", "abort"]


class EndReason(StrEnum):
    """Why an episode ended. Only the environment decides `completed`; the limits belong to the agent loop.

    `tool_fault`: the model's own action broke a tool, and the entry gives such an episode the lowest reward.
    `reward_error`: a reward function of the run failed, or none applies.
    """

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"
    CONTEXT_FULL = "context_full"
    TOOL_FAULT = "tool_fault"
    PARSE_ERROR = "parse_error"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    REWARD_ERROR = "reward_error"
    ABORTED = "aborted"
    INVALID_STREAM = "invalid_stream"

    @property
    def is_valid(self) -> bool:
        """Whether the reward says something about the policy; other episodes are in no statistics and no loss."""
        # A broken tool call is the policy's own act and has a reward, so it teaches.
        return self in (EndReason.COMPLETED, EndReason.TOOL_FAULT) or self.is_truncated

    @property
    def is_graded(self) -> bool:
        """Whether the environment's own reward says something, also where a reward function failed after it."""
        return self.is_valid or self is EndReason.REWARD_ERROR

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the agent loop cut the episode off."""
        return self in (EndReason.MAX_TURNS, EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL)


class _Turn(Protocol):
    @property
    def info(self) -> Mapping[str, Any]: ...


class _Episode(Protocol):
    """A finished episode, played here or read from a recording."""

    @property
    def end_reason(self) -> EndReason: ...
    @property
    def env_reward(self) -> float: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def turns(self) -> Sequence[_Turn]: ...


def is_success(episode: _Episode, rule: Success | None) -> bool | None:
    """Return whether an episode is a success by the rule of its environment; None where there is no rule.

    The environment's own reward counts, whatever reward functions add. A broken episode is none, nor is one whose tool
    the model broke.
    """
    rule = rule and rule.of(episode.metadata)
    if rule is None:
        return None
    if not episode.end_reason.is_graded or episode.end_reason is EndReason.TOOL_FAULT:
        return False
    return rule.holds(episode.env_reward, [turn.info for turn in episode.turns])


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the model reads it, addressed by the hash of its pixels.

    Example: a 160 x 128 image in 16-pixel patches has `grid_thw` (1, 8, 10), 80 rows of `pixels_PD` and, merged
    2 x 2, 20 tokens. The patches were cut from `resized`: RGB, 16 times the grid.
    """

    digest: str
    pixels_PD: NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    num_tokens: int
    resized: Image.Image | None = field(default=None, repr=False)

    @functools.cached_property
    def png(self) -> bytes:
        """The resized image as a lossless PNG file, for an engine in another process; made once.

        The model's own processor does not resize it again and cuts the same patches from it. Raises ValueError where
        the image was made without its image.
        """
        if self.resized is None:
            raise ValueError(f"image {self.digest} was made without its image")
        file = io.BytesIO()
        # Level 1: the file goes to a process on the same host, where time counts more than bytes.
        self.resized.save(file, "PNG", compress_level=1)
        return file.getvalue()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the image takes, including a PNG file as large as its pixels."""
        width, height = self.resized.size if self.resized else (0, 0)
        # Three bytes a pixel, once as the image and once as its PNG file.
        return self.pixels_PD.nbytes + 2 * 3 * width * height


@dataclass(frozen=True)
class SamplingDistribution:
    """How logits become the distribution that tokens are drawn from.

    Example: `SamplingDistribution(0.7, (5,))` divides logits by 0.7 and never draws id 5.
    """

    temperature: float = 1.0
    suppressed_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. The trainer applies the same temperature and suppressed ids to its log-probs.

    `temperature` 0 takes the most likely token; the log-probs are then those of temperature 1. With `top_k` above 0, a
    token is drawn from the ids that `keeps` keeps of the `top_k` most likely ones, and its log-prob is that among them.
    """

    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def distribution(self) -> SamplingDistribution:
        """The distribution under which log-probs are reported and trained."""
        # At temperature 0 there is no distribution; the trainer takes that of the plain logits.
        return SamplingDistribution(self.temperature or 1.0, self.suppressed_ids)

    def keeps(self, probs_NK: Any) -> Any:
        """Return which of the most likely ids may be drawn, for an array or a tensor of their probabilities, falling.

        Probabilities are those among all ids: `top_p` cuts as in SGLang, where it does not depend on `top_k`. The first
        id is always kept.

        >>> SamplingParams(top_k=3, top_p=0.7).keeps(np.array([[0.5, 0.25, 0.125]])).tolist()
        [[True, True, False]]
        """
        before_NK = probs_NK.cumsum(-1) - probs_NK
        return (before_NK <= self.top_p) & (probs_NK >= self.min_p * probs_NK[:, :1])


@dataclass(frozen=True)
class RouteShape:
    """The routes of a mixture of experts: each token takes `top_k` of `num_experts` in each of `num_layers`.

    `num_layers` counts all decoder layers; those without experts have a row too, which nobody reads.

    Example: Qwen3-VL-30B-A3B has `RouteShape(num_layers=48, num_experts=128, top_k=8)`, 384 bytes a token.
    """

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The smallest type of array that holds an expert's number."""
        if self.num_experts <= 256:
            return np.uint8
        return np.uint16


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """A request for one model turn: the whole stream so far, placeholders expanded, with its images.

    `num_routed` is how many of its first tokens have known experts already; the completion has those of all that
    follow. With None it has none. `stream` is the number of the stream in its episode, from 0.
    """

    ids: tuple[int, ...]
    images: tuple[ProcessedImage, ...]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int
    num_routed: int | None = None
    stream: int = 0


def add_run(runs: list[tuple[int, int]], version: int, count: int) -> None:
    """Append `count` tokens to runs of (weight version, tokens); neighbours of one version become one run."""
    # One run a version: a pause for weights that did not change leaves no seam.
    if runs and runs[-1][0] == version:
        count += runs.pop()[1]
    if count:
        runs.append((version, count))


@dataclass(frozen=True)
class Completion:
    """The ids that the engine sampled, verbatim and with the stop id, and the log-prob of each.

    `versions` are runs of (weight version, tokens): `((3, 40), (4, 12))` says that weights 3 wrote 40 tokens and, after
    a pause for new weights, weights 4 wrote 12 more. `prompt_length` is the engine's own count of the tokens that it
    read; `num_cached` of them came from its cache. `kept_NK` are the ids that each token was drawn from, where the
    request has a `top_k`: so many for each, a smaller set repeats one of its own. `routes_RLK`, uint8 or uint16, are
    the experts of each of R tokens in each layer: of those from `GenerateRequest.num_routed` on to the last but one,
    which is the last that the network has read. There may be more, of a few tokens before that were not read again.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    prompt_length: int
    versions: tuple[tuple[int, int], ...]
    num_cached: int = 0
    kept_NK: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    routes_RLK: NDArray[np.uint8 | np.uint16] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class Turn:
    """One model turn: the span `[start, end)` of its tokens in its stream, its text, and the environment's answer.

    `observations` are the answer's chat messages; the model does not see those after the last turn. `done` says that
    the environment ended the task. `versions` and `num_cached` are the completion's. Times are seconds. `reward` is the
    turn's part of the trajectory's reward. `usage` has a server's own counts of tokens, where there are no ids.
    `stream` is the number of the stream in `Trajectory.streams`.
    """

    start: int
    end: int
    text: str
    finish: str
    versions: tuple[tuple[int, int], ...]
    num_cached: int
    observations: tuple[Mapping[str, Any], ...]
    info: Mapping[str, Any]
    engine_s: float
    env_s: float
    done: bool = False
    reward: float = 0.0
    usage: Mapping[str, int] = field(default_factory=dict)
    stream: int = 0


@dataclass(frozen=True)
class Timing:
    """How an episode spent its wall time, in seconds; the rest of `total_s` is the agent loop itself, and waiting.

    `began` is the time of its start, in seconds since 1970.
    """

    began: float = 0.0
    total_s: float = 0.0
    engine_s: float = 0.0
    env_s: float = 0.0
    check_s: float = 0.0


def messages_before_turns(
    messages: Sequence[Mapping[str, Any]], num_prompt: int, observations: Sequence[Sequence[Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages that an episode shows before its first turn: the problem's, then the first observation's.

    The first `num_prompt` are the problem's; `observations` has those of each turn. In `messages`, the message of a
    turn is followed by its observations, or by an empty message where it has none. Those of the last turn are only
    there if the model could have gone on.

    >>> said = [{"role": role} for role in ("user", "tool", "assistant", "tool", "assistant")]
    >>> messages_before_turns(said, 1, [["Score 0.0"], ["Score 1.0"]])
    [{'role': 'user'}, {'role': 'tool'}]
    """
    # Each turn is its own message and its answers; an empty answer is one empty message.
    num_after = sum(1 + max(1, len(answer)) for answer in observations)
    # The last answer is not in the conversation where no turn could follow it.
    if observations and messages and messages[-1].get("role") == "assistant":
        num_after -= max(1, len(observations[-1]))
    return messages[: max(num_prompt, len(messages) - num_after)]


@dataclass(frozen=True, eq=False)
class TokenStream:
    """One append-only token stream of an episode: a conversation as the model has read and written it.

    `mask_T` is True exactly on the tokens that the model sampled in this stream; `logprobs_T` is 0 elsewhere. `turns`
    are those that it wrote here. `kept_NK` are the ids that each of its tokens was drawn from, None where that was the
    whole vocabulary. `routes_RLK` are the experts that the first R tokens took in each layer, all but the last one of
    the last turn; None unless they were asked for. The first `num_opening` of `messages` are those of the prompt;
    `tools` are the schemas that it shows. An assistant's message from number `num_given` on is a turn of the model, in
    this stream or an earlier one, and stands in the prompt with its control tokens.

    Example: prompt of 4 tokens, the model writes 3, the environment 2, the model 2::

        ids_T       p p p p m m m e e m m
        mask_T      0 0 0 0 1 1 1 0 0 1 1
    """

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    images: tuple[ProcessedImage, ...]
    turns: tuple[Turn, ...]
    prompt_length: int
    messages: tuple[Mapping[str, Any], ...] = ()
    num_opening: int = 0
    num_given: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    kept_NK: NDArray[np.int32] | None = None
    routes_RLK: NDArray[np.uint8 | np.uint16] | None = None


#: The fields of a trajectory that are those of its first stream.
_OF_FIRST = ("ids_T", "mask_T", "logprobs_T", "images", "prompt_length", "messages", "kept_NK", "routes_RLK")


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """One finished episode: its turns, in the order in which they were played, and its token streams.

    Most episodes have one stream, whose fields (`TokenStream`) are the trajectory's own. Where the history was cut, or
    an agent holds several conversations, these are of the first one, and `later` has the others; `streams` has all.
    `turns` are those of all streams.

    The trajectory is sample `sample_index` of problem number `group`, after `attempt` earlier attempts at the whole
    group. The first `num_prompt_messages` of `messages` are the problem's. `rewards` has the value of each reward
    function, if there are any; `reward` is then their weighted sum. `verdicts` has the text of each judge among them.
    `metadata` is a plain copy of the sample's, `is_exact` if none of its values had to become text; reward functions
    get the sample's own.
    """

    sample_id: str
    sample_index: int
    seed: int
    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    images: tuple[ProcessedImage, ...]
    turns: tuple[Turn, ...]
    reward: float
    end_reason: EndReason
    prompt_length: int
    messages: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    timing: Timing = Timing()
    label: str | None = None
    num_prompt_messages: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    group: int = 0
    attempt: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)
    verdicts: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = True
    kept_NK: NDArray[np.int32] | None = None
    routes_RLK: NDArray[np.uint8 | np.uint16] | None = None
    later: tuple[TokenStream, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.sample_id!r}, {len(self.turns)} turns, {self.num_tokens} tokens, "
            f"reward {self.reward}, {self.end_reason.value}{f', {self.error!r:.200}' if self.error else ''})"
        )

    @classmethod
    def of_streams(cls, streams: Sequence[TokenStream], **facts: Any) -> Trajectory:
        """Return the trajectory with these streams; `facts` are its other fields, all turns among them."""
        first, *later = streams
        own = {name: getattr(first, name) for name in _OF_FIRST}
        return cls(**own, later=tuple(later), **facts)

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """All token streams, in the order in which they began."""
        num_opening = len(self.opening)
        own = {name: getattr(self, name) for name in _OF_FIRST}
        first = TokenStream(
            **own, turns=self._first_turns, num_opening=num_opening, num_given=num_opening, tools=self.tools
        )
        return (first, *self.later)

    @property
    def _first_turns(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.stream == 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams, each as long as it is."""
        return len(self.ids_T) + sum(len(stream.ids_T) for stream in self.later)

    @property
    def env_reward(self) -> float:
        """The environment's own reward: a part of `reward` where the run has reward functions."""
        return self.rewards.get(ENV_REWARD, self.reward)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The reward of each turn; the last turn's includes what the whole episode was given. They add up to `reward`.

        Example: turns that earned 0.5 and 0.25 in an episode of reward 1.75 have 0.5 and 1.25.
        """
        earned = [turn.reward for turn in self.turns]
        if not earned:
            return ()
        # A difference, so that the parts add up to `reward` in floating point too.
        return (*earned[:-1], self.reward - math.fsum(earned[:-1]))

    @property
    def final_text(self) -> str:
        """The text of the last turn; empty where there was none."""
        if self.turns:
            return self.turns[-1].text
        return ""

    @property
    def opening(self) -> Sequence[Mapping[str, Any]]:
        """The messages before the first turn: the problem, then the first observation."""
        observations = [turn.observations for turn in self._first_turns]
        return messages_before_turns(self.messages, self.num_prompt_messages, observations)

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """All that was said, in the order of play, also what left the history; of one stream, its messages."""
        if not self.later:
            return self.messages
        said = [*self.opening]
        for turn in self.turns:
            said += [{"role": "assistant", "content": turn.text}, *turn.observations]
        return tuple(said)

    @property
    def key(self) -> tuple[int, int, int]:
        """Group, sample and attempt, which identify the trajectory among all of one phase."""
        return self.group, self.sample_index, self.attempt

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the model sampled; without ids, those that its server has counted."""
        in_streams = int(self.mask_T.sum()) + sum(int(stream.mask_T.sum()) for stream in self.later)
        return in_streams + sum(turn.usage.get("completion_tokens", 0) for turn in self.turns)


@dataclass(frozen=True, eq=False)
class TrajectoryGroup:
    """The G trajectories of one problem.

    `discarded` holds those of earlier attempts with fewer than two valid ones. They are recorded and counted, but are
    in no statistics.
    """

    sample_id: str
    trajectories: tuple[Trajectory, ...]
    discarded: tuple[Trajectory, ...] = ()

    @property
    def environment(self) -> str:
        """The id of the problem's environment in a mixture, else empty; empty too where no episode has opened it."""
        played = (*self.trajectories, *self.discarded)
        return next((str(t.metadata[ENVIRONMENT]) for t in played if ENVIRONMENT in t.metadata), "")

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """The trajectories whose reward counts."""
        return tuple(t for t in self.trajectories if t.end_reason.is_valid)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """What broken episodes did to the group, for the counts of a step: "resampled", "dropped", both or none."""
        return ("resampled",) * bool(self.discarded) + ("dropped",) * self.is_dropped

    @property
    def is_dropped(self) -> bool:
        """Whether the group teaches nothing, because it has no two valid trajectories to compare."""
        # An advantage compares episodes of one problem; a single one has nothing to be compared with.
        return len(self.valid) < 2
