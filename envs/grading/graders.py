r"""The graders by name: a model's final text and a label come in, 1.0 or 0.0 goes out.

- `math`, the default: the last `\boxed{}`, else what follows `Answer:`; right where it means the same as the label.
- `geo3k_strict`: the last `\boxed{}` alone; right where it is the label's text or the same rational number.
- `geo3k_tolerance`: as `math`, and a real number within 5 % of the label is right too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from envs.errors import UserError, did_you_mean
from envs.grading.equality import same_text_or_rational, same_value, within_5_percent
from envs.grading.extraction import extract_answer, extract_boxed
from envs.grading.normal_form import Reading, read

GraderName = Literal["math", "geo3k_strict", "geo3k_tolerance"]

MAX_CHARS = 200


@dataclass(frozen=True)
class Grader:
    r"""One rule of grading.

    Example::

        GRADERS["math"](r"\sqrt{50}", r"5 \sqrt { 2 }")              # 1.0
        GRADERS["geo3k_strict"](r"\sqrt{50}", r"5 \sqrt { 2 }")      # 0.0
        GRADERS["geo3k_strict"].extract("Answer: 5")                 # None: only a box counts
    """

    name: GraderName
    is_equal: Callable[[Reading, Reading], bool]
    boxed_only: bool = False

    def __call__(self, answer: str, label: str) -> float:
        """Return 1.0 where the answer is right, else 0.0; no text makes it raise, and it needs no main thread.

        An answer or label of more than 200 characters counts only if both have the same words.
        """
        if len(answer) > MAX_CHARS or len(label) > MAX_CHARS:
            return float(bool(label.strip()) and answer.split() == label.split())
        given, gold = read(answer), read(label)
        return float(bool(given.form) and bool(gold.form) and self.is_equal(given, gold))

    def extract(self, text: str) -> str | None:
        """Return the answer that a text states in the way this grader asks for, None where it states none."""
        return extract_boxed(text) if self.boxed_only else extract_answer(text)


def _same_value_or_near(answer: Reading, label: Reading) -> bool:
    return within_5_percent(answer, label) or same_value(answer, label)


GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "math": Grader("math", same_value),
        "geo3k_strict": Grader("geo3k_strict", same_text_or_rational, boxed_only=True),
        "geo3k_tolerance": Grader("geo3k_tolerance", _same_value_or_near),
    }
)


def get_grader(name: str) -> Grader:
    """Return the grader of a name.

    Raises:
        UserError: there is none of that name.
    """
    if name not in GRADERS:
        raise UserError("grader", "must be the name of a grader", name, did_you_mean(name, GRADERS))
    return GRADERS[name]


def grade(answer: str, label: str) -> float:
    r"""Return 1.0 where `answer` means the same as `label`, else 0.0: the grader `math`.

    Policy: degree and percent signs, units of length and area, `$`, `x =` and thousands commas carry no value, so
    ``37.5\%`` equals ``37.5`` and ``12 cm`` equals ``12``. Two rationals must be equal exactly; where one side is
    irrational a relative difference of 1e-6 is allowed. ``(1,2)`` and ``[1,2]`` differ; a bare list has no order.
    ``(B)``, ``B.`` and ``(B) 12 cm`` equal the choice ``B``. An answer of more than 200 characters, or one that
    math-verify does not settle in 2 s, counts only if it is the label's own text.

    >>> grade(r"\frac{1}{2}", "0.5"), grade(r"\sqrt{50}", r"5 \sqrt { 2 }"), grade("3", "300")
    (1.0, 1.0, 0.0)
    """
    return GRADERS["math"](answer, label)


def score_text(final_text: str, label: str, grader: str = "math") -> float:
    r"""Return the score of the final text that a model wrote: 1.0 where the answer that it states is right, else 0.0.

    Raises:
        UserError: `grader` is no name in `GRADERS`.

    >>> score_text(r"So it is \boxed{68^\circ}.", "68"), score_text("It is 68.", "68")
    (1.0, 0.0)
    >>> score_text("Answer: 68", "68"), score_text("Answer: 68", "68", "geo3k_strict")
    (1.0, 0.0)
    """
    rule = get_grader(grader)
    answer = rule.extract(final_text)
    return 0.0 if answer is None else rule(answer, label)
