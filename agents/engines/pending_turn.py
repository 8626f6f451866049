"""A model turn while an engine writes it: the tokens so far, and which weights wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agents.types import Completion, GenerateRequest, add_run


@dataclass(eq=False)
class PendingTurn:
    """A turn while it is written, in one go or, after pauses, in several.

    `num_misread` is how many more ids the engine counts in the prompt than the request has; the agent loop checks it.
    It compares the first `num_again` of the routes with those that the stream has.

    Example: paused for new weights after two tokens, and stopped by stop id 2 after two more::

        ids [31, 32]         versions [(0, 2)]              finish ""
        ids [31, 32, 33, 2]  versions [(0, 2), (1, 2)]      finish "stop"
    """

    request: GenerateRequest
    ids: list[int] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    kept: list[NDArray[np.int32]] = field(default_factory=list, init=False)
    routes: list[NDArray[np.uint8 | np.uint16]] = field(default_factory=list, init=False)
    versions: list[tuple[int, int]] = field(default_factory=list, init=False)
    finish: Literal["", "stop", "length"] = field(default="", init=False)
    num_cached: int = field(default=0, init=False)
    num_misread: int = field(default=0, init=False)
    num_again: int = field(default=0, init=False)

    @property
    def num_left(self) -> int:
        """Tokens left of the budget."""
        return self.request.max_new_tokens - len(self.ids)

    @property
    def num_routed(self) -> int:
        """How many of the stream's first tokens have known experts, before the turn and in it."""
        return (self.request.num_routed or 0) + sum(map(len, self.routes)) - self.num_again

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to write."""
        return bool(self.finish) or self.num_left <= 0

    def note_cached(self, count: int) -> None:
        """Store how many prompt tokens are cached, unless some of the turn is written already."""
        if not self.ids:
            self.num_cached = count

    def append(self, ids: Sequence[int], logprobs: Sequence[float], kept_NK: NDArray[np.int32] | None = None) -> None:
        """Append sampled ids; `kept_NK` are the ids that they were drawn from."""
        self.ids += ids
        self.logprobs += logprobs
        if kept_NK is not None:
            self.kept.append(kept_NK)

    def stamp(self, version: int) -> None:
        """Give the ids appended since the last stamp this version of the weights."""
        num_stamped = sum(count for _, count in self.versions)
        add_run(self.versions, version, len(self.ids) - num_stamped)

    def completion(self) -> Completion:
        """Return the turn; one that is not whole is given up, and ends as "abort"."""
        # All tokens that were asked for are there: then it ended by length, whatever the engine said.
        rest = "length" if self.is_whole else "abort"
        kept_NK = np.concatenate(self.kept) if self.kept else None
        routes_RLK = np.concatenate(self.routes) if self.routes else None
        return Completion(
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish=self.finish or rest,
            prompt_length=len(self.request.ids) + self.num_misread,
            versions=tuple(self.versions),
            num_cached=self.num_cached,
            kept_NK=kept_NK,
            routes_RLK=routes_RLK,
        )
