"""Compares the recorded result of an episode with its replayed result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from agents.cli.text import excerpt_pair
from agents.recording.schema import EpisodeRecord
from agents.replaying.episode_result import CONTINUES, EpisodeResult, recorded_result
from agents.replaying.stream_replayer import StreamResult
from agents.rollout.stream import first_difference
from agents.types import EndReason
from envs.execution.runner import last_line

R = TypeVar("R", bound=EpisodeResult)

TOOLS = "tools"
FIRST = "first observation"
OBSERVATION = "observation"
IMAGE = "image"
OUTCOME = "tool outcome"
INFO = "info"
DONE = "done"
REWARD = "reward"
END = "end reason"
ERROR = "error"
TEXT = "text of a turn"
TOKENS = "tokens"
MASK = "mask"
TURNS = "place of a turn"
IMAGES = "images of the stream"

#: Every kind of difference, in the order in which a table shows them.
KINDS = (TOOLS, FIRST, OBSERVATION, IMAGE, OUTCOME, INFO, DONE, REWARD, END, ERROR, TEXT, TOKENS, MASK, TURNS, IMAGES)

#: Numbers with a smaller relative difference are equal, because processors round differently.
TOLERANCE = 1e-9
MAX_TOKENS = 8
#: Characters of a value that a report keeps.
MAX_KEPT = 10_000

_FAULTS = (EndReason.ENV_ERROR.value, EndReason.ENV_TIMEOUT.value, EndReason.TOOL_FAULT.value)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")


@dataclass(frozen=True)
class Difference:
    """One difference between record and replay, in turn `turn` (0: before the first turn, None: the whole episode).

    Example: `Difference("tool outcome", 2, "[0].outcome", "ok", "error")`.
    """

    kind: str
    turn: int | None
    place: str
    recorded: Any
    replayed: Any

    @property
    def where(self) -> str:
        """The turn and the place in it, for a report."""
        if self.turn is None:
            turn = ""
        elif self.turn:
            turn = f"turn {self.turn}"
        else:
            turn = "start"
        return " ".join(filter(None, (turn, self.place)))


def shortened(difference: Difference) -> Difference:
    """Return a difference to keep: its values have at most `MAX_KEPT` characters, around the first that differs."""
    old = difference.recorded
    new = difference.replayed
    place = difference.place[:MAX_KEPT]
    if max(len(json.dumps(value)) for value in (old, new)) > MAX_KEPT:
        old, new = excerpt_pair(old, new, MAX_KEPT)
    return replace(difference, place=place, recorded=old, replayed=new)


def differences(
    episode: EpisodeRecord,
    result: EpisodeResult,
    num_turns: int | None = None,
    token_texts: Callable[[Sequence[int]], list[Any]] = list,
) -> tuple[Difference, ...]:
    """Return the differences, at most one of a kind for each turn; `token_texts` adds texts to token ids.

    Example: `differences(episode, result)[0]` is `Difference("reward", None, "", 1.0, 0.0)`.
    """
    recorded = recorded_result(episode, num_turns, has_stream=isinstance(result, StreamResult))
    recorded, result = _without_fault(recorded, result.end), _without_fault(result, recorded.end)
    found = [*_whole(recorded, result)]
    for number, (old, new) in enumerate(zip(recorded.turns, result.turns, strict=False), 1):
        # A turn without an answer, because of an end which is compared by itself.
        if old is None or new is None:
            continue
        if old.text != new.text:
            found.append(Difference(TEXT, number, "", old.text, new.text))
        found += _messages(OBSERVATION, number, old.observations, new.observations)
        found += _info(number, old.info, new.info)
        if old.done != new.done:
            found.append(Difference(DONE, number, "", old.done, new.done))
    if isinstance(result, StreamResult):
        found += _stream(episode, result, recorded.end == result.end, token_texts)
    # The order of the table, so that the first difference is also its first row.
    return tuple(sorted(found, key=lambda each: KINDS.index(each.kind)))


def _without_fault(result: R, other_end: str | None) -> R:
    """Return a result without the info and the reward that a tool fault left, if the other one ends in another way."""
    # Its info and reward come from the fault, so they would only repeat that the ends differ.
    if result.end != EndReason.TOOL_FAULT.value or other_end == result.end:
        return result
    return replace(result, turns=(*result.turns[:-1], None), reward=None)


def _whole(old: EpisodeResult, new: EpisodeResult) -> Iterator[Difference]:
    if old.tools is not None and new.tools is not None and old.tools != new.tools:
        yield Difference(TOOLS, None, "", old.tools, new.tools)
    if old.first is not None and new.first is not None:
        yield from _messages(FIRST, 0, old.first, new.first)
    if old.reward is not None and new.reward is not None and not is_same(old.reward, new.reward):
        yield Difference(REWARD, None, "", old.reward, new.reward)
    # The recorded end is not compared, but a turn that had an answer and has none now differs.
    if old.end is None and new.end in _FAULTS and _stops_short(old, new):
        yield Difference(END, None, "", CONTINUES, _end(new))
    if old.end is None or new.end is None:
        return
    if old.end != new.end:
        yield Difference(END, None, "", _end(old), _end(new))
    elif _error(old) != _error(new):
        yield Difference(ERROR, None, "", _error(old), _error(new))


def _stops_short(old: EpisodeResult, new: EpisodeResult) -> bool:
    """Return whether the reset or a turn had an answer in the recording, but has none now."""
    # Longer on the side of the recording where the replay stopped early.
    pairs = zip_longest(old.turns, new.turns[: len(old.turns)])
    is_unopened = old.first is not None and new.first is None and not new.turns
    return is_unopened or any(one is not None and other is None for one, other in pairs)


def _end(result: EpisodeResult) -> str | None:
    if result.error:
        return f"{result.end}: {_error(result)}"
    return result.end


def _error(result: EpisodeResult) -> str:
    if result.error:
        return _ADDRESS.sub("0x", last_line(result.error))
    return ""


def _messages(
    kind: str, turn: int, old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """Yield the first difference in texts, and the first in images."""
    kinds = set[str]()
    for place, one, other in unequal(list(old), list(new)):
        # An image is its hash here, so its pixels differ where this text does.
        is_image = place.endswith(".image") and isinstance(one, str) and isinstance(other, str)
        found = IMAGE if is_image else kind
        if found not in kinds:
            yield Difference(found, turn, place, one, other)
        kinds.add(found)


def _info(turn: int, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the first difference in the tool calls, and the first in the rest of the info."""
    calls = "tool_calls"
    for kind, one, other in (
        (OUTCOME, old.get(calls), new.get(calls)),
        (INFO, {k: v for k, v in old.items() if k != calls}, {k: v for k, v in new.items() if k != calls}),
    ):
        for found in unequal(one, other):
            yield Difference(kind, turn, *found)
            break


