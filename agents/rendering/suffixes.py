"""The tokens between two model turns, precomputed for messages of one shape.

A shape is the roles of the messages and the kinds of their parts. The template's own text is tokenised once per shape,
the texts of the messages are inserted each time. A template may change a text (trim it, write it as JSON, split it at
`</think>`), so each new shape is compared with full renderings of awkward texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agents.rendering.encoding import Encoder
from agents.rendering.template import MARK, ModelTemplate
from envs.types import Message

#: For each message its role and the kinds of its parts; ("str",) where its content is a string.
Shape = tuple[tuple[str, tuple[str, ...]], ...]

AWKWARD = (
    "plain",
    "",
    " a ",
    "\n",
    "\n\tb c \r\n\n",
    "\u00a0d\u3000",
    "\x1ce\u200b",
    "</think>",
    "<think>\nf\n</think>\n\ng",
    '<tool_call>{"name": "h"}</tool_call>',
    "<tool_response>i</tool_response>",
    '{"j": [1, "k\\n"], "l": null}',
    "[1, 2]",
    "\"m\" \\ 'n' & <o> {{ p }} {% q %}",
    "e\u0301 \ufb01 \U0001f642 한 \u2028",
    "1",
    "False",
)


def _as_it_is(text: str) -> str:
    return text


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# What templates do with a text: nothing, `trim` (Llama 3), or `tojson` inside quotes (Llama 3.1's tool answers).
_CHANGES: tuple[Callable[[str], str], ...] = (_as_it_is, str.strip, _in_json)


@dataclass(frozen=True)
class Suffix:
    """The suffix of one shape.

    `closed` and `opened` are the ids up to the first gap, for a turn whose closer the model has written and for one
    without it. A gap is (text before, text after, ids that follow); one without ids continues into the next.

    Example: a user's message in ChatML has `\\n<|im_start|>` as `closed`, `<|im_end|>\\n<|im_start|>` as `opened`, and
    one gap: `user\\n` before the text, nothing after it, then the ids of `<|im_end|>\\n<|im_start|>assistant\\n`.
    """

    closed: tuple[int, ...]
    opened: tuple[int, ...]
    gaps: tuple[tuple[str, str, tuple[int, ...]], ...]
    change: Callable[[str], str]

    def ids(self, encoder: Encoder, texts: Sequence[str], is_closed: bool) -> list[int]:
        """Return the ids with one text in each gap."""
        ids = list(self.closed if is_closed else self.opened)
        change = self.change
        # Texts with no added token between them are encoded together: a token may reach over both.
        waiting = ""
        for (before, after, following), text in zip(self.gaps, texts, strict=True):
            waiting += before + change(text) + after
            if following:
                ids += encoder.encode(waiting)
                ids += following
                waiting = ""
        if waiting:
            ids += encoder.encode(waiting)
        return ids


def exact_ids(encoder: Encoder, after_turn: str, closer: str, is_closed: bool) -> list[int]:
    """Tokenise the template's text after a turn, without the closer if the model wrote it."""
    if not is_closed:
        return encoder.encode(after_turn)
    return encoder.encode(after_turn[after_turn.index(closer) :])[1:]


def build_suffix(template: ModelTemplate, encoder: Encoder, closer: str, shape: Shape) -> Suffix | None:
    """Return the suffix of a shape; None where only a full rendering of each message is exact.

    Raises:
        UserError: what the template writes after a turn depends on earlier turns.
    """
    template.check_suffix_is_stable(_messages(shape, iter(lambda: MARK, None)))
    num_texts = sum(kind != "image" for _, kinds in shape for kind in kinds)
    pieces = template.after_turn(_messages(shape, iter(lambda: MARK, None))).split(MARK)
    if len(pieces) != num_texts + 1:
        return None
    for change in _CHANGES:
        suffix = _compile(encoder, closer, pieces, change)
        if suffix is not None and _is_exact(suffix, template, encoder, closer, shape, num_texts):
            return suffix
    return None


def _messages(shape: Shape, texts: Iterator[str]) -> list[Message]:
    def content(kinds: tuple[str, ...]) -> str | list[dict[str, str]]:
        if kinds == ("str",):
            return next(texts)
        return [{"type": "image"} if kind == "image" else {"type": kind, "text": next(texts)} for kind in kinds]

    return [{"role": role, "content": content(kinds)} for role, kinds in shape]


def _compile(encoder: Encoder, closer: str, pieces: Sequence[str], change: Callable[[str], str]) -> Suffix | None:
    """Tokenise each piece from its first added token to its last one, which no text can affect."""
    start = pieces[0].find(closer)
    lead, core, before = encoder.cut(pieces[0][max(start, 0) :])
    if start < 0 or lead or not core:
        return None
    if len(pieces) == 1:
        core = pieces[0][start:]
        before = ""
    gaps: list[tuple[str, str, tuple[int, ...]]] = []
    for piece in pieces[1:]:
        is_last = len(gaps) == len(pieces) - 2
        after, middle, rest = encoder.cut(piece)
        if is_last:  # no text can affect what follows the added tokens either
            middle = middle + rest if middle else ""
            rest = ""
        gaps.append((before, after, tuple(encoder.encode(middle))))
        before = rest
    opened = encoder.encode(pieces[0][:start] + core)
    # The core begins with the closer, one token, which the model has written itself there.
    closed = encoder.encode(core)[1:]
    return Suffix(tuple(closed), tuple(opened), tuple(gaps), change)


def _is_exact(
    suffix: Suffix, template: ModelTemplate, encoder: Encoder, closer: str, shape: Shape, num_texts: int
) -> bool:
    for first in range(len(AWKWARD) if num_texts else 1):
        texts = [AWKWARD[(first + place) % len(AWKWARD)] for place in range(num_texts)]
        try:
            expected = template.after_turn(_messages(shape, iter(texts)))
        except Exception:  # the template rejects such a text
            return False
        for is_closed in (True, False):
            if suffix.ids(encoder, texts, is_closed) != exact_ids(encoder, expected, closer, is_closed):
                return False
    return True
