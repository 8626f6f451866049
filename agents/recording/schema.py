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

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from agents.recording.safe_files import memory_of
from agents.types import EndReason, TokenStream, Trajectory, Turn, messages_before_turns
from envs.spec import ENV_REWARD, EnvSpec
from envs.tool_calls.thinking import Thinking

SCHEMA_VERSION = 4
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


#: What a name, a whole number, a count, a weight version (-1: unknown) and a bit of the mask may be. Longer or larger
#: ones are no recorder's.
Name = Annotated[str, Field(max_length=1000)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Version = Annotated[int, Field(ge=-1, lt=2**31)]
Bit = Annotated[int, Field(ge=0, le=1)]


class _Record(BaseModel):
    # NaN breaks every mean that it enters, so no recorder writes one and no reader takes one.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="null")

    # Of the line, not of the record: what a reader may hold is decided by the file.
    _num_bytes: int = PrivateAttr(0)
    _memory: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """The length of the line that the record was read from; 0 where there is none."""
        return self._num_bytes

    @property
    def memory(self) -> int:
        """A bound of the memory that the record takes, in bytes; 0 where it was not read from a line."""
        return self._memory

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Return the record of a line. Raises `pydantic.ValidationError`."""
        record = cls.model_validate_json(line)
        record._num_bytes = len(line)
        record._memory = memory_of(line)
        return record


class WayRecord(_Record):
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


class Manifest(_Record):
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
    template_options: dict[str, Any] = {}
    ways: dict[str, WayRecord] = {}
    versions: dict[str, str] = {}

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


class TurnRecord(_Record):
    """One model turn, `[start, end)` of the stream, and the environment's answer.

    `finish` is why the model stopped: "stop", "length" or "abort"; the environment sees a turn only after "stop".
    `done` says that the environment ended the task. `versions` are runs of (weight version, tokens). The engine had
    `num_cached` of the tokens before the turn in its cache. `reward` is the turn's part of the episode's reward. Times
    are seconds. Where a server gave text and no token ids, the span is empty and `usage` has the server's own counts.
    """

    start: Count
    end: Count
    text: str
    finish: str
    done: bool
    versions: tuple[tuple[Version, Count], ...]
    num_cached: Count
    observations: tuple[dict[str, Any], ...]
    info: dict[str, Any]
    engine_s: float
    env_s: float
    reward: float = 0.0
    usage: dict[Name, Count] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that the model wrote."""
        return self.usage.get("completion_tokens", self.end - self.start)


class ImageRecord(_Record):
    """An image of the stream: the hash of its pixels, and its grid of patches (time, rows, columns)."""

    digest: Name
    grid: tuple[Count, Count, Count]
    num_tokens: Count

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """The grid, under the name that a `ProcessedImage` has for it."""
        return self.grid


class RoutesRecord(_Record):
    """The experts that R tokens took in each of so many layers.

    `experts` has `top_k` numbers for each token and layer, of `width` bytes each, little-endian.

    Example: `RoutesRecord(num_layers=48, top_k=8, width=1, experts=...)` has 384 bytes a token.
    """

    num_layers: Annotated[int, Field(ge=1, lt=2**16)]
    top_k: Annotated[int, Field(ge=1, lt=2**8)]
    width: Literal[1, 2]
    # As text, for the same reason as `kept`.
    experts: Base64Bytes

    @model_validator(mode="after")
    def _has_whole_rows(self) -> Self:
        row = self.num_layers * self.top_k * self.width
        if len(self.experts) % row:
            raise ValueError(f"{len(self.experts)} bytes are no whole rows of {row}")
        return self

    @classmethod
    def line(cls, routes_RLK: NDArray[np.uint8 | np.uint16]) -> dict[str, Any]:
        """Return the record of an array as it is written."""
        _, num_layers, top_k = routes_RLK.shape
        width = routes_RLK.itemsize
        experts = base64.b64encode(routes_RLK.astype(f"<u{width}").tobytes())
        return {"num_layers": num_layers, "top_k": top_k, "width": width, "experts": experts.decode()}

    @property
    def array(self) -> NDArray[np.uint8 | np.uint16]:
        """The experts, (R, layers, top_k)."""
        return np.frombuffer(self.experts, dtype=f"<u{self.width}").reshape(-1, self.num_layers, self.top_k)


class EpisodeRecord(_Record):
    """One finished episode.

    `phase` says what it was played for: "train"; "before", "eval-10" (after step 10) and "after", the evaluations of a
    run; "evaluate"; "play".
    `way` is one of `Manifest.ways`. `group` is the number of its problem, `sample_index` its number in the group, and
    `attempt` counts how often the group was played again. `step` is the training step during which it ended, 0 before
    the first. The first `num_prompt_messages` of `messages` are the problem; an image in a message is
    `{"type": "image", "image": "images/HASH.png"}`. `is_exact` is False where label or metadata held a value that JSON
    cannot hold; it is recorded as text. `tools` is a hash of the tools' schemas, empty where there are none. `logprobs`
    are the engine's, for the N tokens whose mask is 1; `kept` has the ids that each of these was drawn from, K little
    int32 for each, and is empty where that was the whole vocabulary. `routes` are the experts of the tokens before the
    last one of the last turn; None unless they were recorded. `began` is in seconds since 1970. `rewards` has the value
    of each reward function, if the run had any, and `verdicts` the text of each judge among them.
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
    rewards: dict[Name, float] = {}
    verdicts: dict[Name, str] = {}
    end_reason: EndReason
    error: str | None
    messages: tuple[dict[str, Any], ...]
    turns: tuple[TurnRecord, ...]
    tools: Name
    prompt_length: Count
    ids: tuple[Integer, ...]
    mask: tuple[Bit, ...]
    logprobs: tuple[float | None, ...]
    # As text: lists of numbers would take ten times the memory when they are read.
    kept: Base64Bytes = b""
    routes: RoutesRecord | None = None
    images: tuple[ImageRecord, ...]
    began: float
    total_s: float
    engine_s: float
    env_s: float
    check_s: float

    @model_validator(mode="after")
    def _has_whole_sets(self) -> Self:
        if self.kept and (not self.logprobs or len(self.kept) % (4 * len(self.logprobs))):
            raise ValueError(f"kept has {len(self.kept)} bytes for {len(self.logprobs)} tokens")
        return self

    @property
    def kept_NK(self) -> NDArray[np.int32] | None:
        """The ids that each token of the model was drawn from; None where that was the whole vocabulary."""
        if not self.kept:
            return None
        return np.frombuffer(self.kept, dtype="<i4").reshape(len(self.logprobs), -1)

    @property
    def routes_RLK(self) -> NDArray[np.uint8 | np.uint16] | None:
        """The experts of the first R tokens; None unless they were recorded."""
        if self.routes is None:
            return None
        return self.routes.array

    @property
    def env_reward(self) -> float:
        """The environment's own reward: a part of `reward` where the run had reward functions."""
        return self.rewards.get(ENV_REWARD, self.reward)

    @property
    def opening(self) -> Sequence[Mapping[str, Any]]:
        """The messages before the first turn: the problem, then the first observation."""
        observations = [turn.observations for turn in self.turns]
        return messages_before_turns(self.messages, self.num_prompt_messages, observations)

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """The token streams, to be checked: their images have no pixels."""
        num_opening = len(self.opening)
        return (
            TokenStream(
                ids_T=self.ids_T,
                mask_T=self.mask_T,
                logprobs_T=self.logprobs_T,
                images=self.images,  # type: ignore[arg-type]
                turns=tuple(Turn(**dict(turn)) for turn in self.turns),
                prompt_length=self.prompt_length,
                messages=self.messages,
                num_opening=num_opening,
                num_given=num_opening,
                kept_NK=self.kept_NK,
                routes_RLK=self.routes_RLK,
            ),
        )

    @property
    def num_tokens(self) -> int:
        """The length of the stream; without ids, what the server has counted in the last turn."""
        if self.ids or not self.turns:
            return len(self.ids)
        return sum(self.turns[-1].usage.values())

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def ids_T(self) -> NDArray[np.int64]:
        """The token ids as an array."""
        return np.array(self.ids, dtype=np.int64)

    @property
    def mask_T(self) -> NDArray[np.bool_]:
        """The mask as an array."""
        return np.frombuffer(bytearray(self.mask), dtype=np.bool_)

    @property
    def logprobs_T(self) -> NDArray[np.float32]:
        """The engine's log-prob of every token: 0 where the model did not write, NaN where the engine gave none."""
        mask_T = self.mask_T
        logprobs_T = np.zeros(len(mask_T), dtype=np.float32)
        with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, which breaks a rule
            logprobs_T[mask_T] = [np.nan if x is None else x for x in self.logprobs]
        return logprobs_T


class OutcomeRecord(_Record):
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


class ScoreRecord(_Record):
    """The trainer's own log-probs of the N tokens that the model wrote, before the step's first update."""

    id: Name
    step: Count
    logprobs: tuple[float | None, ...]


class TokenRecord(_Record):
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
