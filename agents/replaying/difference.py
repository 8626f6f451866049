"""Compares the recorded result of an episode with its replayed result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from agents.cli.text import excerpt_pair
from agents.recording.schema import EpisodeRecord
from agents.replaying.episode_result import CONTINUES, EpisodeResult, recorded_result
from agents.replaying.stream_replayer import StreamResult, TokenTexts
from agents.rollout.stream import first_difference
from agents.types import EndReason, TokenStream
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

#: The key of the tool calls in the info of a turn.
CALLS = "tool_calls"
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


def differences(episode: EpisodeRecord, result: EpisodeResult, num_turns: int | None = None) -> tuple[Difference, ...]:
    """Return the differences, at most one of a kind for each turn.

    Example: `differences(episode, result)[0]` is `Difference("reward", None, "", 1.0, 0.0)`.
    """
    recorded = recorded_result(episode, num_turns, has_stream=isinstance(result, StreamResult))
    recorded, result = _without_fault(recorded, result.end), _without_fault(result, recorded.end)
    found = [*_whole(recorded, result)]
    for number, (old, new) in enumerate(zip(recorded.turns, result.turns, strict=False), 1):
        # A turn without an answer, because of an end which is compared by itself.
        if old is None or new is None:
            continue
        found += _values(TEXT, number, old.text, new.text)
        found += _values(OBSERVATION, number, old.observations, new.observations)
        found += _values(OUTCOME, number, old.info.get(CALLS), new.info.get(CALLS))
        found += _values(INFO, number, _without_calls(old.info), _without_calls(new.info))
        found += _values(DONE, number, old.done, new.done)
    if isinstance(result, StreamResult):
        found += _streams(episode, result, recorded.end == result.end)
    # The order of the table, so that the first difference is also its first row.
    return tuple(sorted(found, key=lambda each: KINDS.index(each.kind)))


def _without_fault(result: R, other_end: str | None) -> R:
    """Return a result without the info and the reward that a tool fault left, if the other one ends in another way."""
    # Its info and reward come from the fault, so they would only repeat that the ends differ.
    if result.end != EndReason.TOOL_FAULT.value or other_end == result.end:
        return result
    return replace(result, turns=(*result.turns[:-1], None), reward=None)


def _whole(old: EpisodeResult, new: EpisodeResult) -> Iterator[Difference]:
    # The recorded end is not compared, but a turn that had an answer and has none now differs.
    if old.end is None and new.end in _FAULTS and _stops_short(old, new):
        yield Difference(END, None, "", CONTINUES, _end(new))
    compared = [
        (TOOLS, None, old.tools, new.tools),
        (FIRST, 0, old.first, new.first),
        (REWARD, None, old.reward, new.reward),
    ]
    if old.end != new.end:
        compared.append((END, None, _end(old), _end(new)))
    else:
        compared.append((ERROR, None, _error(old), _error(new)))
    for kind, turn, one, other in compared:
        if one is not None and other is not None:
            yield from _values(kind, turn, one, other)


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


def _error(result: EpisodeResult) -> str | None:
    """Return the last line of an error, None if the end is unknown."""
    if result.end is None:
        return None
    return _ADDRESS.sub("0x", last_line(result.error))


def _values(kind: str, turn: int | None, old: Any, new: Any) -> Iterator[Difference]:
    """Yield the first difference of two JSON values; of messages, the first in texts and the first in images."""
    kinds = set[str]()
    for place, one, other in unequal(old, new):
        found = kind
        # An image is its hash here, so its pixels differ where this text does.
        if kind in (FIRST, OBSERVATION) and place.endswith(".image") and type(one) is type(other) is str:
            found = IMAGE
        if found not in kinds:
            yield Difference(found, turn, place, one, other)
        kinds.add(found)


def _without_calls(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key != CALLS}


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


def _streams(e: EpisodeRecord, result: StreamResult, ends_alike: bool) -> Iterator[Difference]:
    """Yield the first difference of the token streams; if the episodes end differently, as far as both go."""
    for number, (old, new) in enumerate(zip(e.streams, result.streams, strict=False)):
        found = list(_stream(e, number, old, new, ends_alike, result.token_texts))
        yield from found
        if any(difference.kind == TOKENS for difference in found):
            return  # what follows is shifted
    for number, (turn, new) in enumerate(zip(e.turns, result.spans, strict=False), 1):
        span = (turn.stream, turn.start, turn.end)
        if span != new:
            yield Difference(TURNS, number, "(stream, start, end)", list(span), list(new))
            break


def _stream(
    e: EpisodeRecord,
    number: int,
    old: TokenStream,
    new: TokenStream,
    ends_alike: bool,
    token_texts: TokenTexts,
) -> Iterator[Difference]:
    """Yield the first difference of one stream."""
    name = f"stream {number + 1} " if number else ""
    old_ids = old.ids_T.tolist()
    new_ids = new.ids_T.tolist()
    shortest = min(len(old_ids), len(new_ids))
    place = first_difference(old_ids, new_ids)
    if place < shortest or (ends_alike and len(old_ids) != len(new_ids)):
        texts = [token_texts(ids[place : place + MAX_TOKENS]) for ids in (old_ids, new_ids)]
        yield Difference(TOKENS, turn_at(e, place, number), f"{name}token {place}", *texts)
        return
    place = first_difference(old.mask_T.tolist(), new.mask_T.tolist())
    if place < shortest:
        masks = [int(stream.mask_T[place]) for stream in (old, new)]
        yield Difference(MASK, turn_at(e, place, number), f"{name}token {place}", *masks)
    if old.prompt_length != new.prompt_length and shortest:
        turn = turn_at(e, 0, number)
        yield Difference(TURNS, turn, f"{name}prompt_length", old.prompt_length, new.prompt_length)
    recorded, found = ([(i.digest, i.grid_thw, i.num_tokens) for i in stream.images] for stream in (old, new))
    # If one ends earlier, the images that it never saw are no difference.
    count = None if ends_alike else min(len(recorded), len(found))
    for difference in _values(IMAGES, None, recorded[:count], found[:count]):
        yield replace(difference, place=name + difference.place)


def turn_at(episode: EpisodeRecord, place: int, stream: int = 0) -> int:
    """Return the turn of a token; tokens that the model reads before a turn belong to that turn.

    0 is the prompt of the first stream; that of a later one belongs to the turn that begins the stream.
    """
    found = 0
    if stream == 0 and place < episode.prompt_length:
        return found
    for number, turn in enumerate(episode.turns, 1):
        if turn.stream == stream:
            found = number
            if place < turn.end:
                break
    return found
