"""Frozen types for what a recording says of one token stream: its turns, images, log-probs and experts.

Legend: T tokens of one stream, N those of them that the model wrote, K ids that one of these was drawn from, R tokens
of known experts, L layers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from agents.recording.safe_files import memory_of
from agents.types import TokenStream, Turn

#: What a name, a whole number, a count, a weight version (-1: unknown) and a bit of the mask may be. Longer or larger
#: ones are no recorder's.
Name = Annotated[str, Field(max_length=1000)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Version = Annotated[int, Field(ge=-1, lt=2**31)]
Bit = Annotated[int, Field(ge=0, le=1)]


class Record(BaseModel):
    # NaN breaks every mean that it enters, so no recorder writes one and no reader takes one.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="null")

    # Of the line, not of the record: what a reader may hold is decided by the file.
    _num_bytes: int = PrivateAttr(0)
    _memory: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """The length of the line that the record was read from; 0 where there is none."""
        return self._num_bytes

    @property
    def memory(self) -> int:
        """A bound of the memory that the record takes, in bytes; 0 where it was not read from a line."""
        return self._memory

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Return the record of a line. Raises `pydantic.ValidationError`."""
        record = cls.model_validate_json(line)
        record._num_bytes = len(line)
        record._memory = memory_of(line)
        return record


