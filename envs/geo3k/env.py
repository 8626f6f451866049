r"""Geometry problems with a tool, ``calc_score``, that scores an answer.

The model may call it as often as its turns allow; the reward is the grade of its last text only.
"""

from __future__ import annotations

import re
from typing import Any

from envs.env import Env, EnvArgs
from envs.errors import UserError
from envs.grading import extract_boxed, get_grader
from envs.tool_calls import ToolCall, ToolCallError
from envs.tool_env import ToolEnv
from envs.tools import ToolError, tool
from envs.types import Sample

SYSTEM_PROMPT = "Solve the problem. Check answers with calc_score. Write the final answer as \\boxed{}."
SINGLE_SYSTEM_PROMPT = "Solve the problem. Write the final answer as \\boxed{}."
LAST_TURN = "Last turn: no more calls, write the final answer as \\boxed{...}."
MAX_ECHO_CHARS = 64

# The result of JSON decoding "\frac", "\boxed", "\times" and "\right" with a single backslash.
_EATEN_BACKSLASH = re.compile(r"[\f\b\t\r](?=[a-z])")
_LATEX_OF_CONTROL = {"\f": "\\f", "\b": "\\b", "\t": "\\t", "\r": "\\r"}


class Geo3kEnv(ToolEnv):
    r"""One problem. Each call returns a score; a turn without a call ends the episode.

    Example::

        env = Geo3kEnv(Sample(id="0", prompt=(), label="68"), EnvArgs(max_turns=3))
        call = '<tool_call>{"name": "calc_score", "arguments": {"answer": "%s"}}</tool_call>'
        env.step(call % 70)[0]["obs_str"]          # "Score 0.0: 70 is wrong. Try another way."
        env.step(call % 68)[0]["obs_str"]          # "Score 1.0: 68 is right. Write the final answer as \boxed{68}."
        env.step("\\boxed{68}")                    # ({}, True, {"tool_calls": []})
        env.reward("\\boxed{68}")                  # 1.0

    The info dict of a step that scored an answer holds tool_score, 1.0 or 0.0.
    """

    aliases = {"calc_geo3k_reward": "calc_score"}  # noqa: RUF012 - read only

    @tool
    def calc_score(self, answer: str) -> str:
        """Score an answer."""
        answer = _EATEN_BACKSLASH.sub(lambda match: _LATEX_OF_CONTROL[match.group()], answer)
        answer = (extract_boxed(answer) or answer).strip()
        if not answer:
            raise ToolError(self.explain(ToolCall("calc_score", {}), '"answer" must not be empty.'), "bad_arguments")
        score = get_grader(self.args.grader)(answer, str(self.sample.label))
        self.info["tool_score"] = score
        shown = _echo(answer)
        if score == 1.0:
            boxed = shown if shown == answer else "..."
            return f"Score 1.0: {shown} is right. Write the final answer as \\boxed{{{boxed}}}."
        return f"Score 0.0: {shown} is wrong. {LAST_TURN if self.turns_left == 1 else 'Try another way.'}"

    def explain(self, call: ToolCall | ToolCallError, problem: str) -> str:
        """Return the answer to a broken call; before the last turn it asks for the final answer instead of a call."""
        if self.turns_left == 1:
            return f"{problem} {LAST_TURN}"
        return super().explain(call, problem)


class Geo3kSingleEnv(ToolEnv):
    """The same problems without a tool: the model's one turn is its answer."""


def build_env(sample: Sample | None = None, args: Any | None = None, **_: Any) -> Env:
    """Return the environment of one sample.

    Raises UserError if the sample or its label is missing.
    """
    if sample is None:
        raise UserError("sample", "is required", None, "pass the row whose problem is to be solved")
    if sample.label is None or not str(sample.label).strip():
        fix = "give the row a non-empty answer column"
        raise UserError("answer", f"sample {sample.id!r} needs a gold answer", sample.label, fix)
    return Geo3kEnv(sample, args or EnvArgs(max_turns=3, tool_calls="last"))


def _echo(answer: str) -> str:
    """Return the model's answer in a form that is safe to show: short, one line, without special tokens.

    ``<|im_end|>`` or ``<|image_pad|>`` in a tool's text would become a control token of the stream.
    """
    printable = "".join(char if char.isprintable() else " " for char in answer[:MAX_ECHO_CHARS])
    shown = re.sub(r"<(?=[|/a-zA-Z])", "< ", " ".join(printable.split()))
    if len(answer) <= MAX_ECHO_CHARS:
        return shown
    return shown + "..."
