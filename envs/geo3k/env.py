r"""Geometry problems with a tool that scores an answer: a sample comes in, observations and a reward go out.

The model may call ``calc_score`` as often as its turns allow; the reward is the grade of its last text alone.
"""

from __future__ import annotations

import re
from typing import Any

from envs.env import Env
from envs.errors import UserError
from envs.grading import extract_answer, extract_boxed, grade
from envs.tool_calls import ToolCall, ToolCallError, outside_tool_calls, parse_tool_call
from envs.types import Sample

SYSTEM_PROMPT = "Solve the problem. Check answers with calc_score. Write the final answer as \\boxed{}."
TOOL_NAMES = ("calc_score", "calc_geo3k_reward")
HOW_TO_CALL = 'Call {"name": "calc_score", "arguments": {"answer": "..."}}.'
LAST_TURN = "Last turn: no more calls, write the final answer as \\boxed{...}."
MAX_ECHO_CHARS = 64

# What JSON makes of "\frac", "\boxed", "\times" and "\right" with a single backslash.
_EATEN_BACKSLASH = re.compile(r"[\f\b\t\r](?=[a-z])")
_LATEX_OF_CONTROL = {"\f": "\\f", "\b": "\\b", "\t": "\\t", "\r": "\\r"}


class Geo3kEnv(Env):
    r"""One problem. Each call is answered with a score; a turn without a call ends the episode.

    Example::

        env = Geo3kEnv(label="68", max_turns=3)
        call = '<tool_call>{"name": "calc_score", "arguments": {"answer": "%s"}}</tool_call>'
        env.step(call % 70)[0]["obs_str"]          # "Score 0.0: 70 is wrong. Try another way."
        env.step(call % 68)[0]["obs_str"]          # "Score 1.0: 68 is right. Write the final answer as \boxed{68}."
        env.step("\\boxed{68}")                    # ({}, True, {"tool_call": None, "tool_outcome": "none", ...})
        env.reward("\\boxed{68}")                  # 1.0

    The info dict of a step holds tool_call ({"name", "arguments"} or None), tool_name, tool_outcome ("ok", "malformed",
    "unknown_tool", "bad_arguments" or "none") and tool_score (1.0, 0.0, or None where nothing was scored).
    """

    tools = (
        {
            "type": "function",
            "function": {
                "name": TOOL_NAMES[0],
                "description": "Score an answer.",
                "parameters": {
                    "type": "object",
                    "properties": {"answer": {"type": "string"}},
                    "required": ["answer"],
                },
            },
        },
    )

    def __init__(self, label: str, max_turns: int | None = None) -> None:
        """Take the gold answer and the loop's turn limit, which is only announced, never enforced (None: no limit)."""
        self.label = label
        self.max_turns = max_turns
        self.turn = 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start over; the problem is in the prompt, so the observation is empty."""
        self.turn = 0
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Take one turn of the model: a call, also a broken one, is answered; a text without one ends the episode.

        Never raises, and takes time linear in the text.
        """
        self.turn += 1
        call = parse_tool_call(response_text)
        if call is None:
            return {}, True, _info(None, "none", None)
        if isinstance(call, ToolCallError):
            return self._reply(None, "malformed", call.reason)
        if call.name not in TOOL_NAMES:
            return self._reply(call, "unknown_tool", "Unknown tool.")
        answer = _answer_text(call.arguments.get("answer"))
        if answer is None:
            return self._reply(call, "bad_arguments", '"answer" must be a non-empty string.')
        score = grade(answer, self.label)
        shown = _echo(answer)
        if score == 1.0:
            boxed = shown if shown == answer else "..."
            advice = f"Write the final answer as \\boxed{{{boxed}}}."
            return self._reply(call, "ok", f"Score 1.0: {shown} is right.", advice, advice, score)
        return self._reply(call, "ok", f"Score 0.0: {shown} is wrong.", "Try another way.", LAST_TURN, score)

    def _reply(
        self,
        call: ToolCall | None,
        outcome: str,
        finding: str,
        advice: str = HOW_TO_CALL,
        last_advice: str = LAST_TURN,
        score: float | None = None,
    ) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Return the step's result for a call; `last_advice` is for when one model turn is left."""
        is_last_next = self.max_turns is not None and self.max_turns - self.turn == 1
        text = f"{finding} {last_advice if is_last_next else advice}"
        return {"obs_str": text, "role": "tool", "tool_score": score}, False, _info(call, outcome, score)

    def reward(self, final_text: str) -> float:
        r"""Return 1.0 if the final answer in the model's last text is right, else 0.0; never raises.

        What stands inside a tool call is no final answer. A last text with a call therefore counts only if it has a
        `\boxed{...}` before or after the call; ``Answer: 68`` beside a call does not count.
        """
        if parse_tool_call(final_text) is None:
            answer = extract_answer(final_text)
        else:
            answer = extract_boxed(outside_tool_calls(final_text))
        return 0.0 if answer is None else grade(answer, self.label)


def build_env(sample: Sample | None = None, args: Any | None = None, **_: Any) -> Env:
    """Return the environment of one sample; `args.max_turns`, where present, is announced before the last turn.

    Raises UserError where the sample or its label is missing.
    """
    if sample is None:
        raise UserError("sample", "is required", None, "pass the row whose problem is to be solved")
    if sample.label is None or not str(sample.label).strip():
        fix = "give the row a non-empty answer column"
        raise UserError("answer", f"sample {sample.id!r} needs a gold answer", sample.label, fix)
    return Geo3kEnv(str(sample.label), getattr(args, "max_turns", None))


def _info(call: ToolCall | None, outcome: str, score: float | None) -> dict[str, Any]:
    return {
        "tool_call": None if call is None else {"name": call.name, "arguments": call.arguments},
        "tool_name": None if call is None else call.name,
        "tool_outcome": outcome,
        "tool_score": score,
    }


def _answer_text(argument: Any) -> str | None:
    """Return the answer argument as text without a box around it, or None where it is empty or no string or number."""
    if isinstance(argument, bool) or not isinstance(argument, str | int | float):
        return None
    text = _EATEN_BACKSLASH.sub(lambda match: _LATEX_OF_CONTROL[match.group()], str(argument))
    return (extract_boxed(text) or text).strip() or None


def _echo(answer: str) -> str:
    """Return the model's answer as it may be shown back: short, one line, and without the spelling of special tokens.

    ``<|im_end|>`` or ``<|image_pad|>`` in a tool's text would become a control token of the stream.
    """
    cut = answer[:MAX_ECHO_CHARS].encode("utf-8", "replace").decode()
    printable = "".join(char if char.isprintable() else " " for char in cut)
    shown = re.sub(r"<(?=[|/a-zA-Z])", "< ", " ".join(printable.split()))
    return shown if len(answer) <= MAX_ECHO_CHARS else shown + "..."
