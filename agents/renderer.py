"""Chat messages to token ids, by the model's own template: the prompt once, then one suffix per environment message.

Sampled ids are never decoded and encoded again. What follows a model turn is whatever the template writes between the
end of an assistant message and the start of the next one (closers and newlines included), and only that text is
tokenised.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.images import ImageStore
from agents.types import ProcessedImage
from envs.errors import UserError
from envs.types import Message, content_parts, message_images, well_formed

# Text that no template writes by itself, to find where the assistant's content ends.
_MARK = "⁣assistant-content⁣"


@dataclass(frozen=True, eq=False)
class Rendered:
    """Token ids with image placeholders expanded, and the images in order."""

    ids: tuple[int, ...]
    images: tuple[ProcessedImage, ...]


class Renderer:
    """Renders for one checkpoint folder.

    Example::

        renderer = Renderer.from_checkpoint("path/to/model")
        prompt = renderer.prompt(sample.prompt, env.tools)
        suffix = renderer.suffix([{"role": "tool", "content": "Score 1.0"}], last_id=completion.ids[-1])
    """

    def __init__(self, tokenizer: Any, images: ImageStore, image_token: str = "<|image_pad|>") -> None:
        self.tokenizer, self.images = tokenizer, images
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(image_token))
        self.max_token_chars = max(map(len, tokenizer.get_vocab()))
        self.stop_ids = self._stop_ids()
        self.suppressed_ids = self._suppressed_ids()
        self._control = re.compile("|".join(re.escape(token) for token in self._control_tokens()) or "(?!)")

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Renderer:
        """Read tokenizer, chat template and image processor of a model folder; `UserError` names what is missing."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # Transformers raises OSError, ValueError, KeyError or TypeError for a missing file
            reason = str(error).strip().split("\n")[0]
            raise UserError("--model", "must have a tokenizer", str(path), f"add tokenizer.json ({reason})") from error
        # Without any tokenizer file, Transformers makes an empty tokenizer and says nothing.
        missing = {"<|im_end|>", "<|image_pad|>"} - tokenizer.get_vocab().keys()
        if missing:
            rule = f"must have a tokenizer with {' and '.join(sorted(missing))}"
            raise UserError("--model", rule, str(path), "add the tokenizer.json of a Qwen3-VL model")
        if not tokenizer.chat_template:
            raise UserError("--model", "must have a chat template", str(path), "add chat_template.jinja")
        return cls(tokenizer, ImageStore.from_checkpoint(path))

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template."""
        return str(self.tokenizer.chat_template)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer, chat template and image processor settings into a model folder."""
        self.tokenizer.save_pretrained(folder)
        self.images.save(folder)

    def _stop_ids(self) -> tuple[int, ...]:
        ends = {self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")}
        return tuple(sorted(i for i in ends if i is not None and i != self.tokenizer.unk_token_id))

    def _control_tokens(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return [token.content for token in added if token.special or token.content.startswith("<|")]

    def _suppressed_ids(self) -> tuple[int, ...]:
        """Ids that a model must never sample: image and video tokens."""
        tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
        vocabulary = self.tokenizer.get_vocab()
        return tuple(sorted(vocabulary[token] for token in tokens if token in vocabulary))

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """Return the stream that opens an episode, ending where the model begins to write."""
        text = self._template([self._defuse(message) for message in messages], tools)
        return self._encode(text, messages)

    def suffix(self, messages: Sequence[Message], last_id: int) -> Rendered:
        """Return what stands between a model turn whose last id is `last_id` and the next one: its closer where the
        model did not write it, the environment's messages, and the opening of the next turn."""
        messages = [self._defuse(message) for message in messages]
        around = self._around(tuple((message["role"], _shape(message)) for message in messages)).split(_MARK)
        parts = [part for message in messages for part in content_parts(message)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        text = "".join(piece for pair in zip(around, [*texts, ""], strict=True) for piece in pair)
        last = self.tokenizer.convert_ids_to_tokens(last_id) if last_id in self.stop_ids else ""
        return self._encode(text.removeprefix(last), messages)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a renderer lives as long as the program
    def _around(self, shapes: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
        """Return the template's text after an assistant turn, with marks where the messages' texts go."""
        conversation: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        num_texts = 0
        for role, shape in shapes:
            content = _MARK if shape == ("str",) else [_part(kind) for kind in shape]
            conversation.append({"role": role, "content": content})
            num_texts += sum(kind != "image" for kind in shape)
        text = self._template(conversation, ())
        assert text.count(_MARK) == 1 + num_texts, f"template changes content: {text!r}"
        return text.split(_MARK, 1)[1]

    def _template(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )

    def _defuse(self, message: Message) -> Message:
        """Return the message with every control token spelled in its texts broken by a zero-width space.

        A row, a tool or a model may write `<|image_pad|>` or `<|im_end|>` as plain text; it must stay text.
        Neighbouring texts become one first, since a token may be cut over two; a message without images has a string as
        its content.
        """
        parts: list[dict[str, Any]] = []
        for part in content_parts(message):
            if parts and parts[-1]["type"] == part["type"] == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
        parts = [{**p, "text": self._harmless(p["text"])} if p["type"] == "text" else p for p in parts]
        if len(parts) == 1 and parts[0]["type"] == "text":
            return {**message, "content": parts[0]["text"]}
        return {**message, "content": parts or ""}

    def _harmless(self, text: str) -> str:
        """Break control tokens; half a surrogate pair, which no tokenizer takes, becomes U+FFFD."""
        return self._control.sub(_break, well_formed(text))

    def _encode(self, text: str, messages: Sequence[Message]) -> Rendered:
        """Tokenise template text and write each image's placeholder as often as it has tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        images = tuple(self.images.process(image) for image in message_images(messages))
        holes = ids.count(self.image_token_id)
        assert holes == len(images), f"the template wrote {holes} image placeholders for {len(images)} images"
        if not images:
            return Rendered(tuple(ids), ())
        waiting = iter(images)
        expanded: list[int] = []
        for token in ids:
            expanded.extend([token] * next(waiting).num_tokens if token == self.image_token_id else [token])
        return Rendered(tuple(expanded), images)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a model turn, without its stop token."""
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _shape(message: Message) -> tuple[str, ...]:
    content = message["content"]
    return ("str",) if isinstance(content, str) else tuple(part["type"] for part in content)


def _part(kind: str) -> dict[str, str]:
    return {"type": "image"} if kind == "image" else {"type": "text", "text": _MARK}


def _break(match: re.Match[str]) -> str:
    return match[0][0] + "\u200b" + match[0][1:]
