"""Reads the chat messages of a row, with its decoded images in the places of their placeholders."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.errors import UserError
from envs.images import ImageAccess, held_image, load_image
from envs.types import Message, content_parts

PLACEHOLDER = "<image>"

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class DataKeys:
    """The columns of a data set: prompt, gold answer, and images (optional).

    A dot leads into a column of dicts: `reward_model.ground_truth`.

    Example::

        DataKeys(prompt="question", answer="label", images="image")
    """

    prompt: str = "problem"
    answer: str = "answer"
    images: str = "images"


DEFAULT_KEYS = DataKeys()

#: What data sets often call the columns, by the flag that names another one.
_USUAL_NAMES = {
    "--prompt-key": ("prompt", "question", "problem", "query", "input", "instruction"),
    "--answer-key": ("label", "answer", "solution", "ground_truth", "target", "output"),
    "--image-keys": ("images", "image"),
}


def column_fix(flag: str, key: str, columns: Iterable[str]) -> str:
    """Return the fix for a column that is not there: the flag with the column that is meant, as far as that is known.

    >>> column_fix("--answer-key", "answer", ["prompt", "label"])
    'give --answer-key label'
    """
    there = [*columns]
    meant = [name for name in _USUAL_NAMES[flag] if name in there] or difflib.get_close_matches(key, there, n=1)
    if meant:
        return f"give {shlex.join([flag, meant[0]])}"
    return f"name the column with {flag}"


def read_messages(row: Mapping[str, Any], keys: DataKeys, where: str, access: ImageAccess) -> list[Message]:
    """Return the messages of a row with its images, which stand in the images column or in parts of the messages.

    Raises:
        UserError: the row has no messages, images in both places or bad ones, or other numbers of placeholders and
            images.
    """
    messages = _parse_prompt(row, keys.prompt, where)
    parts = [part for message in messages for part in message["content"]]
    shown = [part["image"] for part in parts if "image" in part]
    field = f"{where} {keys.prompt} image"
    if not shown:
        shown = _image_values(row, keys, where)
        field = f"{where} {keys.images}"
    elif row.get(keys.images):
        rule = f"must have its images in the messages or under '{keys.images}'"
        raise UserError(where, rule, "both", "remove one of the two")
    return _with_images(messages, shown, field, where, access)


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return what a row holds under a key, a dot leading into a dict; None if it holds nothing there."""
    # A column may itself have a dot in its name.
    if key in row or "." not in key:
        return row.get(key)
    column, _, rest = key.partition(".")
    if isinstance(inner := row.get(column), Mapping):
        return value_at(inner, rest)
    return None


def _image_values(row: Mapping[str, Any], keys: DataKeys, where: str) -> list[Any]:
    """Return the values in the row's images column."""
    if keys.images not in row:
        # Without this check, images in a column of another name would silently be ignored.
        others = [name for name in ("image", "images") if row.get(name)]
        others += [name for name, value in row.items() if _is_stored_image(value)]
        if others:
            fix = f"give {shlex.join(['--image-keys', others[0]])}"
            raise UserError(where, f"must hold its images under the images key '{keys.images}'", ", ".join(row), fix)
    value = row.get(keys.images)
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _is_stored_image(value: object) -> bool:
    """Return whether a value is an image as the data sets of Hugging Face store it, or a list of them."""
    # An empty list has no image that could be lost.
    values = value if isinstance(value, list) and value else [value]
    return all(isinstance(item, dict) and "bytes" in item and item.keys() <= {"bytes", "path"} for item in values)


def _parse_prompt(row: Mapping[str, Any], key: str, where: str) -> list[Message]:
    """Return the prompt as messages whose content is a list of parts; a placeholder is a part without an image."""
    prompt = value_at(row, key)
    if prompt is None and key not in row:
        fix = column_fix("--prompt-key", key, row)
        raise UserError(where, f"must hold a prompt under '{key}'", f"keys {', '.join(row)}", fix)
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": _split_placeholders(prompt)}]
    if not isinstance(prompt, list) or not prompt:
        fix = "give a text, or a list of {'role': ..., 'content': ...}"
        raise UserError(f"{where} {key}", "must be a text or a list of messages", prompt, fix)
    messages = [_parse_message(message, f"{where} {key}[{index}]") for index, message in enumerate(prompt)]
    # Some chat templates raise without one, in the middle of a run.
    if all(message["role"] != "user" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{where} {key}", "must hold a user message", f"roles {roles}", "add one")
    return messages


def _parse_message(message: object, field: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise UserError(field, f"must be a message with a role of {', '.join(_ROLES)}", message, "add the role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [slot for part in content for slot in _parse_part(part, field)]
    elif content is None or isinstance(content, str):
        parts = _split_placeholders(content or "")
    else:
        raise UserError(f"{field} content", "must be a text or a list of parts", content, "give a text")
    # A chat template may take a key that is None, such as tool_calls, for one that is there.
    return {**{name: value for name, value in message.items() if value is not None}, "content": parts}


def _parse_part(part: object, field: str) -> list[dict[str, Any]]:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return _split_placeholders(part["text"])
    if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
        return [{"type": "image", "image": part} if held_image(part) else {"type": "image"}]
    fix = "give {'type': 'text', 'text': ...} or {'type': 'image'}, the images in their own column"
    raise UserError(f"{field} content", "must hold text parts and image placeholders", part, fix)


def _split_placeholders(text: str) -> list[dict[str, Any]]:
    """Split a text at its placeholders: "<image>Find x." gives an image part, then a text part."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number > 0:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _with_images(
    messages: Sequence[Message], values: Sequence[Any], field: str, where: str, access: ImageAccess
) -> list[Message]:
    """Return the messages with the images of `values` in the parts for images, or before the first user's text.

    Content without an image becomes a text.
    """
    num_places = sum(part["type"] == "image" for message in messages for part in message["content"])
    if num_places not in (0, len(values)):
        rule = f"must have as many {PLACEHOLDER} placeholders as images"
        got = f"{num_places} placeholders and {len(values)} images"
        raise UserError(where, rule, got, "fix the row, or remove every placeholder to put the images first")
    # After the count: a wrong number of placeholders costs no decoding.
    images = iter([load_image(value, f"{field}[{index}]", access) for index, value in enumerate(values)])
    # Data sets without placeholders show the image before the question.
    unplaced = [{"type": "image"}] * (len(values) - num_places)
    filled: list[Message] = []
    for message in messages:
        parts = message["content"]
        if message["role"] == "user":
            parts = [*unplaced, *parts]
            unplaced = []
        if any(part["type"] == "image" for part in parts):
            content = [{**part, "image": next(images)} if part["type"] == "image" else part for part in parts]
        else:
            content = "".join(part["text"] for part in parts)
        filled.append({**message, "content": content})
    return filled


def add_system_prompt(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """Put the system prompt first; the row's own system message follows in the same message."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    own = messages[0]["content"]
    if isinstance(own, str):
        # Templates know one system message, at the start.
        content: str | list[dict[str, Any]] = f"{system_prompt}\n\n{own}"
    else:
        content = [{"type": "text", "text": f"{system_prompt}\n\n"}, *content_parts(messages[0])]
    return [{**messages[0], "content": content}, *messages[1:]]
