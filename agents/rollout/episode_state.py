"""One episode while it runs: its environment, its turns, and the token streams in which they stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.rollout.stream import Stream
from agents.types import TokenStream, Turn
from envs.execution.runner import EnvRunner
from envs.types import Message


@dataclass(eq=False)
class EpisodeState:
    """One episode while it runs."""

    env: EnvRunner
    seed: int
    messages: list[Message]
    checks_template: bool
    streams: list[Stream] = field(init=False)
    #: How many messages are the problem's.
    num_prompt: int = field(init=False)
    #: The stream in which the model writes now, as a place in `streams`.
    place: int = 0
    turns: list[Turn] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    check_s: float = 0.0

    def __post_init__(self) -> None:
        self.streams = [Stream(self.messages)]
        self.num_prompt = len(self.messages)

    @property
    def stream(self) -> Stream:
        """The stream in which the model writes now."""
        return self.streams[self.place]

    @property
    def num_appended(self) -> int:
        """Tokens behind the prompts of all streams. Observations count: they fill a stream as the model's words do."""
        return sum(len(stream.ids) - stream.prompt_length for stream in self.streams)

    def say(self, messages: Iterable[Message]) -> None:
        """Append messages to those of the stream."""
        self.stream.messages += messages

    def begin_stream(self, stream: Stream) -> None:
        """Go on in a new stream."""
        # The problem's own, where an agent said something else before anybody has read it.
        self.streams = [each for each in self.streams if each.ids]
        if not self.streams:
            self.num_prompt = len(stream.messages)
            self.tools = stream.tools
        self.place = len(self.streams)
        self.streams.append(stream)

    def drop_unwritten(self) -> None:
        """Drop a stream that was begun and in which the model wrote nothing."""
        if self.place and self.stream.last_turn is None:
            self.streams.pop()
            self.place = len(self.streams) - 1

    def frozen_streams(self) -> tuple[TokenStream, ...]:
        """Return all streams as they are, each with its turns."""
        return tuple(
            stream.frozen([turn for turn in self.turns if turn.stream == place])
            for place, stream in enumerate(self.streams)
        )
