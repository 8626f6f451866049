"""Renders with a model's chat template and finds out how it treats roles, tools and turns.

It does so by rendering small conversations; nothing is read out of the template's source.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.checking.chat_template import RENDER_S
from envs.errors import UserError
from envs.execution.watchdog import bounded
from envs.types import Message

#: Invisible characters that no template writes or changes; they mark the place of a content in rendered text.
MARK = "\u2063\u2062\u2064\u2062\u2063"

_QUESTION: Message = {"role": "user", "content": "?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
# Messages that may come before a turn; the last ones suit templates that know no other roles.
_PASTS: tuple[tuple[Message, ...], ...] = (
    ({"role": "system", "content": "Solve it."}, _QUESTION),
    (_QUESTION, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA"}, {"role": "tool", "content": "B"}),
    (_QUESTION, {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}),
)
# Texts with which a model's turn may begin before the mark.
_OPENINGS = ("<think>\nHm.\n</think>\n\n", " \n")


class ModelTemplate:
    """One chat template of a tokenizer, for conversations with tools or without.

    Example::

        template = ModelTemplate(tokenizer, {"enable_thinking": False}, tokenizer.chat_template)
        template.render([{"role": "user", "content": "Hi"}])     # "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>..."
        template.after_turn([{"role": "tool", "content": "1"}])  # "<|im_end|>\\n<|im_start|>user\\n<tool_response>..."
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], source: str) -> None:
        """`options` go to every rendering of the template's text `source`."""
        self.source = source
        self._tokenizer = tokenizer
        self.options = dict(options)
        self._roles: dict[str, str] = {}

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), opens_turn: bool = True
    ) -> str:
        """Return the text of a conversation; with `opens_turn` it ends where the model begins to write.

        Raises whatever the template raises, most often `jinja2.TemplateError`; TimeoutError where it does not end.
        """
        with bounded("the chat template", RENDER_S):
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=opens_turn,
                **self.options,
            )

    def writes_mark(self, *messages: Message) -> bool:
        """Return whether the template accepts the messages and writes the `MARK` in them exactly once."""
        try:
            return self.render(messages).count(MARK) == 1
        except Exception:  # a template raises what it likes
            return False

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message."""
        return self.writes_mark({"role": "system", "content": MARK}, _QUESTION)

    @functools.cached_property
    def teaches_tools(self) -> bool:
        """Whether the template describes the tools that it gets."""
        try:
            return self.render([_QUESTION], [_TOOL]) != self.render([_QUESTION])
        except Exception:  # a template that rejects tools
            return False

    def role(self, role: str) -> str:
        """Return the role with which to render a message that is not the first.

        A template may reject a role, silently leave out its messages, or write them as the model's own turn, as it does
        with "assistant " or "model"; the role is then "user".
        """
        if role not in self._roles:
            known = role in ("user", "assistant") or self._knows(role)
            self._roles[role] = role if known else "user"
        return self._roles[role]

    def _knows(self, role: str) -> bool:
        messages: list[Message] = [_QUESTION, {"role": "assistant", "content": "?"}, {"role": role, "content": MARK}]
        if not self.writes_mark(*messages):
            return False
        before = "".join(self.render(messages).partition(MARK)[0].split())
        opening = "".join(self.render([_QUESTION]).removeprefix(self.render([_QUESTION], opens_turn=False)).split())
        return not (opening and before.endswith(opening))

    def with_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages with the tools described in the system message, for a template that does not do this.

        Without a system message, the one that the template writes by default is kept.
        """
        text = describe_tools(tools)
        if messages[0]["role"] != "system":
            default = self._default_system()
            return [{"role": "system", "content": f"{default}\n\n{text}".lstrip()}, *messages]
        system = messages[0]
        content = system["content"]
        if isinstance(content, str):
            content = f"{content}\n\n{text}"
        else:
            content = [*content, {"type": "text", "text": f"\n\n{text}"}]
        return [{**system, "content": content}, *messages[1:]]

    def _default_system(self) -> str:
        if not self.takes_system:
            rule = "must have a chat template with a place for tools"
            fix = "take another model, or an environment without tools"
            raise UserError("--model", rule, "one without tools or system message", fix)
        head, tail = self.render([{"role": "system", "content": MARK}, _QUESTION]).split(MARK)
        plain = self.render([_QUESTION])
        is_framed = plain.startswith(head) and plain.endswith(tail) and len(plain) >= len(head) + len(tail)
        if is_framed:
            return plain[len(head) : len(plain) - len(tail)]
        return ""

    def after_turn(self, messages: Sequence[Message]) -> str:
        """Return the template's text between a model's turn and its next one, with these messages.

        Raises whatever the template raises.
        """
        return self._after([_QUESTION], "", messages)

    def _after(self, past: Sequence[Message], opening: str, messages: Sequence[Message], tools: Any = ()) -> str:
        turn: Message = {"role": "assistant", "content": opening + MARK}
        return self.render([*past, turn, *messages], tools).split(MARK, 1)[1]

    def check_suffix_is_stable(self, messages: Sequence[Message]) -> None:
        """Raise `UserError` where the text after a turn depends on what came before the turn.

        A template that strips the thinking of earlier turns (Qwen3's) passes: the text after them stays the same. One
        that numbers images or turns does not: an append-only stream could not follow it.
        """
        expected = self.after_turn(messages)
        variants = [([_QUESTION], opening, ()) for opening in _OPENINGS] + [([_QUESTION], "", (_TOOL,))]
        variants += [(past, "", ()) for past in _PASTS]
        if imaged := [m for m in messages if not isinstance(m["content"], str)]:
            shown = [{**m, "content": [p for p in m["content"] if p["type"] == "image"]} for m in imaged]
            variants.append(([_QUESTION, {"role": "assistant", "content": "A"}, *shown], "", ()))
        for past, opening, tools in variants:
            try:
                found = self._after(past, opening, messages, tools)
            except Exception:  # the template rejects these earlier messages, so they cannot occur
                continue
            if found != expected:
                rule = "must write the same after a turn, whatever came before it"
                fix = f"use another template or other template arguments (else {expected!r:.200})"
                raise UserError("--model", rule, f"{found!r:.200}", fix)

    def closing(self) -> tuple[str, str]:
        """Return the text after a model's turn: at the end of a conversation, and before a user's message."""
        turn: Message = {"role": "assistant", "content": MARK}
        last = self.render([_QUESTION, turn], opens_turn=False)
        before_user = self.render([_QUESTION, turn, _QUESTION])
        return last.partition(MARK)[2], before_user.partition(MARK)[2]


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return our own text for a system message that describes tools in the Hermes form."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\n\nYou can call the functions below; each line is the JSON description of one.\n<tools>\n{lines}\n"
        "</tools>\n\nTo call a function, write its name and its arguments as one JSON object between these tags, then "
        'wait for the answer:\n<tool_call>\n{"name": "the function\'s name", "arguments": {"an argument": "its value"}}'
        "\n</tool_call>"
    )


def control_tokens(text: str) -> set[str]:
    """Return every part of a text that looks like a control token.

    >>> control_tokens("<|im_start|>user")
    {'<|im_start|>'}
    """
    return set(re.findall(r"<\|[^|<>\s]{1,60}\|>", text))
