"""What an episode gave, as far as it can be compared: a record, or what was played again, in one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from agents.recording.plain import plain, plain_message
from agents.recording.schema import IMAGES, EpisodeRecord, TurnRecord
from agents.types import EndReason, Trajectory
from envs.images import image_digest
from envs.types import Message

#: In place of an end reason: the environment wants another turn, and the recording has none.
GOES_ON = "goes on"

#: How an error begins when a message could not be rendered: nothing that an environment alone repeats.
_RENDERING = ("the prompt cannot be rendered", "the observation cannot be rendered")


@dataclass(frozen=True)
class PlayedTurn:
    """What the environment answered to a turn, in the form in which it is recorded."""

    text: str
    observations: tuple[Mapping[str, Any], ...]
    info: Mapping[str, Any]
    done: bool


@dataclass(frozen=True)
class Played:
    """What an episode gave; None stands for what nobody knows, and is compared with nothing.

    `first` is the first observation; in `turns`, None is a turn that the environment did not answer. `tools` is the
    hash of the tools' schemas, `end` an end reason or `GOES_ON`.

    Example: an episode whose reset timed out is `Played(None, (), None, None, "env_timeout", "reset took longer ...")`.
    """

    first: tuple[Mapping[str, Any], ...] | None
    turns: tuple[PlayedTurn | None, ...]
    tools: str | None
    reward: float | None
    end: str | None
    error: str | None


def as_recorded(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return messages in the form in which they are recorded, pictures by the hash of their pixels."""
    return tuple(plain_message(message, _name) for message in messages)


def _name(image: Image.Image) -> str:
    return f"{IMAGES}/{image_digest(image.convert('RGB'))}.png"


def plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's info in the form in which it is recorded."""
    return plain(dict(info))


def is_broken_answer(episode: EpisodeRecord) -> bool:
    """Return whether the engine's last answer broke a rule, so that the environment never saw it."""
    last = episode.turns[-1] if episode.turns else None
    is_marked = last is not None and last.versions == ((-1, last.end - last.start),)
    return episode.end_reason is EndReason.INVALID_STREAM and is_marked


def is_render_fault(episode: EpisodeRecord) -> bool:
    """Return whether an observation could not be rendered, which is found out with the model's template alone."""
    return episode.end_reason is EndReason.ENV_ERROR and (episode.error or "").startswith(_RENDERING)


def is_faulty(episode: EpisodeRecord) -> bool:
    """Return whether the environment's fault ended an episode."""
    return episode.end_reason in (EndReason.ENV_ERROR, EndReason.ENV_TIMEOUT)


def was_never_open(episode: EpisodeRecord) -> bool:
    """Return whether an episode ended before its prompt was read."""
    return not episode.ids and not episode.turns


def asks_reward(episode: EpisodeRecord) -> bool:
    """Return whether the environment was asked for the reward, as far as a record tells: a fault may have come then."""
    if episode.end_reason is EndReason.ABORTED:  # aborted by the engine, or by somebody who waited no longer
        return bool(episode.turns) and episode.turns[-1].finish == "abort"
    return not (is_broken_answer(episode) or is_render_fault(episode) or was_never_open(episode))


def first_observation(e: EpisodeRecord | Trajectory, num_tokens: int) -> Sequence[Mapping[str, Any]]:
    """Return the messages between the problem and the first turn; `num_tokens` is the length of the stream."""
    num_shown = [1 + (len(turn.observations) or 1) for turn in e.turns]
    if e.turns and e.turns[-1].end == num_tokens:
        num_shown[-1] = 1  # nothing was said after the last turn
    return e.messages[e.num_prompt_messages : len(e.messages) - sum(num_shown)]


def recorded_play(episode: EpisodeRecord, num_turns: int | None = None, has_stream: bool = False) -> Played:
    """Return what a record says, up to a turn; with `has_stream`, also what only the whole agent loop repeats."""
    is_whole = num_turns is None or num_turns >= len(episode.turns)
    turns = [_recorded_turn(turn) for turn in episode.turns[:num_turns]]
    is_open = not was_never_open(episode)
    reason = episode.end_reason
    is_cut = not is_whole or reason is EndReason.ABORTED or is_broken_answer(episode)
    is_of_stream = reason is EndReason.INVALID_STREAM or is_render_fault(episode)
    end = None if is_cut or (is_of_stream and not has_stream) else reason.value
    is_unsure = is_broken_answer(episode) or is_faulty(episode) or reason is EndReason.ABORTED
    if is_whole and is_unsure and turns and not _is_answered(episode.turns[-1]):
        turns[-1] = None
    has_reward = is_whole and asks_reward(episode) and not is_faulty(episode)
    return Played(
        first=tuple(first_observation(episode, len(episode.ids))) if is_open else None,
        turns=tuple(turns),
        tools=episode.tools if is_open else None,
        reward=episode.reward if has_reward else None,
        end=end,
        error=episode.error if end is not None else None,
    )


def _recorded_turn(turn: TurnRecord) -> PlayedTurn | None:
    if turn.finish != "stop":
        return None
    return PlayedTurn(turn.text, turn.observations, turn.info, turn.done)


def _is_answered(turn: TurnRecord) -> bool:
    return bool(turn.observations or turn.info or turn.done)
