"""The growing stream of one episode: what was read and what was written come in, the trajectory's arrays come out.

Legend: T tokens of the stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agents.renderer import Rendered
from agents.types import Completion, ProcessedImage


class Stream:
    """One append-only token stream. `ids` is what the engine is given, the object itself: it can only be replaced by a
    longer one.

    Example::

        stream = Stream()
        stream.read(renderer.prompt(messages))              # 4 tokens
        stream.write(completion)                            # of 3 tokens; returns (4, 7)
        stream.read(renderer.suffix(observed, last_id))     # 2 tokens
        stream.arrays()[1]                                  # mask_T: 0 0 0 0 1 1 1 0 0
    """

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        self.images: tuple[ProcessedImage, ...] = ()
        #: All that was read and written, in order, as it was handed over.
        self.pieces: list[Rendered | Completion] = []

    @property
    def prompt_length(self) -> int:
        """How many tokens the prompt has; 0 before it is read."""
        return len(self.pieces[0].ids) if self.pieces else 0

    def read(self, rendered: Rendered) -> None:
        """Append tokens that the model did not write."""
        self.pieces.append(rendered)
        self.ids += rendered.ids
        self.images += rendered.images

    def write(self, completion: Completion) -> tuple[int, int]:
        """Append a model turn; return its span."""
        self.pieces.append(completion)
        start = len(self.ids)
        self.ids += completion.ids
        return start, len(self.ids)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float32]]:
        """Return ids_T, mask_T and logprobs_T; log-probs that do not match their tokens in number are left 0."""
        ids_T = np.array(self.ids, dtype=np.int64)
        mask_T = np.zeros(len(ids_T), dtype=np.bool_)
        logprobs_T = np.zeros(len(ids_T), dtype=np.float32)
        end = 0
        for piece in self.pieces:
            start, end = end, end + len(piece.ids)
            if isinstance(piece, Completion):
                mask_T[start:end] = True
                if len(piece.logprobs) == end - start:
                    logprobs_T[start:end] = piece.logprobs
        return ids_T, mask_T, logprobs_T
