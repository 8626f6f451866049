"""Separates what a model thinks in a turn from what it says; tool calls and answers are read from what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ThinkingName = Literal["think", "thinking", "mistral"]
#: auto: as the model's chat template says; keep: environments get thinking and all; else the name of the tags.
ThinkingSetting = Literal["auto", "keep", ThinkingName]

#: The tags around a thought, by name.
TAGS: Mapping[ThinkingName, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "thinking": ("<thinking>", "</thinking>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True)
class Thinking:
    r"""The thinking channel of a model: the tags around a thought.

    With `is_opened`, each turn begins inside a thought, because the chat template writes the opening tag.

    >>> Thinking("<think>", "</think>").said("<think>Is it 7?</think>\n\nIt is 8.")
    'It is 8.'
    >>> Thinking("<think>", "</think>", is_opened=True).said("It may be \\boxed{7}, but")
    ''

    A thought ends at the first closing tag, or with the text. A closing tag outside of a thought makes all text before
    it a thought, as Qwen's templates do. A tag counts wherever it is, in code or a string too.
    """

    opening: str
    closing: str
    is_opened: bool = False

    def said(self, text: str) -> str:
        """Return a turn's text outside of its thoughts; a newline stands between two pieces. Linear time."""
        return "\n".join(text[start:end] for start, end in self._said(text) if start < end)

    def parts(self, text: str) -> list[tuple[bool, str]]:
        """Return a turn's text in parts, each with whether it is a thought; a thought includes its tags.

        >>> Thinking("<think>", "</think>").parts("Hm. <think>7?</think>8.")
        [(False, 'Hm. '), (True, '<think>7?</think>'), (False, '8.')]
        """
        parts = []
        done = 0
        for start, end in self._said(text):
            parts += [(True, text[done:start]), (False, text[start:end])]
            done = end
        return [part for part in (*parts, (True, text[done:])) if part[1]]

    def is_open_after(self, text: str) -> bool:
        """Return whether a text ends inside a thought that it opens."""
        return text.rfind(self.opening) > text.rfind(self.closing)

    def without_thought(self, text: str) -> str:
        r"""Return the turn of a model that says a text at once; a text with a closing tag has its thought already.

        >>> Thinking("<think>", "</think>", is_opened=True).without_thought("It is 8.")
        '\n</think>\n\nIt is 8.'
        """
        if self.is_opened and self.closing not in text:
            return f"\n{self.closing}\n\n{text}"
        return text

    def _said(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each piece outside of thoughts; newlines after a thought belong to it."""
        pieces: list[tuple[int, int]] = []
        # of the current piece; None inside a thought
        if self.is_opened:
            start = None
        else:
            start = 0
        for tag in re.finditer(f"({re.escape(self.opening)})|{re.escape(self.closing)}\n*", text):
            if tag[1] is None:
                if start is not None:
                    pieces.clear()
                start = tag.end()
            elif start is not None:
                pieces.append((start, tag.start()))
                start = None
        if start is None:
            return pieces
        return [*pieces, (start, len(text))]