def is_same(old: Any, new: Any) -> bool:
    """Return whether two JSON values are equal, apart from rounding and memory addresses.

    >>> is_same(0.1 + 0.2, 0.3), is_same(1, True), is_same("<f at 0x7f1234>", "<f at 0x7f5678>")
    (True, False, True)
    """
    # Before numbers: True equals 1 in Python, but not in JSON.
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    if isinstance(old, int | float) and isinstance(new, int | float):
        return old == new or (
            isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=TOLERANCE)
        )
    if isinstance(old, str) and isinstance(new, str):
        # Only the address that `repr` writes: other hexadecimal numbers mean something.
        return old == new or (" at 0x" in old and _ADDRESS.sub("0x", old) == _ADDRESS.sub("0x", new))
    return type(old) is type(new) and old == new


MISSING = "(nothing)"


def unequal(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two JSON values: place, old value, new value; `MISSING` replaces an absent value.

    >>> list(unequal({"a": [1, 2]}, {"a": [1, 3], "b": None}))
    [('a[1]', 2, 3), ('b', '(nothing)', None)]
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            inner = f"{place}.{key}" if place else str(key)
            yield from unequal(old.get(key, MISSING), new.get(key, MISSING), inner)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        for number, (one, other) in enumerate(zip_longest(old, new, fillvalue=MISSING)):
            yield from unequal(one, other, f"{place}[{number}]")
    elif not is_same(old, new):
        yield place, old, new


def _stream(
    e: EpisodeRecord, result: StreamResult, ends_alike: bool, token_texts: Callable[[Sequence[int]], list[Any]]
) -> Iterator[Difference]:
    """Yield the first difference of the token streams; if the episodes end differently, as far as both go."""
    shortest = min(len(e.ids), len(result.ids))
    place = first_difference(e.ids, result.ids)
    if place < shortest or (ends_alike and len(e.ids) != len(result.ids)):
        old = e.ids[place : place + MAX_TOKENS]
        new = result.ids[place : place + MAX_TOKENS]
        yield Difference(TOKENS, turn_at(e, place), f"token {place}", token_texts(old), token_texts(new))
        return  # the rest of the stream is shifted
    place = first_difference(e.mask, result.mask)
    if place < shortest:
        yield Difference(MASK, turn_at(e, place), f"token {place}", e.mask[place], result.mask[place])
    if e.prompt_length != result.prompt_length and result.ids and e.ids:
        yield Difference(TURNS, 0, "prompt_length", e.prompt_length, result.prompt_length)
    for number, (turn, span) in enumerate(zip(e.turns, result.spans, strict=False), 1):
        if (turn.start, turn.end) != span:
            yield Difference(TURNS, number, "", [turn.start, turn.end], list(span))
            break
    recorded = [(image.digest, image.grid, image.num_tokens) for image in e.images]
    # If one ends earlier, the images that it never saw are no difference.
    count = None if ends_alike else min(len(recorded), len(result.images))
    for where, one, other in unequal(recorded[:count], result.images[:count]):
        yield Difference(IMAGES, None, where, one, other)
        break


def turn_at(episode: EpisodeRecord, place: int) -> int:
    """Return the turn of a token; tokens that the model reads before a turn belong to that turn. 0 is the prompt."""
    if place < episode.prompt_length:
        return 0
    return next((number for number, turn in enumerate(episode.turns, 1) if place < turn.end), len(episode.turns))
