"""The format of a recording: the names of its files, and a frozen type for each kind of line.

A recording is a folder::

    recording.json        Manifest: the environment, the ways in which it was played, the versions of the software
    episodes.jsonl.gz     EpisodeRecord, written when an episode ends
    outcomes.jsonl.gz     OutcomeRecord, written when a step trains on an episode, or decides not to
    scores.jsonl.gz       ScoreRecord, written when a step has trained on an episode
    tokens.jsonl          TokenRecord, written when an id first occurs
    images/HASH.png       images, named by the hash of their pixels

Each line of a `.gz` file is a gzip member of its own. Lines of different files with the same `id` belong together; of
two lines with the same id in one file, the later one counts.

Legend: T tokens of one stream, N those of them that the model wrote, R those of known experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from pydantic import Field, ValidationError, field_validator

from agents.recording.stream_schema import (
    Bit,
    Count,
    Integer,
    Name,
    Record,
    StreamBase,
    StreamRecord,
    TurnRecord,
)
from agents.types import EndReason, TokenStream, Trajectory, Turn, messages_before_turns
from envs.spec import ENV_REWARD, EnvSpec
from envs.tool_calls.thinking import Thinking

SCHEMA_VERSION = 5
#: The schemas that are read: in 4 an episode has one stream, which 5 writes in the same way.
READ_VERSIONS = (4, SCHEMA_VERSION)
#: The most turns that an environment's entry may allow.
MAX_TURNS = 100_000

MANIFEST = "recording.json"
EPISODES = "episodes.jsonl.gz"
OUTCOMES = "outcomes.jsonl.gz"
SCORES = "scores.jsonl.gz"
TOKENS = "tokens.jsonl"
IMAGES = "images"

#: Values of `EpisodeRecord.phase`: training, an episode that a person played, an evaluation outside a run. The first
#: two are values of `way` too.
TRAIN = "train"
PLAY = "play"
EVALUATE = "evaluate"


class WayRecord(Record):
    """One way in which the environment was played: the limits of the agent loop, the sampling temperature, and the
    thinking that the environment did not get (None: it got each turn as it is).

    Example: `WayRecord(max_turns=1, use_tools=False, max_new_tokens=256, context_length=4096, temperature=0.0)`.
    """

    max_turns: Count
    use_tools: bool
    max_new_tokens: Count
    context_length: Count
    temperature: float
    thinking: Thinking | None = None


class Manifest(Record):
    """What all episodes of a recording have in common.

    `env` is the environment's entry in the registry, `registry` the file of the entry and `env_source` a hash of the
    environment's code. `model` is the folder or name that the run was given, `template` a hash of its chat template and
    `template_options` the options of every rendering. `ways` are named as in `EpisodeRecord.way`.
    """

    schema_version: int = SCHEMA_VERSION
    created: str
    env: EnvSpec
    registry: str = ""
    env_source: str = ""
    tool_format: str = "hermes"
    model: str = ""
    template: str = ""
    template_options: dict[str, Any] = Field(default={})
    ways: dict[str, WayRecord] = Field(default={})
    versions: dict[str, str] = Field(default={})

    @property
    def has_ids(self) -> bool:
        """Whether streams have token ids; of a server that gave text alone, no context length is known."""
        return all(way.context_length for way in self.ways.values())

    @field_validator("env")
    @classmethod
    def _ends(cls, env: EnvSpec) -> EnvSpec:
        if env.max_turns > MAX_TURNS:  # each has a metric
            raise ValueError(f"max_turns must be at most {MAX_TURNS}")
        return env


class EpisodeRecord(StreamBase):
    """One finished episode, with its first token stream.

    `phase` says what it was played for: "train"; "before", "eval-10" (after step 10) and "after", the evaluations of a
    run; "evaluate"; "play".
    `way` is one of `Manifest.ways`. `group` is the number of its problem, `sample_index` its number in the group, and
    `attempt` counts how often the group was played again. `step` is the training step during which it ended, 0 before
    the first. The first `num_prompt_messages` of `messages` are the problem; an image in a message is
    `{"type": "image", "image": "images/HASH.png"}`. `is_exact` is False where label or metadata held a value that JSON
    cannot hold; it is recorded as text. `tools` is a hash of the tools' schemas, empty where there are none. `began` is
    in seconds since 1970. `rewards` has the value of each reward function, if the run had any, and `verdicts` the text
    of each judge among them. `turns` are those of all streams, `messages` those of the first one. `later` are the
    streams that began later, and `later_messages` those of their messages that are in no stream before.
    """

    schema_version: int = SCHEMA_VERSION
    id: Name
    phase: Name
    way: Name
    step: Count
    group: Count
    sample_index: Count
    attempt: Count
    env: Name
    env_version: Name
    sample_id: str
    label: str | None
    metadata: dict[str, Any]
    is_exact: bool
    num_prompt_messages: Count
    seed: Integer
    reward: float
    rewards: dict[Name, float] = Field(default={})
    verdicts: dict[Name, str] = Field(default={})
    end_reason: EndReason
    error: str | None
    messages: tuple[dict[str, Any], ...]
    turns: tuple[TurnRecord, ...]
    tools: Name
    ids: tuple[Integer, ...]
    mask: tuple[Bit, ...]
    began: float
    total_s: float
    engine_s: float
    env_s: float
    check_s: float
    later: tuple[StreamRecord, ...] = ()
    later_messages: tuple[dict[str, Any], ...] = ()

    @property
    def env_reward(self) -> float:
        """The environment's own reward: a part of `reward` where the run had reward functions."""
        return self.rewards.get(ENV_REWARD, self.reward)

    @property
    def opening(self) -> Sequence[Mapping[str, Any]]:
        """The messages before the first turn: the problem, then the first observation."""
        observations = [turn.observations for turn in self.turns if turn.stream == 0]
        return messages_before_turns(self.messages, self.num_prompt_messages, observations)

    @property
    def said(self) -> tuple[dict[str, Any], ...]:
        """Every message of the episode once, at the place that `StreamRecord.said` counts."""
        return (*self.messages, *self.later_messages)

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """All token streams as they were recorded: their images have no pixels, and those in messages are names."""
        return self.streams_of([Turn(**dict(turn)) for turn in self.turns], self.said)

    def streams_of(self, turns: Sequence[Turn], said: Sequence[Mapping[str, Any]]) -> tuple[TokenStream, ...]:
        """Return all token streams, made of these turns and messages; the images have no pixels."""
        num_opening = len(self.opening)
        own = defaultdict[int, list[Turn]](list)
        for turn in turns:
            own[turn.stream].append(turn)
        messages = said[: len(self.messages)]
        ids_T = np.array(self.ids, dtype=np.int64)
        mask_T = np.frombuffer(bytearray(self.mask), dtype=np.bool_)
        first = self.token_stream(ids_T, mask_T, own[0], messages, num_opening, num_opening)
        return (first, *(stream.of_turns(own[number], said) for number, stream in enumerate(self.later, 1)))

    @property
    def all_logprobs(self) -> tuple[float | None, ...]:
        """The engine's log-probs of all model tokens, stream after stream, as in `ScoreRecord`."""
        return tuple(chain(self.logprobs, *(stream.logprobs for stream in self.later)))

    @property
    def num_tokens(self) -> int:
        """The tokens of all streams; without ids, what the server has counted in the last turn."""
        if self.ids or not self.turns:
            return len(self.ids) + sum(len(stream.ids) // 4 for stream in self.later)
        return sum(self.turns[-1].usage.values())

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn.num_tokens for turn in self.turns)


