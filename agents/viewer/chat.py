"""An episode in a terminal as a chat: a record and what was said of it later in, lines of text out.

All text of models and environments is data: it is shown as it is, and characters that would steer the terminal are
written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from agents.recording import EpisodeRecord, OutcomeRecord, Recording, ScoreRecord, TurnRecord
from agents.viewer.columns import gap_cells, pictures, text_of
from agents.viewer.shown import counted, cut, one_line
from envs.errors import UserError
from envs.runner import last_line

MAX_LINE = 1000
_PNG = b"\x89PNG\r\n\x1a\n"
_HEAD, _ROLE, _NOTE, _BAD = "bold reverse", "bold cyan", "dim", "bold red"


@dataclass(frozen=True)
class Line:
    """Text to print. What models and environments say is indented, and can pass for no line of this program."""

    text: Text
    is_data: bool = False


@dataclass(frozen=True)
class Said:
    """What was recorded of an episode after it had ended; None where nothing was."""

    outcome: OutcomeRecord | None = None
    score: ScoreRecord | None = None


def chat_lines(recording: Recording, episode: EpisodeRecord, said: Said, full: bool) -> Iterator[Line]:
    """Yield an episode: its figures, its problem, its turns with what was answered, and how it ended."""
    yield Line(Text.assemble((f" {one_line(episode.id, 200)} ", _HEAD), "  ", figures(episode, said)))
    yield _note(f"problem {episode.sample_id}, label {episode.label}, seed {episode.seed}")
    for message in episode.messages[: episode.num_prompt_messages]:
        yield from message_lines(recording, message, full)
    for number, turn in enumerate(episode.turns, start=1):
        yield from _turn_lines(recording, number, turn, full)
    if episode.error:
        yield Line(Text("error", _BAD))
        yield Line(Text(cut(last_line(episode.error), full)), is_data=True)
    yield Line(Text(f"--- {episode.end_reason.value}, reward {episode.reward:g}", _ROLE))


def figures(episode: EpisodeRecord, said: Said) -> str:
    """Return the figures of an episode: "step 3, reward 0, advantage -0.707 (train), 2 turns, 54 of 238 tokens"."""
    parts = [f"step {episode.step}", f"reward {episode.reward:g}"]
    if said.outcome:
        advantage = "no advantage" if said.outcome.advantage is None else f"advantage {said.outcome.advantage:.3g}"
        parts.append(f"{advantage} ({one_line(said.outcome.fate, 20)})")
    parts.append(counted(len(episode.turns), "turn"))
    parts.append(f"{len(episode.logprobs)} of {len(episode.ids)} tokens")
    if said.score:
        gap = gap_cells(episode.logprobs, said.score.logprobs)
        if gap["kl"] is None:
            parts.append("a score of other tokens")
        else:
            parts.append(f"kl {gap['kl']:.1e}, largest gap {gap['max_gap']:.1e}")
    return ", ".join([*parts, f"{episode.total_s:.2f} s"])


def message_lines(recording: Recording, message: Mapping[str, Any], full: bool) -> Iterator[Line]:
    """Yield one message: who says it, its pictures, its text."""
    yield Line(Text(one_line(str(message.get("role", "?")), 40), _ROLE))
    for name in pictures([message]):
        yield _note(_picture(recording, name))
    if text := text_of(message):
        yield Line(Text(cut(text, full)), is_data=True)


def _turn_lines(recording: Recording, number: int, turn: TurnRecord, full: bool) -> Iterator[Line]:
    seconds = f"{turn.engine_s:.2f} s, then {turn.env_s:.2f} s of the environment"
    head = f"{counted(turn.end - turn.start, 'token')}, {one_line(turn.finish, 20)}, {seconds}"
    yield Line(Text.assemble((f"turn {number}", _ROLE), (f"  {head}", _NOTE)))
    yield Line(Text(cut(turn.text, full)), is_data=True)
    calls = turn.info.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, Mapping):
            outcome = str(call.get("outcome"))
            shown = f"{call.get('name') or 'a call'}({json.dumps(call.get('arguments'), ensure_ascii=False)})"
            found = one_line(outcome, 40), "green" if outcome == "ok" else _BAD
            yield Line(Text.assemble(("call ", _ROLE), found, "  ", one_line(shown, MAX_LINE)))
    rest = {key: value for key, value in turn.info.items() if key != "tool_calls"}
    if rest:
        yield _note(f"info {json.dumps(rest, ensure_ascii=False)}")
    for message in turn.observations:
        yield from message_lines(recording, message, full)


def _note(text: str) -> Line:
    return Line(Text(one_line(text, MAX_LINE), _NOTE))


def _picture(recording: Recording, name: str) -> str:
    """Return a picture's path and size, or what is wrong with it."""
    try:
        path = recording.picture_path(name)
    except UserError:
        return f"picture {name[:100]}, which is no name of one"
    return f"picture {path} {_size(path)}"


def _size(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(24)
    except OSError:
        return "missing"
    if len(head) < 24 or not head.startswith(_PNG):
        return "damaged"
    return f"{int.from_bytes(head[16:20], 'big')}x{int.from_bytes(head[20:24], 'big')}"
