"""Prints an episode in a terminal as a chat.

Text of models and environments is data: it is printed as it is, with control characters written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from agents.cli.text import counted, one_line, shorten_middle
from agents.recording import EpisodeRecord, OutcomeRecord, Recording, ScoreRecord, TurnRecord
from agents.recording.safe_files import check_real_folder, open_regular
from agents.recording.schema import image_names
from agents.viewer.columns import gap_cells
from envs.checking.error_location import located_line
from envs.errors import UserError
from envs.tool_calls.thinking import Thinking
from envs.types import bare_text

MAX_LINE = 1000
_PNG = b"\x89PNG\r\n\x1a\n"
_HEAD = "bold reverse"
_ROLE = "bold cyan"
_NOTE = "dim"
_BAD = "bold red"


@dataclass(frozen=True)
class ChatLine:
    """Text to print. Text of models and environments is indented, so that it cannot look like a line of the program."""

    text: Text
    is_data: bool = False


def chat_lines(
    recording: Recording, episode: EpisodeRecord, outcome: OutcomeRecord | None, score: ScoreRecord | None, full: bool
) -> Iterator[ChatLine]:
    """Yield an episode: its figures, its problem, the first observation, its turns with their answers, and its end.

    `outcome` and `score` are None as long as the trainer has not recorded them.
    """
    head = figures(episode, outcome, score)
    yield ChatLine(Text.assemble((f" {one_line(episode.id, 200)} ", _HEAD), "  ", head))
    yield _note(f"problem {episode.sample_id}, label {episode.label}, seed {episode.seed}")
    for message in episode.opening:
        yield from message_lines(recording, message, full)
    way = recording.manifest.ways.get(episode.way)
    so_far = 0.0
    for number, turn in enumerate(episode.turns, start=1):
        so_far += turn.reward
        yield from _turn_lines(recording, number, turn, way.thinking if way else None, full)
        if turn.reward or so_far:
            yield ChatLine(Text.assemble(("reward ", _ROLE), f"{turn.reward:g}, {so_far:g} so far"))
    if episode.error:
        yield ChatLine(Text("error", _BAD))
        yield ChatLine(Text(shorten_middle(located_line(episode.error), full)), is_data=True)
    yield ChatLine(Text(f"--- {episode.end_reason.value}, reward {episode.reward:g}", _ROLE))


def figures(episode: EpisodeRecord, outcome: OutcomeRecord | None, score: ScoreRecord | None) -> str:
    """Return the figures of an episode: "step 3, reward 0, advantage -0.707 (train), 2 turns, 54 of 238 tokens"."""
    values = ", ".join(f"{one_line(name, 40)} {value:g}" for name, value in episode.rewards.items())
    parts = [f"step {episode.step}", f"reward {episode.reward:g}{f' ({values})' if values else ''}"]
    if outcome:
        if outcome.advantage is None:
            advantage = "no advantage"
        else:
            advantage = f"advantage {outcome.advantage:.3g}"
        parts.append(f"{advantage} ({one_line(outcome.fate, 20)})")
    parts.append(counted(len(episode.turns), "turn"))
    parts.append(f"{episode.num_model_tokens} of {episode.num_tokens} tokens")
    if score:
        gap = gap_cells(episode.logprobs, score.logprobs)
        if gap["kl"] is None:
            parts.append("a score of other tokens")
        else:
            parts.append(f"kl {gap['kl']:.1e}, largest gap {gap['max_gap']:.1e}")
    return ", ".join([*parts, f"{episode.total_s:.2f} s"])


def message_lines(recording: Recording, message: Mapping[str, Any], full: bool) -> Iterator[ChatLine]:
    """Yield one message: its role, its images, its text."""
    yield ChatLine(Text(one_line(str(message.get("role", "?")), 40), _ROLE))
    for name in image_names([message]):
        yield _note(_image(recording, name))
    if text := bare_text(message):
        yield ChatLine(Text(shorten_middle(text, full)), is_data=True)


def _turn_lines(
    recording: Recording, number: int, turn: TurnRecord, thinking: Thinking | None, full: bool
) -> Iterator[ChatLine]:
    seconds = f"{turn.engine_s:.2f} s, then {turn.env_s:.2f} s of the environment"
    head = f"{counted(turn.num_tokens, 'token')}, {one_line(turn.finish, 20)}, {seconds}"
    yield ChatLine(Text.assemble((f"turn {number}", _ROLE), (f"  {head}", _NOTE)))
    for is_thought, text in thinking.parts(turn.text) if thinking else [(False, turn.text)]:
        if is_thought:
            yield _note(f"thinking, {counted(len(text), 'character')}")
        yield ChatLine(Text(shorten_middle(text, full), _NOTE if is_thought else ""), is_data=True)
    calls = turn.info.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, Mapping):
            outcome = str(call.get("outcome"))
            shown = f"{call.get('name') or 'a call'}({json.dumps(call.get('arguments'), ensure_ascii=False)})"
            label = one_line(outcome, 40), "green" if outcome == "ok" else _BAD
            yield ChatLine(Text.assemble(("call ", _ROLE), label, "  ", one_line(shown, MAX_LINE)))
    rest = {key: value for key, value in turn.info.items() if key != "tool_calls"}
    if rest:
        yield _note(f"info {json.dumps(rest, ensure_ascii=False)}")
    for message in turn.observations:
        yield from message_lines(recording, message, full)


def _note(text: str) -> ChatLine:
    return ChatLine(Text(one_line(text, MAX_LINE), _NOTE))


def _image(recording: Recording, name: str) -> str:
    """Return an image's path and size, or why it cannot be shown."""
    try:
        path = recording.image_path(name)
    except UserError:
        return f"image {name[:100]}: not a valid image name"
    return f"image {path} {_size(path)}"


def _size(path: Path) -> str:
    try:
        check_real_folder(path.parent)
        with open_regular(path) as file:
            head = file.read(24)
    except UserError as error:
        return f"is not shown: it {error.rule}, got {error.got}"
    except OSError:
        return "missing"
    if len(head) < 24 or not head.startswith(_PNG):
        return "damaged"
    return f"{int.from_bytes(head[16:20], 'big')}x{int.from_bytes(head[20:24], 'big')}"
