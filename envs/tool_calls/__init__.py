r"""Finds the tool calls, also broken ones, in a model's text.

There are two formats. ``hermes`` is ``<tool_call>{"name": "f", "arguments": {"a": "68"}}</tool_call>``, ``qwen_xml`` is
``<tool_call><function=f><parameter=a>68</parameter></function></tool_call>``. No text raises an
error, and the time is linear in the text.
"""

from __future__ import annotations

from envs.tool_calls.formats import call_example, detect_format, find_tool_calls, outside_tool_calls, write_tool_call
from envs.tool_calls.types import TOOL_FORMATS, ToolCall, ToolCallError, ToolFormat

__all__ = [
    "TOOL_FORMATS",
    "ToolCall",
    "ToolCallError",
    "ToolFormat",
    "call_example",
    "detect_format",
    "find_tool_calls",
    "outside_tool_calls",
    "write_tool_call",
]
