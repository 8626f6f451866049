"""Renders chat templates without a tokenizer, to show the text that a model would read."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from envs.config.text_files import read_text
from envs.errors import UserError
from envs.execution.watchdog import bounded
from envs.types import Message

PACKAGED = Path(__file__).with_name("chat_template.jinja")
#: How templates of vision-language models write an image; the most common one is first.
PLACEHOLDERS = ("<|image_pad|>", "<image_soft_token>", "<|image|>", "[IMG]", "<image>")
#: The longest time for the rendering of a conversation, which takes milliseconds.
RENDER_S = 5.0


class _Generation(Extension):
    """Supports the `generation` tag, with which some templates mark model text; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja reads it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template, run as Transformers runs it: in a sandbox, with the same functions.

    Example::

        template = ChatTemplate.open()                                       # a general ChatML, in this package
        template.render([{"role": "user", "content": "Find x."}])            # "<|im_start|>user\\nFind x.<|im_end|>..."
    """

    def __init__(self, source: str, name: str) -> None:
        """Compile a template. Raises `UserError` if the source is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            with bounded(f"the chat template {name}", RENDER_S):  # a constant is computed when it is compiled
                self._template = environment.from_string(source)
        except (jinja2.TemplateError, TimeoutError) as error:
            raise UserError(name, "must be a chat template", str(error), "give a Jinja file") from error
        self.source = source
        self.name = name
        #: The placeholder of an image in the rendering; None if the template shows no images.
        self.placeholder = next((text for text in PLACEHOLDERS if text in source), None)

    @classmethod
    def open(cls, file: str = "") -> ChatTemplate:
        """Read the template of a file, or the one in this package.

        Raises:
            UserError: the file is missing, or its text is not Jinja.
        """
        path = Path(file) if file else PACKAGED
        try:
            return cls(read_text(path, str(path)), path.name)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError("--chat-template", "must be a readable file", file, "give a Jinja file") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a conversation up to the point where the model starts to write.

        Raises:
            jinja2.TemplateError: the template refuses the messages.
            TimeoutError: it does not end.
        """
        with bounded(f"the chat template {self.name}", RENDER_S):
            return self._template.render(messages=list(messages), tools=list(tools) or None, add_generation_prompt=True)


def choose_templates(found: str | Mapping[str, str]) -> tuple[str, str]:
    """Return the templates of conversations without tools and with tools.

    Of several by name these are `default` and `tool_use`, as Transformers' tokenizers choose. Where only one of the two
    is there, it serves for both.

    >>> choose_templates({"default": "a", "tool_use": "b", "rag": "c"})
    ('a', 'b')

    Raises:
        UserError: neither name is there, or the template is no text.
    """
    if isinstance(found, str):
        return found, found
    if not isinstance(found, Mapping):
        fix = "take the file of the model's repository"
        raise UserError("--model", "must have a text as its chat template, or texts by name", found, fix)
    chosen = [found[name] for name in ("default", "tool_use") if isinstance(found.get(name), str)]
    if not chosen:
        fix = "name one of them default"
        raise UserError("--model", "must have a chat template named default or tool_use", ", ".join(found), fix)
    return chosen[0], chosen[-1]


def _to_json(value: Any, **options: Any) -> str:
    # Unlike Jinja's own filter, this writes no HTML escapes.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
