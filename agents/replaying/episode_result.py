"""The result of an episode in one form for both sides of a comparison: from its record, and from its replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from agents.recording.json_values import message_to_json, to_json
from agents.recording.schema import IMAGES, EpisodeRecord
from agents.types import EndReason
from envs.images import image_digest

#: Instead of an end reason: the environment wants another turn, but the recording has none.
CONTINUES = "continues"

#: Beginnings of the errors for a message that could not be rendered. The environment alone cannot repeat these.
_RENDER_ERRORS = ("the prompt cannot be rendered", "the observation cannot be rendered")


@dataclass(frozen=True)
class TurnResult:
    """The environment's answer to a turn, in recorded form."""

    text: str
    observations: tuple[Mapping[str, Any], ...]
    info: Mapping[str, Any]
    done: bool


@dataclass(frozen=True)
class EpisodeResult:
    """The result of an episode; None means unknown, and is not compared.

    `first` is the first observation; a turn without an answer is None in `turns`. `tools` is the hash of the tools'
    schemas, `end` an end reason or `CONTINUES`.

    Example: `EpisodeResult(None, (), None, None, "env_timeout", "reset took longer ...")` for a reset that timed out.
    """

    first: tuple[Mapping[str, Any], ...] | None
    turns: tuple[TurnResult | None, ...]
    tools: str | None
    reward: float | None
    end: str | None
    error: str | None


def as_recorded(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return messages in recorded form, with images named by the hash of their pixels."""
    return tuple(message_to_json(message, _name) for message in messages)


def _name(image: Image.Image) -> str:
    return f"{IMAGES}/{image_digest(image.convert('RGB'))}.png"


def answered_turn(
    text: str, observations: Sequence[Mapping[str, Any]], info: Mapping[str, Any], done: bool
) -> TurnResult:
    """Return the environment's answer to a turn, in recorded form."""
    return TurnResult(text, as_recorded(observations), to_json(dict(info)), done)


def drop_unanswered(turns: list[TurnResult | None]) -> None:
    """Make the last turn None if its answer is empty, because the episode ended before it came."""
    if turns and (last := turns[-1]) and not (last.observations or last.info or last.done):
        turns[-1] = None


def is_broken_answer(episode: EpisodeRecord) -> bool:
    """Return whether the engine's last answer was invalid, so that the environment never saw it."""
    last = episode.turns[-1] if episode.turns else None
    # The agent loop gives the version -1 to an answer that it could not read.
    is_marked = last is not None and last.versions == ((-1, last.end - last.start),)
    return episode.end_reason is EndReason.INVALID_STREAM and is_marked


def is_render_fault(episode: EpisodeRecord) -> bool:
    """Return whether an observation could not be rendered; only a replay with the model's template can show this."""
    return episode.end_reason is EndReason.ENV_ERROR and (episode.error or "").startswith(_RENDER_ERRORS)


def is_faulty(episode: EpisodeRecord) -> bool:
    """Return whether a fault of the environment ended the episode."""
    return episode.end_reason in (EndReason.ENV_ERROR, EndReason.ENV_TIMEOUT)


def was_never_open(episode: EpisodeRecord) -> bool:
    """Return whether the episode ended before its prompt was rendered."""
    return not episode.ids and not episode.turns


def asks_reward(episode: EpisodeRecord) -> bool:
    """Return whether the environment was asked for the reward, which may have raised."""
    if episode.end_reason is EndReason.ABORTED:  # by the engine; or cancelled, and then no reward is asked for
        return bool(episode.turns) and episode.turns[-1].finish == "abort"
    return not (is_broken_answer(episode) or is_render_fault(episode) or was_never_open(episode))


def recorded_result(episode: EpisodeRecord, num_turns: int | None = None, has_stream: bool = False) -> EpisodeResult:
    """Return the result in a record, up to a turn; `has_stream` includes what only the whole agent loop can repeat."""
    is_whole = num_turns is None or num_turns >= len(episode.turns)
    turns = [
        TurnResult(turn.text, turn.observations, turn.info, turn.done) if turn.finish == "stop" else None
        for turn in episode.turns[:num_turns]
    ]
    is_open = not was_never_open(episode)
    reason = episode.end_reason
    is_cut = not is_whole or reason is EndReason.ABORTED or is_broken_answer(episode)
    is_unscored = reason is EndReason.REWARD_ERROR  # by a function of the run, which no replay calls
    is_of_stream = reason is EndReason.INVALID_STREAM or is_render_fault(episode)
    if is_cut or is_unscored or (is_of_stream and not has_stream):
        end = None
    else:
        end = reason.value
    # These ends may come between a turn and its answer. An empty answer of any other end is one.
    may_be_unanswered = is_broken_answer(episode) or is_faulty(episode) or reason is EndReason.ABORTED
    if is_whole and may_be_unanswered:
        drop_unanswered(turns)
    # After a fault of the environment the recorded 0 is no reward of anybody.
    has_reward = is_whole and asks_reward(episode) and not is_faulty(episode)
    return EpisodeResult(
        first=tuple(episode.opening[episode.num_prompt_messages :]) if is_open else None,
        turns=tuple(turns),
        tools=episode.tools if is_open else None,
        reward=episode.env_reward if has_reward else None,
        end=end,
        error=episode.error if end is not None else None,
    )
