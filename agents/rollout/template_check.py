"""Compares a finished stream with the model's own chat template and returns the first difference.

At every turn boundary the stream must be what the template makes of all messages so far; nothing of `Renderer.suffix`
is used here. The model's own turns are the sampled ids, verbatim. The tokens between two turns are compared with the
template's text behind the first turn, tokenised.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import pairwise

from agents.rendering.renderer import Renderer
from agents.rendering.suffixes import exact_ids
from agents.rollout.stream import first_difference
from agents.types import ProcessedImage, TokenStream, Turn

# Random, so that no text can hold it on purpose.
_MARK = f"\u2063{secrets.randbits(64)}\u2063"
_MAX_SHOWN = 6


@dataclass(frozen=True)
class _Boundary:
    """What the model read before a turn: tokens `start` to `end`, and the number of messages up to there."""

    where: str
    start: int
    end: int
    num_messages: int
    turn_before: Turn | None


def template_mismatch(stream: TokenStream, renderer: Renderer) -> str | None:
    """Return where the stream differs from the template's rendering of its messages; None where it does not.

    A template that fails on the conversation is a mismatch too.

    Example::

        template_mismatch(trajectory.streams[0], renderer)
        # "before turn 2: the stream has [151644 '<|im_start|>'] at 310, the template writes [198 '\\n']"
    """
    if not len(stream.ids_T):  # the episode ended before its prompt was read
        return None
    try:
        return _first_mismatch(stream, renderer)
    except Exception as error:  # a template raises what it likes
        return f"the whole conversation cannot be rendered: {type(error).__name__}: {error}"


def _first_mismatch(t: TokenStream, renderer: Renderer) -> str | None:
    tools = t.tools
    ids: list[int] = t.ids_T.tolist()
    boundaries = _boundaries(t)
    said = [dict(message) for message in t.messages]
    first = boundaries[0]
    num_given = t.num_given
    images = list(t.images)
    text = renderer.text(said[: t.num_opening], tools, num_given)
    expected = _expanded(renderer, renderer.encoder.encode(text), images)
    # The prompt by itself: later differences would only follow from it.
    if ids[: first.end] != expected:
        return _difference(first, renderer, ids[: first.end], expected)
    for before, b in pairwise(boundaries):
        turn = b.turn_before
        place = before.num_messages
        messages = said[: b.num_messages]
        if turn is None or messages[place] != {"role": "assistant", "content": turn.text}:
            return f"{b.where}: message {place + 1} is not the text of the turn before"
        # Its own text could stand twice; the mark says where the template goes on.
        messages[place] = {"role": "assistant", "content": _MARK}
        text = renderer.text(messages, tools, num_given).partition(_MARK)[2]
        # A turn that was cut off by a limit lacks the closing token.
        is_closed = ids[b.start - 1] == renderer.closer_id
        expected = _expanded(renderer, exact_ids(renderer.encoder, text, renderer.closer, is_closed), images)
        if ids[b.start : b.end] != expected:
            return _difference(b, renderer, ids[b.start : b.end], expected)
    return None


def _boundaries(t: TokenStream) -> list[_Boundary]:
    """Return every place where the model began to write a turn, or would have begun."""
    num_shown = [len(turn.observations) or 1 for turn in t.turns]  # no observation is shown as an empty message
    # The stream ends with the last turn: the model never read the answer to it.
    if t.turns and t.turns[-1].end == len(t.ids_T):
        num_shown[-1] = 0
    num_messages = t.num_opening
    ends = [*(turn.start for turn in t.turns), len(t.ids_T)]
    result = [_Boundary("before turn 1", 0, ends[0], num_messages, None)]
    for number, (turn, shown) in enumerate(zip(t.turns, num_shown, strict=True), 1):
        if shown:
            num_messages += 1 + shown
            where = f"before turn {number + 1}"
            result.append(_Boundary(where, turn.end, ends[number], num_messages, turn))
    return result


def _expanded(renderer: Renderer, ids: list[int], images: list[ProcessedImage]) -> list[int]:
    """Expand the placeholders and take their images off the list; where too few images are left, change nothing."""
    if renderer.image_token_id is not None:
        num_images = ids.count(renderer.image_token_id)
    else:
        num_images = 0
    if not 0 < num_images <= len(images):
        return ids
    # Each image is shown once, in order.
    shown, images[:num_images] = images[:num_images], []
    return list(renderer.expand(ids, shown))


def _difference(b: _Boundary, renderer: Renderer, found: list[int], expected: list[int]) -> str:
    place = first_difference(found, expected)

    def shown(ids: list[int]) -> str:
        each = [f"{index} {renderer.encoder.decode([index])!r}" for index in ids[place : place + _MAX_SHOWN]]
        return f"[{', '.join(each)}{', ...' if len(ids) > place + _MAX_SHOWN else ''}]"

    return f"{b.where}: the stream has {shown(found)} at {b.start + place}, the template writes {shown(expected)}"
