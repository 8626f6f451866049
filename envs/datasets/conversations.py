"""Conversations for supervised training, from rows of a data set or an environment's own problems.

A row holds a whole conversation under `messages`, or a problem with its answer as for reinforcement learning, which
becomes a question and one answer. A row is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envs.datasets.prompts import DEFAULT_KEYS, DataKeys, add_system_prompt, read_messages
from envs.datasets.rows import RowSource, open_rows, read_tools
from envs.datasets.samples import RowSamples
from envs.errors import UserError
from envs.images import ImageAccess
from envs.types import Message, Sample, SampleSource

#: The placeholder of the answer in an answer format.
ANSWER = "ANSWER"
#: The format that slime uses for Geometry3K in supervised training.
ANSWER_FORMAT = f"Answer: \\boxed{{{ANSWER}}}"


@dataclass(frozen=True)
class Conversation:
    """The messages, with decoded images, and the tools that the prompt describes; `where` names it in errors.

    Example::

        Conversation("demos.jsonl row 3", (
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "5", "train": False},
            {"role": "user", "content": "No."},
            {"role": "assistant", "content": "4"}))
    """

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


class ConversationSource(Protocol):
    """A finite, indexable set of conversations; reading a bad row raises `UserError`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Conversation: ...


@dataclass(frozen=True)
class ConversationOptions:
    """How rows become conversations.

    `keys` are the columns of rows with a problem. `system_prompt` precedes every conversation's own system message.
    `default_system_prompt` and `default_tools`, from the environment, serve rows without their own.
    """

    messages_key: str = "messages"
    tools_key: str = "tools"
    keys: DataKeys = DEFAULT_KEYS
    answer_format: str = ANSWER_FORMAT
    system_prompt: str = ""
    default_system_prompt: str = ""
    default_tools: tuple[Mapping[str, Any], ...] = ()
    allow_outside_images: bool = False


class ConversationRows:
    """The conversations of a data set.

    Example::

        rows = ConversationRows(open_rows("demos.jsonl", "train"), ConversationOptions())
        len(rows), rows[0].where                    # (256, "demos.jsonl row 0")
    """

    def __init__(self, source: RowSource, options: ConversationOptions, limit: int | None = None) -> None:
        self._source = source
        self._options = options
        self._size = min(limit or len(source.rows), len(source.rows))
        prompt = options.system_prompt or options.default_system_prompt or None
        self._access = ImageAccess(source.root, options.allow_outside_images)
        # Rows with a problem are read as reinforcement learning reads them, so both train on the same text.
        self._problems = RowSamples(source, options.keys, prompt, self._access, self._size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Conversation:
        row = self._source.rows[index]
        where = f"{self._source.name} row {index}"
        options = self._options
        tools = read_tools(row.get(options.tools_key), f"{where} {options.tools_key}") or options.default_tools
        # In parquet, a file that mixes both kinds of rows has both columns in every row.
        if row.get(options.messages_key) is None:
            if options.keys.prompt not in row:
                rule = f"must hold messages under '{options.messages_key}', or a problem under '{options.keys.prompt}'"
                raise UserError(where, rule, f"keys {', '.join(row)}", "name the column with --messages-key")
            return Conversation(where, answered(self._problems[index], options.answer_format), tools)
        keys = replace(options.keys, prompt=options.messages_key)
        messages = read_messages(row, keys, where, self._access)
        return Conversation(where, tuple(self._prompted(messages)), tools)

    def _prompted(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self._options.system_prompt:
            return add_system_prompt(messages, self._options.system_prompt)
        # The environment's prompt is for rows that bring none: theirs was written for their answers.
        if self._options.default_system_prompt and messages[0]["role"] != "system":
            return add_system_prompt(messages, self._options.default_system_prompt)
        return messages


@dataclass(frozen=True)
class AnsweredSamples:
    """The problems of an environment's own data set, with their answers, as conversations."""

    samples: SampleSource
    answer_format: str = ANSWER_FORMAT
    tools: tuple[Mapping[str, Any], ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> Conversation:
        sample = self.samples[index]
        if sample.label is None:
            raise UserError(f"sample {sample.id}", "must have an answer", "none", "give conversations with --data")
        return Conversation(f"sample {sample.id}", answered(sample, self.answer_format), self.tools)


def answered(sample: Sample, answer_format: str) -> tuple[Message, ...]:
    r"""Return a problem and its answer as messages.

    >>> answered(Sample("0", ({"role": "user", "content": "2 + 2?"},), "4"), ANSWER_FORMAT)[-1]
    {'role': 'assistant', 'content': 'Answer: \\boxed{4}'}
    """
    answer = answer_format.replace(ANSWER, str(sample.label))
    return (*sample.prompt, {"role": "assistant", "content": answer})


def open_conversations(source: str, options: ConversationOptions, limit: int | None = None) -> ConversationRows:
    """Open a data set, as `envs.datasets.samples.load_samples` does; rows are checked when they are read.

    Raises:
        UserError: the source is missing, empty, or not readable in the format that its name says.
    """
    return ConversationRows(open_rows(source, "train"), options, limit)
