"""The token stream of one episode while it grows.

Legend: T tokens of the stream, R of them with known experts.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.rendering.renderer import Rendered, content_key
from agents.types import Completion, ProcessedImage, TokenStream, Turn
from envs.types import Message, content_parts


def is_same(one: Message, other: Message) -> bool:
    """Return whether two messages of an episode say the same; their images must be the same objects."""
    if one is other:
        return True
    if content_key(one) != content_key(other):
        return False
    pairs = zip(content_parts(one), content_parts(other), strict=True)
    return all(part.get("image") is same.get("image") for part, same in pairs)


def first_turn(messages: Sequence[Message], own: Container[int]) -> int:
    """Return from which message on all that the assistant says are turns of the model; their number where it is none.

    `own` has the `id` of each message that is a turn of the model.
    """
    first = len(messages)
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "assistant":
            if id(messages[place]) not in own:
                break
            first = place
    return first


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first place where two sequences differ; the length of the shorter where it begins the other.

    >>> first_difference("<think>", "<tool>")
    2
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


class Stream:
    """One append-only token stream.

    `ids` is the tuple that the engine gets: it never changes, only a longer one takes its place.

    Example::

        stream = Stream()
        stream.read(renderer.prompt(messages))              # 4 tokens
        stream.write(completion)                            # of 3 tokens; returns (4, 7)
        stream.read(renderer.suffix(observed, last_id))     # 2 tokens
        stream.arrays()[1]                                  # mask_T: 0 0 0 0 1 1 1 0 0
    """

    def __init__(self, messages: list[Message] | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        #: What the stream says, as messages, and the tools that its prompt shows.
        self.messages = [] if messages is None else messages
        self.tools = tools
        #: See `TokenStream`.
        self.num_opening = 0
        self.num_given = 0
        self.ids: tuple[int, ...] = ()
        self.images: tuple[ProcessedImage, ...] = ()
        #: What was read (`Rendered`) and written (`Completion`), in order.
        self.pieces: list[Rendered | Completion] = []
        #: How many of the first tokens an engine has read by the end of the last turn, and that turn.
        self.num_routed = 0
        self.last_turn: Completion | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; 0 before it is read."""
        if self.pieces:
            return len(self.pieces[0].ids)
        return 0

    def extended_by(self, messages: Sequence[Message]) -> bool:
        """Return whether a conversation goes on from the stream's last turn: it begins with all that the stream says,
        and the model says nothing of what follows.
        """
        known = len(self.messages)
        return (
            self.last_turn is not None
            and len(messages) > known
            and all(message["role"] != "assistant" for message in messages[known:])
            and all(map(is_same, self.messages, messages))
        )

    def read(self, rendered: Rendered) -> None:
        """Append tokens that the model did not write."""
        self.pieces.append(rendered)
        # A new tuple: an engine may still hold the one of before.
        self.ids += rendered.ids
        self.images += rendered.images

    def write(self, completion: Completion) -> tuple[int, int]:
        """Append a model turn; return its span [start, end)."""
        start = len(self.ids)
        self.ids += completion.ids
        # The last token of a turn is read with what follows it.
        num_read = len(self.ids) - 1
        if completion.routes_RLK is not None:
            num_again = len(completion.routes_RLK) - (num_read - self.num_routed)
            completion = replace(completion, routes_RLK=completion.routes_RLK[num_again:])
        self.num_routed = num_read
        self.pieces.append(completion)
        self.last_turn = completion
        return start, len(self.ids)

    @property
    def kept_NK(self) -> NDArray[np.int32] | None:
        """The ids that each token of the model was drawn from; None unless all turns have them."""
        return _joined([piece.kept_NK for piece in self.pieces if isinstance(piece, Completion)])

    @property
    def routes_RLK(self) -> NDArray[np.uint8 | np.uint16] | None:
        """The experts of the first `num_routed` tokens; None unless all turns have theirs, and none was cut off."""
        written = [piece for piece in self.pieces if isinstance(piece, Completion)]
        return _joined([None if piece.finish == "abort" else piece.routes_RLK for piece in written])

    def frozen(self, turns: Sequence[Turn]) -> TokenStream:
        """Return the stream as it is; `turns` are those that were written in it."""
        ids_T, mask_T, logprobs_T = self.arrays()
        return TokenStream(
            ids_T=ids_T,
            mask_T=mask_T,
            logprobs_T=logprobs_T,
            images=self.images,
            turns=tuple(turns),
            prompt_length=self.prompt_length,
            messages=tuple(self.messages),
            num_opening=self.num_opening,
            num_given=self.num_given,
            tools=tuple(self.tools),
            kept_NK=self.kept_NK,
            routes_RLK=self.routes_RLK,
        )

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float32]]:
        """Return ids_T, mask_T and logprobs_T; log-probs are 0 in a turn that has more or fewer of them than tokens."""
        ids_T = np.array(self.ids, dtype=np.int64)
        mask_T = np.zeros(len(ids_T), dtype=np.bool_)
        logprobs_T = np.zeros(len(ids_T), dtype=np.float32)
        end = 0
        for piece in self.pieces:
            start = end
            end = end + len(piece.ids)
            if isinstance(piece, Completion):
                mask_T[start:end] = True
                # Another number breaks a rule, which is told elsewhere; here nothing may fail.
                if len(piece.logprobs) == end - start:
                    logprobs_T[start:end] = piece.logprobs
        return ids_T, mask_T, logprobs_T


def _joined(parts: Sequence[NDArray[Any] | None]) -> Any:
    """Return the parts as one array; None where one is missing, or there is none."""
    given = [part for part in parts if part is not None]
    if not given or len(given) < len(parts):
        return None
    return np.concatenate(given)
