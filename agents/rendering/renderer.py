"""Renders chat messages as token ids by the model's own template: the prompt once, then one suffix per observation.

Sampled ids are never decoded and encoded again. After a model turn comes what the template writes between the end of an
assistant message and the start of the next one, closers and newlines included; only that text is tokenised. A template
may later rewrite earlier turns (Qwen3's strips their thinking). The stream keeps what the model saw and wrote; the text
after a turn must be the same either way, and this is checked.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from agents.rendering.encoding import Encoder
from agents.rendering.images import ImageStore
from agents.rendering.suffixes import Shape, Suffix, build_suffix, exact_ids
from agents.rendering.template import MARK, ModelTemplate, control_tokens
from agents.rendering.tokenizer_files import read_tokenizer_files
from agents.types import ProcessedImage
from envs.checking.chat_template import choose_templates
from envs.errors import UserError, first_line
from envs.types import Message, content_parts, message_images

#: An environment has a few shapes; a tool that returns a changing number of images has many.
MAX_SHAPES = 256
#: Groups begin one after the other, so episodes of a group ask for their prompt within this many others.
MAX_PROMPTS = 256
#: Of Qwen's and of GLM's vocabularies.
_VISION_TOKENS = (
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)


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

    `stop_ids` end a model's turn; the last of them is `closer_id`, the id of the token `closer`, which the template
    itself writes after an assistant's message. `image_token_id` is None where the model reads no images; `images` may
    be None too. `tool_template` writes conversations with tools and `template` those without; for most tokenizers it is
    the same one (`envs.checking.chat_template.choose_templates`). `teaches_tools` says whether the template describes
    tools; if not, the renderer describes them in the system message, in the Hermes form.
    """

    def __init__(
        self,
        tokenizer: Any,
        images: ImageStore | None,
        image_token: str = "<|image_pad|>",
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Find out what the tokenizer's chat template does, by rendering small conversations.

        `template_kwargs`, such as `{"enable_thinking": False}`, go to every rendering. `stop_ids` are further ids that
        end a turn, from a checkpoint's configuration; ids that are not added tokens are ignored, because a turn may
        hold any word.

        Raises:
            UserError: the template fails or closes no turn, or the tokenizer lacks a control token of the template.
        """
        self.tokenizer = tokenizer
        self.images = images
        self.encoder = Encoder(tokenizer)
        self._name = str(tokenizer.name_or_path)
        #: The folder that the tokenizer was read from; None for one made in memory.
        if self._name:
            self.path = Path(self._name)
        else:
            self.path = None
        plain, with_tools = choose_templates(tokenizer.chat_template)
        self.template = ModelTemplate(tokenizer, template_kwargs or {}, plain)
        is_same = with_tools == plain
        if is_same:
            self.tool_template = self.template
        else:
            self.tool_template = ModelTemplate(tokenizer, template_kwargs or {}, with_tools)
        vocabulary = tokenizer.get_vocab()
        self.max_token_chars = max(map(len, vocabulary), default=1)
        self.closer = self._find_closer()
        self.closer_id = self.encoder.added[self.closer]
        known = set(self.encoder.added.values())
        # Models of a family end turns with several tokens: <|im_end|> and <|endoftext|>, of which one is written.
        others = {tokenizer.eos_token_id, *stop_ids} & known - {self.closer_id}
        self.stop_ids: tuple[int, ...] = (*sorted(others), self.closer_id)
        #: Ids that the model must never sample: image and video tokens.
        shown = {image_token, *_VISION_TOKENS} & vocabulary.keys()
        self.suppressed_ids = tuple(sorted(vocabulary[token] for token in shown))
        self._stops = frozenset(self.stop_ids)
        self._suffixes: OrderedDict[tuple[ModelTemplate, Shape], Suffix | None] = OrderedDict()
        self._prompts: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()
        self.image_token_id: int | None = self._find_image_token(image_token)
        # Tried here, so that a template that no stream can follow is refused before step 0.
        for template in dict.fromkeys((self.template, self.tool_template)):
            for role in ("user", "tool"):
                self._suffix_of(template, ((template.role(role), ("str",)),))

    @classmethod
    def from_checkpoint(cls, path: str | Path, template_kwargs: Mapping[str, Any] | None = None) -> Renderer:
        """Read tokenizer, chat template and image processor of a model folder.

        A model without image processor settings reads no images. Raises `UserError` for a missing file and names it.
        """
        parts = read_tokenizer_files(path)
        return cls(parts.tokenizer, parts.images, parts.image_token, template_kwargs, parts.stop_ids)

    @property
    def chat_template(self) -> str:
        """The text of the chat template that describes tools."""
        return self.tool_template.source

    @property
    def teaches_tools(self) -> bool:
        """Whether the model's template describes tools."""
        return self.tool_template.teaches_tools

    def template_for(self, has_tools: bool) -> ModelTemplate:
        """Return the template of a conversation with tools, or of one without."""
        if has_tools:
            return self.tool_template
        return self.template

    @property
    def merge_size(self) -> int:
        """Patches per token along each side; 1 where the model reads no images."""
        if self.images:
            return self.images.merge_size
        return 1

    def save(self, folder: str | Path) -> None:
        """Write tokenizer, chat template and image processor settings into a model folder."""
        self.tokenizer.save_pretrained(folder)
        if self.images:
            self.images.save(folder)

    def _error(self, rule: str, fix: str) -> UserError:
        return UserError("--model", rule, self._name, fix)

    def _find_closer(self) -> str:
        """Return the token with which the template closes a model's turn: its first added token behind the content."""
        try:
            ends = [*self.template.closing(), *self.tool_template.closing()]
        except Exception as error:  # a template raises what it likes
            rule = "must have a chat template that takes a conversation"
            fix = f"fix it ({first_line(error)})"
            raise self._error(rule, fix) from error
        # As text, a control token would be several ids, which the model has never seen as a boundary.
        if missing := control_tokens("".join(ends)) - self.encoder.added.keys():
            rule = f"must have a tokenizer with {' and '.join(sorted(missing))}"
            raise self._error(rule, "add the tokenizer.json that belongs to its chat template")
        closers = {self.encoder.first_added(text) for text in ends}
        closer = closers.pop()
        if closers or closer is None:
            rule = "must have a chat template that closes a model's turn with one special token"
            raise self._error(rule, "take an instruction-tuned model, or fix its chat_template.jinja")
        return closer

    def _find_image_token(self, token: str) -> int | None:
        """Return the id of the placeholder that the template writes for an image; None for a model without images."""
        if self.images is None:
            return None
        content = [{"type": "image"}, {"type": "text", "text": MARK}]
        try:
            texts = [
                each.render([{"role": "user", "content": content}]) for each in (self.template, self.tool_template)
            ]
        except Exception:  # a template of a language model
            return None
        if missing := control_tokens("".join(texts)) - self.encoder.added.keys():
            rule = f"must have a tokenizer with {' and '.join(sorted(missing))}"
            raise self._error(rule, "add the tokenizer.json of the vision-language model")
        # Twice or not at all, and placeholders could not be told apart or counted.
        is_written = token in self.encoder.added and all(text.count(token) == 1 for text in texts)
        if is_written:
            return self.encoder.added[token]
        return None

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), num_given: int | None = None
    ) -> Rendered:
        """Return the tokens that open a stream, ending where the model begins to write.

        From message `num_given` on (None: nowhere), an assistant's messages are the model's own, as in `text`. The
        latest prompts are cached by content, so the samples of a group share one rendering.

        Raises:
            UserError: there is an image and the model reads none, or a system message and the template takes none.
        """
        images = self._process(messages)
        grids = tuple((image.digest, image.grid_thw) for image in images)
        if num_given is None:
            num_given = len(messages)
        key = (tuple(map(content_key, messages)), grids, repr(tools) if tools else "", num_given)
        ids = self._prompts.get(key)
        # Rendering and encoding are the dear part; a key is made of texts that are there.
        if ids is None:
            text = self.text(messages, tools, num_given)
            ids = self._prompts[key] = tuple(self.expand(self.encoder.encode(text), images))
            if len(self._prompts) > MAX_PROMPTS:
                self._prompts.popitem(last=False)
        else:
            self._prompts.move_to_end(key)
        return Rendered(ids, images)

    def prompt_length(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of tokens of `prompt`, which raises the same; no image is processed for it."""
        ids = self.encoder.encode(self.text(messages, tools, len(messages)))
        return len(ids) + sum(store.num_tokens(image) - 1 for store, image in self._images(messages))

    def suffix(self, messages: Sequence[Message], last_id: int, has_tools: bool = False) -> Rendered:
        """Return the tokens between a model turn that ends with `last_id` and the next turn, in an episode with tools.

        These are the closer, if the model did not write it, the environment's messages, and the opening of the turn.

        Raises:
            UserError: there is an image and the model reads none, or the text after a turn depends on what came before
                (`ModelTemplate.check_suffix_is_stable`).
        """
        images = self._process(messages)
        shape: list[tuple[str, tuple[str, ...]]] = []
        texts: list[str] = []
        template = self.template_for(has_tools)
        prepared = [self._prepare(message, template) for message in messages]
        for message in prepared:
            content = message["content"]
            if isinstance(content, str):
                shape.append((message["role"], ("str",)))
                texts.append(content)
            else:
                shape.append((message["role"], tuple(part["type"] for part in content)))
                texts.extend(part["text"] for part in content if part["type"] != "image")
        # A turn that ran out of its budget has no closer; one that ended with another stop id neither.
        is_closed = last_id == self.closer_id
        # A message with more than role and content, such as a tool's name, needs a full rendering.
        if all(len(message) == 2 for message in prepared):
            known = self._suffix_of(template, tuple(shape))
        else:
            known = None
        if known is not None:
            ids = known.ids(self.encoder, texts, is_closed)
        else:
            ids = exact_ids(self.encoder, template.after_turn(prepared), self.closer, is_closed)
        return Rendered(tuple(self.expand(ids, images)), images)

    def _suffix_of(self, template: ModelTemplate, shape: Shape) -> Suffix | None:
        key = (template, shape)
        if key in self._suffixes:
            return self._suffixes[key]
        found = self._suffixes[key] = build_suffix(template, self.encoder, self.closer, shape)
        if len(self._suffixes) > MAX_SHAPES:
            self._suffixes.popitem(last=False)
        return found

    def text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), num_prompt: int | None = None
    ) -> str:
        """Return the template's text of a whole conversation, up to where the model begins to write.

        After an assistant's message it does not open another turn. From message `num_prompt` on (None: from the first),
        an assistant's messages are the model's own and are rendered unchanged, with their control tokens; all others
        are rendered as `prompt` and `suffix` do it.
        """
        start = 0 if num_prompt is None else num_prompt
        messages = list(messages)
        if not messages:
            raise UserError("prompt", "must have a message", "none", "give at least one")
        template = self.template_for(bool(tools))
        prepared = [
            message
            if place >= start and message["role"] == "assistant"
            else self._prepare(message, template, not place)
            for place, message in enumerate(messages)
        ]
        # A server of tools is as strange as a row: its descriptions may hold control tokens.
        tools = [_map_texts(tool, self.encoder.break_control_tokens) for tool in tools]
        if tools and not template.teaches_tools:
            prepared = template.with_tools(prepared, tools)
            tools = []
        if prepared[0]["role"] == "system" and not template.takes_system:
            rule = "must not begin with a system message for this model's template"
            raise UserError("prompt", rule, str(messages[0]["content"]), "put it into the user's message")
        return template.render(prepared, tools, opens_turn=messages[-1]["role"] != "assistant")

    def _prepare(self, message: Message, template: ModelTemplate, is_first: bool = False) -> Message:
        """Return the message with a role that the template knows, and with every control token in its texts broken.

        Neighbouring texts are joined first, because a token may be split over two. The content of a message without
        images becomes a string.
        """
        if is_first:
            role = message["role"]
        else:
            role = template.role(message["role"])
        content = message.get("content") or ""
        if isinstance(content, str):
            content = self.encoder.break_control_tokens(content)
        else:
            parts: list[dict[str, Any]] = []
            for part in content_parts(message):
                if parts and parts[-1]["type"] == part["type"] == "text":
                    parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
                else:
                    parts.append(part)
            parts = [
                {"type": "text", "text": self.encoder.break_control_tokens(p["text"])} if p["type"] == "text" else p
                for p in parts
            ]
            if len(parts) == 1 and parts[0]["type"] == "text":
                content = parts[0]["text"]
            else:
                content = parts or ""
        if len(message) == 2:
            return {"role": role, "content": content}
        others = {key: _map_texts(value, self.encoder.break_control_tokens) for key, value in message.items()}
        return {**others, "role": role, "content": content}

    def _process(self, messages: Sequence[Message]) -> tuple[ProcessedImage, ...]:
        return tuple(store.process(image) for store, image in self._images(messages))

    def _images(self, messages: Sequence[Message]) -> list[tuple[ImageStore, Image.Image]]:
        """Return the images of messages, each with the store that reads it."""
        images = message_images(messages)
        if images and (self.images is None or self.image_token_id is None):
            fix = "this model reads no images: take a vision-language model"
            raise self._error("must read images for a task with images", fix)
        return [(self.images, image) for image in images if self.images]

    def expand(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Sequence[int]:
        """Repeat each image's placeholder once per token of the image."""
        if self.image_token_id is None:
            holes = 0
        else:
            holes = ids.count(self.image_token_id)
        assert holes == len(images), f"the template wrote {holes} image placeholders for {len(images)} images"
        if not images:
            return ids
        waiting = iter(images)
        expanded: list[int] = []
        for token in ids:
            if token == self.image_token_id:
                expanded.extend([token] * next(waiting).num_tokens)
            else:
                expanded.append(token)
        return expanded

    def shown(self, ids: Sequence[int], name: Callable[[int], str] = lambda num_tokens: "<image>") -> str:
        """Return a part of a stream as text for people, with control tokens, and with `name(num_tokens)` for an image.

        Images with nothing between them are shown as one.
        """
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        if self.image_token_id is None:
            return text
        placeholder = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return re.sub(f"(?:{re.escape(placeholder)})+", lambda run: name(len(run[0]) // len(placeholder)), text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a model turn, without its stop token."""
        return self.encoder.decode(ids[:-1] if ids and ids[-1] in self._stops else ids)


def content_key(message: Message) -> tuple[Any, ...]:
    """Return a cache key for a message's role and texts; the caller adds the digests of its images."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = tuple(part["text"] if part["type"] == "text" else None for part in content_parts(message))
    if len(message) > 2:
        others = repr({k: v for k, v in message.items() if k not in ("role", "content")})
    else:
        others = ""
    return message["role"], content, others


def _map_texts(value: Any, change: Any) -> Any:
    """Return a JSON value with `change` applied to every text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value
