"""Finds the thinking channel of a chat template: by the opening of a turn, and by rendering messages with a thought."""

from __future__ import annotations

from collections.abc import Iterator

from agents.rendering.template import MARK, ModelTemplate
from envs.thinking import TAGS, Thinking, ThinkingSetting
from envs.types import Message

_QUESTION: Message = {"role": "user", "content": "?"}
#: The fields in which messages carry a thought: of Qwen3 and DeepSeek, of vLLM's API, of gpt-oss.
_FIELDS = ("reasoning_content", "reasoning", "thinking")


def find_thinking(template: ModelTemplate, setting: ThinkingSetting = "auto") -> Thinking | None:
    """Return how turns are separated into thinking and what is said; None: environments get turns as they are.

    `auto` finds the tags that the template puts around a thought, or with which it opens a turn.

    Example: Qwen3-VL-Thinking gives `Thinking("<think>", "</think>", is_opened=True)`, Qwen3-VL-Instruct None.
    """
    if setting == "keep":
        return None
    opened = template.render([{"role": "user", "content": MARK}]).rpartition(MARK)[2]
    for name in TAGS if setting == "auto" else (setting,):
        opening, closing = TAGS[name]
        is_opened = opened.rfind(opening) > opened.rfind(closing)
        if is_opened or setting == name or _treats_thoughts(template, opening, closing):
            return Thinking(opening, closing, is_opened)
    return None


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
