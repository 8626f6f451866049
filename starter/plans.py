"""Plans what a demonstration shows: the turns of a made-up policy with some habits, on one problem."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.geo3k.problem import Problem, misread, read_as
from envs.types import Message

MAX_TURNS = 3
#: Most zooms of a demonstration of `geo3k_zoom`; the turn after them answers.
ZOOMS = 3
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Mixture:
    """Shares of each habit among the demonstrations; the defaults teach reading, reasoning, checking and correcting."""

    tools_offered: float = 0.85  # of all: the prompt lists the tool
    reasons: float = 1.0  # of all: the steps are written before the answer
    checks: float = 0.3  # of those with the tool: the answer is checked before it is given
    first_wrong: float = 0.5  # of those that check: the first attempt misreads one number
    second_wrong: float = 0.3  # of those that try again: the second attempt misreads too
    gives_up: float = 0.0  # of those whose first attempt is wrong: it is still given as the final answer
    corrects: bool = False  # the attempt after a wrong one begins with what was wrong, and reasons


MIXED_HABITS = Mixture(reasons=0.3, gives_up=0.5)


@dataclass(frozen=True)
class Attempt:
    """What is written before an answer, and the answer.

    Example: `Attempt("180 - 112 = 68. ", "68")`.
    """

    thought: str
    answer: str

    @classmethod
    def at(cls, problem: Problem, reasons: bool, after: Sequence[Attempt] = ()) -> Attempt:
        """Return the solution of a problem; after wrong attempts, it begins with what was wrong with the last."""
        thought = f"{problem.reasoning} " if reasons else ""
        return cls(f"{correction(after[-1], problem)} {thought}" if after else thought, problem.answer)


@dataclass(frozen=True)
class PlannedTurn:
    """One turn: what is written, and a call after it. A turn that is not taught is context of later ones.

    Example: `PlannedTurn("180 - 112 = 68. ", score_call("68"))`.
    """

    content: str
    call: Mapping[str, Any] | None = None
    is_taught: bool = True

    @property
    def text(self) -> str:
        """The text that the model should write."""
        return self.content + (written(self.call) if self.call else "")

    @property
    def message(self) -> Message:
        """The turn as a message, with `train: False` if it is not taught."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.call:
            message["tool_calls"] = [{"type": "function", "function": self.call}]
        return message if self.is_taught else {**message, "train": False}


@dataclass(frozen=True)
class Plan:
    """The attempts of one demonstration, in order, and its habits.

    All attempts but the last are wrong, and with `gives_up` the last one is too. A wrong attempt is shown as context,
    and never taught.
    """

    attempts: tuple[Attempt, ...]
    use_tools: bool
    checks: bool
    gives_up: bool = False

    @classmethod
    def draw(cls, problem: Problem, mixture: Mixture, rng: random.Random) -> Plan:
        """Return a plan for a problem, with habits sampled from a mixture."""
        use_tools = rng.random() < mixture.tools_offered
        reasons = rng.random() < mixture.reasons
        checks = use_tools and rng.random() < mixture.checks
        first = _other_reading(problem, rng) if checks and rng.random() < mixture.first_wrong else None
        if first is None:
            return cls((Attempt.at(problem, reasons),), use_tools, checks)
        wrong = [Attempt.at(first, reasons)]
        if rng.random() < mixture.gives_up:
            return cls(tuple(wrong), use_tools, checks, gives_up=True)
        again = misread(problem, rng) if rng.random() < mixture.second_wrong else None
        if again is not None:
            wrong.append(Attempt.at(again, reasons))
        reasons = reasons or mixture.corrects
        after = wrong if mixture.corrects else ()
        return cls((*wrong, Attempt.at(problem, reasons, after)), use_tools, checks)

    @classmethod
    def after(cls, wrong: Sequence[Attempt], problem: Problem, mixture: Mixture, rng: random.Random) -> Plan:
        """Return a plan that goes on after wrong attempts, which somebody made: to the solution, or giving up."""
        if rng.random() < mixture.gives_up:
            return cls(tuple(wrong), use_tools=True, checks=True, gives_up=True)
        return cls((*wrong, Attempt.at(problem, True, wrong)), use_tools=True, checks=True)

    def turns(self) -> list[PlannedTurn]:
        """Return every model turn in order."""
        last = self.attempts[-1]
        if not self.checks:
            return [PlannedTurn(last.thought + boxed(last.answer))]
        calls = [
            PlannedTurn(a.thought, score_call(a.answer), is_taught=a is last and not self.gives_up)
            for a in self.attempts
        ]
        # The last turn cannot call, so a third attempt reasons and answers in one turn.
        thought = last.thought if len(self.attempts) == MAX_TURNS else ""
        return [*calls[: MAX_TURNS - 1], PlannedTurn(thought + boxed(last.answer))]


