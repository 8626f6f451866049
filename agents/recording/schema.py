"""What a recording holds: the names of its files, and a frozen type for each kind of line.

A recording is a folder::

    recording.json        Manifest: the environment, the ways in which it was played, who wrote it
    episodes.jsonl.gz     EpisodeRecord, written when an episode ends
    outcomes.jsonl.gz     OutcomeRecord, written when a step has taken or left an episode
    scores.jsonl.gz       ScoreRecord, written when a step has trained on an episode
    tokens.jsonl          TokenRecord, written when an id is first seen
    images/HASH.png       pictures, named by the hash of their pixels

The lines of the first three are gzip members of their own. Lines of different files belong together by their `id`; of
two lines of one file with one id, the later one counts.

Legend: T tokens of one stream, N those of them that the model wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from agents.types import EndReason, Trajectory
from envs.spec import EnvSpec

SCHEMA_VERSION = 4

MANIFEST = "recording.json"
EPISODES = "episodes.jsonl.gz"
OUTCOMES = "outcomes.jsonl.gz"
SCORES = "scores.jsonl.gz"
TOKENS = "tokens.jsonl"
IMAGES = "images"

#: Phase and way of an episode that was played to be trained on, of one that a person has played, and the phase of an
#: evaluation by itself.
TRAIN, PLAY, EVALUATE = "train", "play", "evaluate"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class WayRecord(_Record):
    """One way in which the environment was played: the limits of the agent loop, and how tokens were drawn.

    Example: `WayRecord(max_turns=1, use_tools=False, max_new_tokens=256, context_length=4096, temperature=0.0)`.
    """

    max_turns: int
    use_tools: bool
    max_new_tokens: int
    context_length: int
    temperature: float


class Manifest(_Record):
    """What all episodes of a recording have in common.

    `env` is the environment's entry in the registry, `registry` the file that it stands in and `env_source` a hash of
    its code. `model` is the folder or name that the run was given, `template` a hash of its chat template and
    `template_options` what every rendering was given. `ways` are named as in `EpisodeRecord.way`. `converted_from` is
    the other framework whose files these episodes come from: observations, infos, seeds and times are not known then,
    and are empty or 0.
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
    converted_from: str = ""


class TurnRecord(_Record):
    """One model turn, `[start, end)` of the stream, and what the environment answered.

    `finish` is why the model stopped: "stop", "length" or "abort"; only after "stop" was the environment asked. `done`
    is the environment's word that the task has ended. `versions` are runs of (weight version, tokens); `num_cached` of
    the tokens before the turn the engine had kept. Times are seconds.
    """

    start: int
    end: int
    text: str
    finish: str
    done: bool
    versions: tuple[tuple[int, int], ...]
    num_cached: int
    observations: tuple[dict[str, Any], ...]
    info: dict[str, Any]
    engine_s: float
    env_s: float


class ImageRecord(_Record):
    """A picture of the stream, in order: the hash of its pixels, and its grid of patches (time, rows, columns)."""

    digest: str
    grid: tuple[int, int, int]
    num_tokens: int


class EpisodeRecord(_Record):
    """One finished episode.

    `phase` says what it was played for: "train"; "before" and "after", the evaluations of a run; "evaluate"; "play".
    `way` is one of `Manifest.ways`. `group` is the number of its problem, `sample_index` that of the sample in its
    group, and `attempt` counts how often the group was played again. `step` is the training step during which it
    ended, 0 before the first. The first `num_prompt_messages` of `messages` are the problem; pictures stand in them as
    `{"type": "image", "image": "images/HASH.png"}`. `is_exact` is False where label or metadata held something that
    JSON does not know, and is kept as text. `tools` is a hash of the tools' schemas, empty where there are none.
    `logprobs` are the engine's, of the N tokens whose mask is 1. `began` is in seconds since 1970.
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    phase: str
    way: str
    step: int
    group: int
    sample_index: int
    attempt: int
    env: str
    env_version: str
    sample_id: str
    label: str | None
    metadata: dict[str, Any]
    is_exact: bool
    num_prompt_messages: int
    seed: int
    reward: float
    end_reason: EndReason
    error: str | None
    messages: tuple[dict[str, Any], ...]
    turns: tuple[TurnRecord, ...]
    tools: str
    prompt_length: int
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    images: tuple[ImageRecord, ...]
    began: float
    total_s: float
    engine_s: float
    env_s: float
    check_s: float

    @property
    def logprobs_T(self) -> NDArray[np.float32]:
        """The engine's log-prob of every token, 0 where the model did not write; NaN where it gave none."""
        mask_T = np.asarray(self.mask, dtype=np.bool_)
        logprobs_T = np.zeros(len(mask_T), dtype=np.float32)
        logprobs_T[mask_T] = [np.nan if x is None else x for x in self.logprobs]
        return logprobs_T


class OutcomeRecord(_Record):
    """What became of an episode: `step` took it ("train") with an advantage, or left it and says why in `fate`.

    "train" without an advantage is a broken episode in a group that was taken. The other fates are "discarded" (its
    group was played again), "filtered", "surplus" and "aborted", as in `agents.rollout.StepRollout`.
    """

    id: str
    step: int
    fate: str
    advantage: float | None


class ScoreRecord(_Record):
    """The trainer's own log-probs of the N tokens that the model wrote, before the step's first update."""

    id: str
    step: int
    logprobs: tuple[float | None, ...]


class TokenRecord(_Record):
    """The text of a token id; `hex` are its bytes where these are no text by themselves, as part of a character."""

    id: int
    text: str
    hex: str = Field(default="")


def episode_id(phase: str, way: str, trajectory: Trajectory) -> str:
    """Return the name of an episode, unique within a recording.

    Example: "train-12-3" is sample 3 of problem 12, "train-12-3-1" the same when its group was played again, and
    "before-with_tool-12-0" one of an evaluation.
    """
    kind = phase if way == phase else f"{phase}-{way}"
    again = f"-{trajectory.attempt}" if trajectory.attempt else ""
    return f"{kind}-{trajectory.group}-{trajectory.sample_index}{again}"
