"""Types for tool calls in a model's text: calls, broken calls, and all calls of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

ToolFormat = Literal["hermes", "qwen_xml"]
TOOL_FORMATS: tuple[str, ...] = get_args(ToolFormat)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
# Calls read per turn; each has a fixed cost, however short it is.
MAX_CALLS = 64


@dataclass(frozen=True)
class ToolCall:
    """A call by the model: ``ToolCall(name="calc_score", arguments={"answer": "68"})``."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolCallError:
    """A call that cannot be made.

    `reason` is one short sentence for the model: ``Bad JSON: Expecting value.`` `kind` is "truncated" if the text ends
    inside the call, for example at a token limit::

        '<tool_call>{"name": "f", "argu'                ToolCallError("The JSON ends too early.", "truncated")
        '<tool_call>{"name": "f"</tool_call>'           ToolCallError("The JSON ends too early.", "malformed")
    """

    reason: str
    kind: Literal["malformed", "truncated"] = "malformed"


TOO_MANY_CALLS = ToolCallError(f"Only {MAX_CALLS} calls are read in one turn.")


@dataclass(frozen=True)
class TurnCalls:
    """All calls of one turn and their position.

    Example, for the text ``So <tool_call>{"name": "f", "arguments": {}}</tool_call>.``::

        TurnCalls(found=(ToolCall("f", {}),), start=3, end=60)

    ``text[:start]`` precedes the first call and ``text[end:]`` follows the last.
    """

    found: tuple[ToolCall | ToolCallError, ...]
    start: int
    end: int