def _other_reading(problem: Problem, rng: random.Random) -> Problem | None:
    """Return the problem misread: as its image can be read too, if it is overprinted."""
    return read_as(problem, problem.rival) if problem.rival else misread(problem, rng)


def correction(wrong: Attempt, problem: Problem) -> str:
    """Return how the attempt after a wrong one begins: with what was wrong with it.

    A guess is followed by the steps, a misread number by another reading, a wrong sum by another sum, and anything else
    by another way. What fits depends on the image, so it can be learnt by looking only.

    >>> problem = Problem("triangle_angles", 3, (47, 65), "x", "Find x.", "68", "47 + 65 = 112. 180 - 112 = 68.")
    >>> correction(Attempt("41 + 65 = 106. 180 - 106 = 74. ", "74"), problem)
    'Look again: 47.'
    >>> correction(Attempt("47 + 65 = 102. 180 - 102 = 78. ", "78"), problem)
    'Compute again.'
    """
    seen = _NUMBER.findall(wrong.thought)
    if not seen:
        return "Step by step."
    if unread := [str(given) for given in dict.fromkeys(problem.givens) if str(given) not in seen]:
        return f"Look again: {', '.join(unread)}."
    first = wrong.thought.split("=")[0].strip()
    return "Compute again." if problem.reasoning.startswith(first) else "Another way."


def zoom_windows(boxes: Sequence[tuple[int, int, int, int]], width: int, height: int) -> list[tuple[int, int]]:
    """Return the left and top edges, in thousandths, of windows of half an image's sides that show all labels.

    Each is the one among 36 that shows most labels which no window before it shows; at most `ZOOMS`.
    """
    unseen = [
        (1000 * left / width, 1000 * top / height, 1000 * right / width, 1000 * bottom / height)
        for left, top, right, bottom in boxes
    ]
    places = [(x, y) for y in range(0, 501, 100) for x in range(0, 501, 100)]
    windows: list[tuple[int, int]] = []
    while unseen and len(windows) < ZOOMS:
        best = max(places, key=lambda place: sum(_shows(place, box) for box in unseen))
        if not any(_shows(best, box) for box in unseen):
            break
        windows.append(best)
        unseen = [box for box in unseen if not _shows(best, box)]
    return windows


def _shows(place: tuple[int, int], box: tuple[float, float, float, float]) -> bool:
    x, y = place
    return x <= box[0] and y <= box[1] and box[2] <= x + 500 and box[3] <= y + 500


def zoom_call(left: int, top: int) -> dict[str, Any]:
    """Return the call of `zoom` for a window of half the image's sides."""
    return {"name": "zoom", "arguments": {"left": left, "top": top, "right": left + 500, "bottom": top + 500}}


def score_call(answer: str) -> dict[str, Any]:
    """Return the call of `calc_score` for an answer."""
    return {"name": "calc_score", "arguments": {"answer": answer}}


def written(call: Mapping[str, Any]) -> str:
    """Return a call as the model should write it."""
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def boxed(answer: str) -> str:
    """Return a final answer as the model should write it."""
    return f"\\boxed{{{answer}}}"
