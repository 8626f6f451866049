"""Pairs of an answer and a label with the right verdict, and graders that judge them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.grading import grade

PAIRS = Path(__file__).with_name("graded_pairs.txt")


@dataclass(frozen=True)
class Pair:
    r"""An answer, the label that it is compared with, and whether it is right.

    Example: ``Pair("fractions", "0.75", r"\frac{3}{4}", is_right=True)``.
    """

    kind: str
    answer: str
    label: str
    is_right: bool


def read_pairs(path: Path = PAIRS) -> Iterator[Pair]:
    """Yield the pairs of a table; its head says how it is written."""
    kind = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        label, _, answers = line.partition(" == ")
        if line.startswith("#") or not answers:
            kind = line.strip("[]") if line.startswith("[") else kind
            continue
        right, _, wrong = answers.partition(" <> ")
        yield from (Pair(kind, answer, label, True) for answer in right.split(" ;; "))
        yield from (Pair(kind, answer, label, False) for answer in wrong.split(" ;; "))


def ours(answer: str, label: str) -> bool:
    """Return the verdict of the grader `math`."""
    return grade(answer, label) == 1.0


def math_verify(answer: str, label: str) -> bool:
    """Return math-verify's verdict with its own configuration; both texts are boxed, as a model writes them."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{label}}}"), parse(f"\\boxed{{{answer}}}")))


def mathruler(answer: str, label: str) -> bool:
    """Return mathruler's verdict."""
    from mathruler.grader import grade_answer  # type: ignore[import-not-found]

    return bool(grade_answer(answer, label))


def graders() -> dict[str, Callable[[str, str], bool]]:
    """Return the graders that are installed, by name."""
    found = {"trueturn": ours, "math-verify": math_verify}
    return found | ({"mathruler": mathruler} if importlib.util.find_spec("mathruler") else {})
