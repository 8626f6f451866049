"""Plans what a demonstration shows: the turns of a made-up policy with some habits, on one problem.

The turns of a plan give texts for the agent loop to play, and messages for a file.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from envs.geo3k.problem import Problem, misread
from envs.types import Message

MAX_TURNS = 3


@dataclass(frozen=True)
class Mixture:
    """Shares of each habit among the demonstrations; the defaults teach reading, reasoning, checking and correcting."""

    tools_offered: float = 0.85  # of all: the prompt lists the tool
    reasons: float = 1.0  # of all: the steps are written before the answer
    checks: float = 0.3  # of those with the tool: the answer is checked before it is given
    first_wrong: float = 0.5  # of those that check: the first attempt misreads one number
    second_wrong: float = 0.3  # of those that try again: the second attempt misreads too
    gives_up: float = 0.0  # of those whose first attempt is wrong: it is still given as the final answer


MIXED_HABITS = Mixture(reasons=0.3, gives_up=0.5)


@dataclass(frozen=True)
class PlannedTurn:
    r"""One turn: a thought, then the answer, given to `calc_score` or as the final one.

    Example: the text of `PlannedTurn("180 - 112 = 68. ", "68", is_call=False, is_taught=True)` is
    "180 - 112 = 68. \boxed{68}".
    """

    thought: str
    answer: str
    is_call: bool
    is_taught: bool

    @property
    def text(self) -> str:
        """The text that the model should write."""
        return self.thought + (tool_call(self.answer) if self.is_call else self._final)

    @property
    def message(self) -> Message:
        """The turn as a message, with `train: False` if it is not taught."""
        content = self.thought + ("" if self.is_call else self._final)
        message: Message = {"role": "assistant", "content": content}
        if self.is_call:
            call = {"name": "calc_score", "arguments": {"answer": self.answer}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message if self.is_taught else {**message, "train": False}

    @property
    def _final(self) -> str:
        return f"\\boxed{{{self.answer}}}"


@dataclass(frozen=True)
class Plan:
    """The attempts of one demonstration, in order, and its habits.

    A wrong attempt misreads the problem: it is shown as context, and never taught.
    """

    attempts: tuple[Problem, ...]
    use_tools: bool
    reasons: bool
    checks: bool
    gives_up: bool

    @classmethod
    def draw(cls, problem: Problem, mixture: Mixture, rng: random.Random) -> Plan:
        """Return a plan for a problem, with habits sampled from a mixture."""
        use_tools = rng.random() < mixture.tools_offered
        reasons = rng.random() < mixture.reasons
        checks = use_tools and rng.random() < mixture.checks
        wrong = misread(problem, rng) if checks and rng.random() < mixture.first_wrong else None
        if wrong is None:
            return cls((problem,), use_tools, reasons, checks, gives_up=False)
        if rng.random() < mixture.gives_up:
            return cls((wrong,), use_tools, reasons, checks, gives_up=True)
        again = misread(problem, rng) if rng.random() < mixture.second_wrong else None
        attempts = (wrong, problem) if again is None else (wrong, again, problem)
        return cls(attempts, use_tools, reasons, checks, gives_up=False)

    def turns(self) -> list[PlannedTurn]:
        """Return every model turn in order."""
        thoughts = [f"{attempt.reasoning} " if self.reasons else "" for attempt in self.attempts]
        last = self.attempts[-1]
        if not self.checks:
            return [PlannedTurn(thoughts[-1], last.answer, is_call=False, is_taught=True)]
        calls = [
            PlannedTurn(thought, attempt.answer, is_call=True, is_taught=attempt is last and not self.gives_up)
            for thought, attempt in zip(thoughts, self.attempts, strict=True)
        ]
        # The last turn cannot call, so a third attempt reasons and answers in one turn.
        thought = thoughts[-1] if len(self.attempts) == MAX_TURNS else ""
        return [*calls[: MAX_TURNS - 1], PlannedTurn(thought, last.answer, is_call=False, is_taught=True)]


def tool_call(answer: str) -> str:
    """Return the call of `calc_score` that the model should write."""
    return f"<tool_call>{json.dumps({'name': 'calc_score', 'arguments': {'answer': answer}})}</tool_call>"
