r"""The graders by name: each scores a model's final text against a label, 1.0 or 0.0.

- `math`, the default: the last `\boxed{}`, else the text after `Answer:`; right if it means the same as the label.
- `geo3k_strict`: only the last `\boxed{}`; right if it is the label's text or the same rational number.
- `geo3k_tolerance`: like `math`, but a real number within 5 % of the label is right too.
- `module:NAME` or `file.py:NAME`: a function of yours, called with the answer and the label.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Annotated, Literal

from envs.config.plugins import Plugin, import_cause, is_reference, place_of
from envs.errors import UserError, did_you_mean, quoted
from envs.grading.equality import same_text_or_rational, same_value, within_5_percent
from envs.grading.extraction import extract_answer, extract_boxed
from envs.grading.normal_form import Reading, read
from envs.off_loop import awaited

GraderName = Literal["math", "geo3k_strict", "geo3k_tolerance"]
GRADER = Plugin("a grader", ("answer", "label"))
#: A grader in a setting: one of ours by name, or one of the user's.
GraderReference = GraderName | Annotated[str, GRADER]

MAX_CHARS = 200


@dataclass(frozen=True)
class Grader:
    r"""One grading rule.

    Example::

        GRADERS["math"](r"\sqrt{50}", r"5 \sqrt { 2 }")              # 1.0
        GRADERS["geo3k_strict"](r"\sqrt{50}", r"5 \sqrt { 2 }")      # 0.0
        GRADERS["geo3k_strict"].extract("Answer: 5")                 # None: only a box counts
    """

    name: GraderName
    is_equal: Callable[[Reading, Reading], bool]
    boxed_only: bool = False

    def __call__(self, answer: str, label: str) -> float:
        """Return 1.0 if the answer is right, else 0.0. No text raises an error, and any thread may call it.

        If the answer or the label has more than 200 characters, only the same words are right.
        """
        # The readers take quadratic time.
        if len(answer) > MAX_CHARS or len(label) > MAX_CHARS:
            return float(bool(label.strip()) and answer.split() == label.split())
        given = read(answer)
        gold = read(label)
        return float(bool(given.form) and bool(gold.form) and self.is_equal(given, gold))

    def extract(self, text: str) -> str | None:
        """Return the answer in a text in the form that this grader expects; None if there is none."""
        if self.boxed_only:
            return extract_boxed(text)
        return extract_answer(text)


@dataclass(frozen=True)
class OwnGrader:
    """A user's function as a grader: `function(answer, label)`, which may be async, returns a score from 0 to 1.

    The answer is the text of the last `\\boxed{}`, else that after `Answer:`, else the whole text.
    """

    name: str
    function: Callable[[str, str], float | Awaitable[float]]

    def __call__(self, answer: str, label: str) -> float:
        """Return the score. Raises ValueError if the function raises, or returns no number from 0 to 1."""
        try:
            score: object = awaited(self.function(answer, label))
        except Exception as error:
            raise ValueError(f"grader '{self.name}' must not raise, got {import_cause(error)}") from error
        if not isinstance(score, Real) or not 0 <= float(score) <= 1:
            rule = f"grader '{self.name}' must return a number from 0 to 1, got {quoted(score)}"
            raise ValueError(f"{rule} ({place_of(self.function)})")
        return float(score)

    def extract(self, text: str) -> str:
        """Return the answer in a text."""
        return extract_answer(text) or text


def _same_value_or_near(answer: Reading, label: Reading) -> bool:
    return within_5_percent(answer, label) or same_value(answer, label)


GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "math": Grader("math", same_value),
        "geo3k_strict": Grader("geo3k_strict", same_text_or_rational, boxed_only=True),
        "geo3k_tolerance": Grader("geo3k_tolerance", _same_value_or_near),
    }
)


def get_grader(name: str) -> Grader | OwnGrader:
    """Return the grader with this name, or that a reference names.

    Raises:
        UserError: there is no such grader.
    """
    if name in GRADERS:
        return GRADERS[name]
    if is_reference(name):
        return OwnGrader(name, GRADER.load("grader", name))
    raise UserError("grader", "must be the name of a grader", name, did_you_mean(name, GRADERS))


def grade(answer: str, label: str) -> float:
    r"""Return 1.0 if `answer` means the same as `label`, else 0.0: the grader `math`.

    Policy: degree and percent signs, units of length and area, `$`, `x =` and thousands commas carry no value, so
    ``37.5\%`` equals ``37.5`` and ``12 cm`` equals ``12``; inside a sine a degree sign counts. Two rationals must be
    equal, up to the rounding of a float: 3.3 equals 3.3000000000000003 (12 significant digits; integers are exact). If
    one side is irrational, a decimal of six digits or more may differ by a relative 1e-6. ``(1,2)``
    and ``[1,2]`` differ; a bare list has no order; ``\pm 5`` is the list ``5, -5``. Matrices are equal cell by cell.
    ``(B)``, ``B.`` and ``(B) 12 cm`` equal the choice ``B``. An answer of more than 200 characters, or one that
    math-verify cannot decide in 2 s, is right only if it is the label's own text.

    >>> grade(r"\frac{1}{2}", "0.5"), grade(r"\sqrt{50}", r"5 \sqrt { 2 }"), grade("3", "300")
    (1.0, 1.0, 0.0)
    """
    return GRADERS["math"](answer, label)


def score_text(final_text: str, label: str, grader: str = "math") -> float:
    r"""Return the score of a model's final text: 1.0 if its answer is right, else 0.0.

    Raises:
        UserError: `grader` is not in `GRADERS`.

    >>> score_text(r"So it is \boxed{68^\circ}.", "68"), score_text("It is 68.", "68")
    (1.0, 0.0)
    >>> score_text("Answer: 68", "68"), score_text("Answer: 68", "68", "geo3k_strict")
    (1.0, 0.0)
    """
    rule = get_grader(grader)
    answer = rule.extract(final_text)
    if answer is None:
        return 0.0
    return rule(answer, label)
