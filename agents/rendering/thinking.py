"""Finds the thinking channel of a chat template: by the opening of a turn, and by rendering messages with a thought."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agents.rendering.template import MARK, ModelTemplate
from envs.tool_calls.thinking import TAGS, Thinking, ThinkingSetting
from envs.types import Message

_QUESTION: Message = {"role": "user", "content": "?"}
#: The fields in which messages carry a thought, as templates name them.
_FIELDS = ("reasoning_content", "reasoning", "thinking")


def find_thinking(template: ModelTemplate, setting: ThinkingSetting = "auto") -> Thinking | None:
    """Return how turns are separated into thinking and what is said; None: environments get turns as they are.

    `auto` finds the tags that the template puts around a thought, or with which it opens a turn. A template that opens
    a thought after some messages only, such as a user's, counts as one that opens none.

    Example: the template of Qwen3 gives `Thinking("<think>", "</think>")`, that of Qwen3-VL-Instruct None.
    """
    if setting == "keep":
        return None
    openings = _turn_openings(template)
    for name in TAGS if setting == "auto" else (setting,):
        opening, closing = TAGS[name]
        thinking = Thinking(opening, closing)
        opens = [thinking.is_open_after(text) for text in openings]
        if setting == name or any(opens) or _treats_thoughts(template, opening, closing):
            return replace(thinking, is_opened=all(opens))
    return None


def _turn_openings(template: ModelTemplate) -> list[str]:
    """Return what the template writes after the content of a message, up to where the model begins to write."""
    asked: Message = {"role": "user", "content": MARK}
    answered: Message = {"role": template.role("tool"), "content": MARK}
    texts = [template.render([asked]), template.after_turn([asked]), template.after_turn([answered])]
    return [text.rpartition(MARK)[2] for text in texts]


def _treats_thoughts(template: ModelTemplate, opening: str, closing: str) -> bool:
    """Return whether the template puts these tags around a thought, or drops what is between them in earlier turns."""
    written: Message = {"role": "assistant", "content": f"{opening}\n{MARK}\n{closing}\n\nA"}
    if MARK not in _rendered(template, written, _QUESTION, default=MARK):
        return True
    for message in _messages_with_thoughts():
        before, _, after = _rendered(template, message).partition(MARK)
        if before.rstrip().endswith(opening) and after.lstrip().startswith(closing):
            return True
    return False


def _messages_with_thoughts() -> Iterator[Message]:
    for field in _FIELDS:
        yield {"role": "assistant", "content": "A", field: MARK}
    # Mistral's form.
    yield {"role": "assistant", "content": [{"type": "thinking", "thinking": MARK}, {"type": "text", "text": "A"}]}


def _rendered(template: ModelTemplate, *messages: Message, default: str = "") -> str:
    try:
        return template.render([_QUESTION, *messages], opens_turn=False)
    except Exception:  # the template rejects such a message
        return default
