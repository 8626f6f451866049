"""How far a reader of a run has come: text that the page is given with an answer, and gives back when it asks again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Cursor:
    """How much of a source a reader has: of which state, and how many of its episodes, changes, tokens and metrics.

    Example: `str(Cursor(1, 64, 128, 300, 2))` is "1.64.128.300.2".
    """

    state: int
    episodes: int
    changes: int
    tokens: int
    metrics: int

    def is_behind(self, other: Cursor) -> bool:
        """Return whether a reader here can be told what it has not got of a source that is there."""
        counts = zip(dataclasses.astuple(self)[1:], dataclasses.astuple(other)[1:], strict=True)
        return self.state == other.state and all(mine <= others for mine, others in counts)

    def __str__(self) -> str:
        return f"{self.state}.{self.episodes}.{self.changes}.{self.tokens}.{self.metrics}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor that a text stands for; that of a reader who has nothing where it is none."""
        parts = text.split(".")
        if len(parts) == 5 and all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
            return cls(*map(int, parts))
        return cls(0, 0, 0, 0, 0)