class TurnRecord(Record):
    """One model turn, `[start, end)` of its stream, and the environment's answer.

    `finish` is why the model stopped: "stop", "length" or "abort"; the environment sees a turn only after "stop".
    `done` says that the environment ended the task. `versions` are runs of (weight version, tokens). The engine had
    `num_cached` of the tokens before the turn in its cache. `reward` is the turn's part of the episode's reward. Times
    are seconds. Where a server gave text and no token ids, the span is empty and `usage` has the server's own counts.
    `stream` is the number of its stream: 0 is the episode's own, 1 the first of `EpisodeRecord.later`.
    """

    start: Count
    end: Count
    text: str
    finish: str
    done: bool
    versions: tuple[tuple[Version, Count], ...]
    num_cached: Count
    observations: tuple[dict[str, Any], ...]
    info: dict[str, Any]
    engine_s: float
    env_s: float
    reward: float = 0.0
    usage: dict[Name, Count] = {}
    stream: Count = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the model wrote."""
        return self.usage.get("completion_tokens", self.end - self.start)


class ImageRecord(Record):
    """An image of the stream: the hash of its pixels, and its grid of patches (time, rows, columns)."""

    digest: Name
    grid: tuple[Count, Count, Count]
    num_tokens: Count

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """The grid, under the name that a `ProcessedImage` has for it."""
        return self.grid


class RoutesRecord(Record):
    """The experts that R tokens took in each of so many layers.

    `experts` has `top_k` numbers for each token and layer, of `width` bytes each, little-endian.

    Example: `RoutesRecord(num_layers=48, top_k=8, width=1, experts=...)` has 384 bytes a token.
    """

    num_layers: Annotated[int, Field(ge=1, lt=2**16)]
    top_k: Annotated[int, Field(ge=1, lt=2**8)]
    width: Literal[1, 2]
    # As text, for the same reason as `kept`.
    experts: Base64Bytes

    @model_validator(mode="after")
    def _has_whole_rows(self) -> Self:
        row = self.num_layers * self.top_k * self.width
        if len(self.experts) % row:
            raise ValueError(f"{len(self.experts)} bytes are no whole rows of {row}")
        return self

    @classmethod
    def line(cls, routes_RLK: NDArray[np.uint8 | np.uint16]) -> dict[str, Any]:
        """Return the record of an array as it is written."""
        _, num_layers, top_k = routes_RLK.shape
        width = routes_RLK.itemsize
        experts = base64.b64encode(routes_RLK.astype(f"<u{width}").tobytes())
        return {"num_layers": num_layers, "top_k": top_k, "width": width, "experts": experts.decode()}

    @property
    def array(self) -> NDArray[np.uint8 | np.uint16]:
        """The experts, (R, layers, top_k)."""
        return np.frombuffer(self.experts, dtype=f"<u{self.width}").reshape(-1, self.num_layers, self.top_k)


class StreamBase(Record):
    """What the records of all token streams share; N of the tokens are the model's.

    `logprobs` are the engine's, for these N tokens; `kept` has the ids that each of them was drawn from, K little int32
    for each, and is empty where that was the whole vocabulary. `routes` are the experts of the tokens before the last
    one of the last turn; None unless they were recorded.
    """

    prompt_length: Count
    logprobs: tuple[float | None, ...]
    # As text: lists of numbers would take ten times the memory when they are read.
    kept: Base64Bytes = b""
    routes: RoutesRecord | None = None
    images: tuple[ImageRecord, ...]

    @model_validator(mode="after")
    def _has_whole_sets(self) -> Self:
        if self.kept and (not self.logprobs or len(self.kept) % (4 * len(self.logprobs))):
            raise ValueError(f"kept has {len(self.kept)} bytes for {len(self.logprobs)} tokens")
        return self

    def token_stream(
        self,
        ids_T: NDArray[np.int64],
        mask_T: NDArray[np.bool_],
        turns: Sequence[Turn],
        messages: Sequence[Mapping[str, Any]],
        num_opening: int,
        num_given: int,
    ) -> TokenStream:
        """Return the stream; its images are the records of them, without pixels.

        Log-probs are 0 outside the mask, NaN where the engine gave none.
        """
        logprobs_T = np.zeros(len(mask_T), dtype=np.float32)
        # Another number breaks a rule of the record, which is told elsewhere.
        if len(self.logprobs) == np.count_nonzero(mask_T):
            with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, which breaks a rule
                logprobs_T[mask_T] = [np.nan if x is None else x for x in self.logprobs]
        kept_NK = None
        if self.kept:
            kept_NK = np.frombuffer(self.kept, dtype="<i4").reshape(len(self.logprobs), -1)
        return TokenStream(
            ids_T=ids_T,
            mask_T=mask_T,
            logprobs_T=logprobs_T,
            images=self.images,  # type: ignore[arg-type]
            turns=tuple(turns),
            prompt_length=self.prompt_length,
            messages=tuple(messages),
            num_opening=num_opening,
            num_given=num_given,
            kept_NK=kept_NK,
            routes_RLK=self.routes and self.routes.array,
        )


class StreamRecord(StreamBase):
    """A token stream of an episode that began later than its first one.

    `ids` are little int32; the tokens of its turns are the model's. `said` has the places of its messages in
    `EpisodeRecord.said`: most of them stand in an earlier stream too. `num_opening` and `num_given` are as in
    `TokenStream`.
    """

    ids: Base64Bytes
    said: tuple[Count, ...]
    num_opening: Count
    num_given: Count

    @model_validator(mode="after")
    def _has_whole_ids(self) -> Self:
        if len(self.ids) % 4:
            raise ValueError(f"ids has {len(self.ids)} bytes, which are no whole int32")
        return self

    def of_turns(self, turns: Sequence[Turn], said: Sequence[Mapping[str, Any]]) -> TokenStream:
        """Return the stream with its turns; `said` are the episode's messages."""
        ids_T = np.frombuffer(self.ids, dtype="<i4").astype(np.int64)
        mask_T = np.zeros(len(ids_T), dtype=np.bool_)
        for turn in turns:
            mask_T[turn.start : turn.end] = True
        messages = [said[place] for place in self.said]
        return self.token_stream(ids_T, mask_T, turns, messages, self.num_opening, self.num_given)

    @classmethod
    def line(cls, stream: TokenStream) -> dict[str, Any]:
        """Return what is written of a stream beside the fields that all streams have."""
        # A broken completion may hold any number, and its episode says so by its end.
        ids_T = stream.ids_T.clip(-1, 2**31 - 1).astype("<i4")
        return {
            "ids": base64.b64encode(ids_T.tobytes()).decode(),
            "num_opening": stream.num_opening,
            "num_given": stream.num_given,
        }
