"""Turns an assistant's message into the text that the model would have had to write for it.

A chat template opens a turn, perhaps with the beginning of a thought, then writes the message, its tool calls and the
closing token. The model's part is what stands between the opening and the closing token. Rendering finds it; nothing is
read out of the template's source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agents.rendering.renderer import Renderer
from agents.rendering.template import MARK
from agents.rendering.thinking import find_thinking
from agents.rollout.stream import first_difference
from envs.errors import UserError, first_line
from envs.tool_calls import ToolCall, ToolCallError, ToolFormat, find_tool_calls, write_tool_call
from envs.tool_calls.json_call import interpret
from envs.tool_calls.thinking import ThinkingSetting
from envs.types import Message, content_parts

_QUESTION: Message = {"role": "user", "content": "?"}


class TurnWriter:
    """Writes turns for one renderer.

    Example, with a template that writes calls in the Hermes form::

        writer = TurnWriter(renderer, "hermes")
        call = {"function": {"name": "calc_score", "arguments": {"answer": "68"}}}
        writer.text({"role": "assistant", "content": "So 68.", "tool_calls": [call]}, "row 0 messages[2]")
        # 'So 68.<tool_call>{"name": "calc_score", "arguments": {"answer": "68"}}</tool_call>'

    Calls are written as the template writes them if an environment can parse them back from that text, else in the tool
    format. A message whose thought is empty, or in a field of its own, is written as the template writes the last turn
    of a conversation.
    """

    def __init__(self, renderer: Renderer, tool_format: ToolFormat, thinking: ThinkingSetting = "auto") -> None:
        """`thinking` is the environment's setting: with "keep", it finds calls in thoughts too."""
        self.renderer = renderer
        self.tool_format: ToolFormat = tool_format
        template = renderer.tool_template
        self._opening = template.render([_QUESTION])
        marked = template.render([_QUESTION, {"role": "assistant", "content": MARK}], opens_turn=False)
        # A template may open a turn with text that it leaves out later: an empty thought, or the start of one.
        self._header = self._opening[: first_difference(self._opening, marked)]
        self._ending = template.closing()[0]
        self._begun = self._opening[len(self._header) :]
        self._thinking = find_thinking(template)
        self._hidden = find_thinking(template, thinking)
        self._opens_thought = self._thinking is not None and self._thinking.is_open_after(self._begun)

    def text(self, message: Message, where: str) -> str:
        """Return the text of a turn, without the closing token.

        Raises:
            UserError: the message holds an image or a control token, is empty, has calls that cannot be parsed, or
                does not continue the text with which the template opens a turn. Names `where`.
        """
        # First: a broken call would be written by the template as it is.
        calls = parse_calls(message, where)
        if any(part["type"] != "text" for part in content_parts(message)):
            raise UserError(where, "must be text where the assistant speaks", "an image", "show it in another message")
        for text in _texts(message):
            # Tokenised, it would end the turn early, or begin another one.
            if self.renderer.encoder.break_control_tokens(text) != text:
                rule = "must hold no control token where the assistant speaks"
                raise UserError(where, rule, text[:80], "leave it out: the template writes what closes a turn")
        content = "".join(part["text"] for part in content_parts(message))
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        plain["content"] = content
        if not calls:
            text = self._model_part(plain, where)
        else:
            text = self._model_part({**plain, "tool_calls": [_as_json(call) for call in calls]}, where)
            if not self._parses_to(text, calls):
                # Some templates write calls in a form that no parser of an environment reads.
                lines = [content] * bool(content) + [write_tool_call(call, self.tool_format) for call in calls]
                text = self._model_part({**plain, "content": "\n".join(lines)}, where)
            if not self._parses_to(text, calls):
                found = find_tool_calls(text, self.tool_format)
                rule = f"must have tool_calls that a model can write in the form {self.tool_format}"
                raise UserError(where, rule, f"{text[:80]!r}, read as {found!r:.80}", "fix the calls, or the text")
        if not text:
            raise UserError(where, "must say something where the assistant speaks", "nothing", "leave the turn out")
        return text

    def _model_part(self, message: Message, where: str) -> str:
        """Return the part of the rendered message that the model would write."""
        try:
            whole = self.renderer.tool_template.render([_QUESTION, message], opens_turn=False)
        except Exception as error:  # a template raises what it likes
            rule = "must be a message that the model's chat template can write"
            raise UserError(where, rule, first_line(error), "fix the message") from error
        if not (whole.startswith(self._header) and whole.endswith(self._ending)):
            rule = "must be a message that the model's chat template opens and closes as any other of the assistant"
            fix = "fix the message, or let the template open thoughts with --template-options"
            raise UserError(where, rule, whole[-80:], fix)
        # The model continues what the template begins, such as an empty thought.
        start = len(self._opening if whole.startswith(self._opening) else self._header)
        text = whole[start : len(whole) - len(self._ending)]
        thinking = self._thinking
        if start < len(self._opening) and thinking and self._opens_thought and thinking.closing not in text:
            rule = f"must continue {self._begun!r}, with which the model's template opens a turn"
            tags = f"{thinking.opening}...{thinking.closing}"
            fix = f"write the thought too, {tags}, or switch it off with --template-options"
            raise UserError(where, rule, text[:80], fix)
        return text

    def _parses_to(self, text: str, calls: Sequence[ToolCall]) -> bool:
        """Return whether an environment parses exactly these calls from the text."""
        found = find_tool_calls(self._hidden.said(text) if self._hidden else text, self.tool_format)
        if self.tool_format == "hermes":
            return found == list(calls)
        # In the other formats every value is plain text.
        return [(c.name, _plain(c)) for c in found if isinstance(c, ToolCall)] == [(c.name, _plain(c)) for c in calls]


def parse_calls(message: Message, where: str) -> list[ToolCall]:
    """Return the calls of an assistant's `tool_calls`, in OpenAI's form; arguments are an object or its JSON text.

    >>> parse_calls({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}, "row 0 messages[1]")
    [ToolCall(name='f', arguments={'a': 1})]

    Raises:
        UserError: one of them is no call.
    """
    # A column of Arrow has None where a row has no calls.
    given = message.get("tool_calls") or ()
    calls: list[ToolCall] = []
    for index, value in enumerate(given if isinstance(given, list | tuple) else [given]):
        call = interpret(value)
        if isinstance(call, ToolCallError):
            fix = 'write {"function": {"name": "f", "arguments": {"a": 1}}}'
            raise UserError(f"{where} tool_calls[{index}]", "must be a tool call", call.reason, fix)
        calls.append(call)
    return calls


def _as_json(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _plain(call: ToolCall) -> dict[str, str]:
    values = call.arguments.items()
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values}


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