class OutcomeRecord(Record):
    """The outcome (`fate`) of an episode in a training step.

    "train": the step trained on its group; a broken episode in the group has no advantage. "discarded": its group was
    played again. "filtered", "surplus" and "aborted" are those of `agents.rollout.groups.StepRollout`. Where each
    turn has an advantage of its own, `turn_advantages` holds them, and `advantage` is their mean.
    """

    id: Name
    step: Count
    fate: Name
    advantage: float | None
    turn_advantages: tuple[float, ...] = ()


class ScoreRecord(Record):
    """The trainer's own log-probs of the N tokens that the model wrote, before the step's first update.

    Those of the first stream come first, then those of each later one.
    """

    id: Name
    step: Count
    logprobs: tuple[float | None, ...]


class TokenRecord(Record):
    """The text of a token id; `hex` are its bytes where they are not valid text, such as part of a character."""

    id: Count
    text: str
    hex: str = Field(default="", pattern="^([0-9a-f]{2})*$")

    @property
    def spelled(self) -> bytes:
        """The bytes of the token."""
        if self.hex:
            return bytes.fromhex(self.hex)
        return self.text.encode()


def read_token(line: bytes) -> TokenRecord | None:
    """Return the token of a line, None where it is damaged."""
    try:
        return TokenRecord.read(line)
    except ValidationError:
        return None


def episode_id(phase: str, way: str, trajectory: Trajectory) -> str:
    """Return the id of an episode, unique within a recording.

    Example: "train-12-3" is sample 3 of problem 12, "train-12-3-1" the same when its group was played again, and
    "before-with_tool-12-0" an episode of an evaluation.
    """
    # A run has one way of training, so "train-train-12-3" would say nothing more.
    kind = phase if way == phase else f"{phase}-{way}"
    if trajectory.attempt:
        again = f"-{trajectory.attempt}"
    else:
        again = ""
    return f"{kind}-{trajectory.group}-{trajectory.sample_index}{again}"


def image_names(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the images in recorded messages, in order.

    >>> image_names([{"role": "user", "content": [{"type": "image", "image": "images/00ff00ff.png"}]}])
    ['images/00ff00ff.png']
    """
    contents = [message.get("content") for message in messages]
    # An environment decides what a message holds; what has another form has no image.
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    return [part["image"] for part in parts if part.get("type") == "image" and isinstance(part.get("image"), str)]
