"""The interface of a theorem, and the wording of a problem about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import ClassVar

from envs.geo3k.families import family
from envs.geo3k.families.arithmetic import divide
from envs.geo3k.families.family import Case, Givens, Solution, require, solve_angle
from starter.textbook.figure import WHOLES, Figure, Label, expression, with_unit

ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ"
VARIABLES = "xxxxxyzabn"
TRIES = 300

#: Shares of problems, or of their labels, with something that real diagrams have at times.
LETTERED = 0.85
ASKED_BY_NAME = 0.5
ASKED_BY_NUMBER = 0.15
TOLD = 0.35
WITH_SPARE = 0.3
WITH_OTHERS = 0.35
#: Angles are multiples of this many degrees at each level.
ANGLE_STEP = {1: 5, 2: 2, 3: 1}
ALGEBRA = {1: 0.0, 2: 0.15, 3: 0.35}


#: As the families' function, with these steps.
pick_angle = partial(family.pick_angle, steps=ANGLE_STEP)


@dataclass(frozen=True)
class Wording:
    """How a problem is put: the figure's free dimensions, letters, variables, and what the question tells.

    Example: with letters "PQR" and variable "", the question about BC is "Find Q R."; with variable "y" it is "Find y."
    """

    shape: int  # seed of the dimensions that the numbers leave free
    letters: str  # of the figure's capital points in order; empty: the points have none
    variable: str  # at the asked part; empty: the question names the part
    others: tuple[str, ...] = ()  # variables or numbers at further parts
    told: tuple[int, ...] = ()  # labels that stand in the question instead of the figure, by place
    spare: bool = False  # the figure shows its needless number


class Theorem(ABC):
    """One kind of textbook problem; objects have no state.

    Example::

        theorem = THEOREMS["angle_sum"]
        theorem.solve((47, 65), "angle")               # ("47 + 65 = 112. 180 - 112 = 68.", "68")
        theorem.solve((47, 65, 2, 8), "angle+")        # the third angle is 2x + 8: "... 60 / 2 = 30.", "30"
    """

    name: ClassVar[str]
    note: ClassVar[str] = ""  # a sentence that the question adds
    takes_algebra: ClassVar[bool] = True
    is_whole: ClassVar[bool] = True  # answers of levels 1 and 2 are integers
    is_ordered: ClassVar[bool] = False  # the same givens in another order are another problem

    @abstractmethod
    def numbers(self, rng: Random, level: int) -> Case:
        """Return givens for a level (1, 2 or 3) and the name of the unknown; `solve` may still reject them."""

    @abstractmethod
    def work(self, givens: Givens, unknown: str) -> Solution:
        """Return the reasoning and the exact answer; raise ValueError if no such figure exists."""

    def remark(self, unknown: str) -> str:
        """Return a sentence that the question adds, or an empty text."""
        return self.note

    @abstractmethod
    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        """Return the figure, true to scale; dimensions that the givens leave free vary with `rng`.

        Raises ValueError if the numbers and `rng` make none.
        """

    def solve(self, givens: Givens, unknown: str) -> Solution:
        """Return the reasoning and answer; an unknown that ends in + or - asks for x in "ax + b" or "ax - b"."""
        require(min(givens) > 0, "a number is above 0")
        if unknown[-1] not in "+-":
            return self.work(givens, unknown)
        *base, factor, constant = givens
        steps, value = self.work(tuple(base), unknown[:-1])
        require(value.isdigit(), "an expression equals a whole number")
        if unknown.endswith("+"):
            left = int(value) - constant
        else:
            left = int(value) + constant
        require(left > 0, "x is above 0")
        operator = "-" if unknown.endswith("+") else "+"
        steps = f"{steps} {value} {operator} {constant} = {left}."
        if factor == 1:
            return steps, str(left)
        step, answer = divide(left, factor)
        return f"{steps} {step}", answer

    def figure(self, givens: Givens, unknown: str, shape: int) -> Figure:
        """Return the figure of a problem; equal arguments give equal figures."""
        if unknown[-1] not in "+-":
            return self.build(givens, unknown, Random(shape))
        figure = self.build(givens[:-2], unknown[:-1], Random(shape))
        assert figure.asked is not None and figure.asked.text, f"{self.name} asks for a labelled part"
        text = with_unit(figure.asked.part, expression(givens[-2], givens[-1], unknown[-1]))
        figure.asked = Label(figure.asked.part, text, (len(givens) - 2, len(givens) - 1))
        return figure

    def drawn_givens(self, givens: Givens, unknown: str, wording: Wording) -> list[int]:
        """Return the places of the givens that the figure shows."""
        figure = self.figure(givens, unknown, wording.shape)
        shown = [label for place, label in enumerate(figure.labels) if place not in wording.told]
        return sorted({place for label in (*shown, figure.asked) if label for place in label.givens})

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        """Return the givens in an order that is the same for problems that differ only in the drawing."""
        if self.is_ordered:
            return givens
        if unknown[-1] not in "+-":
            return tuple(sorted(givens))
        return (*sorted(givens[:-2]), *givens[-2:])

    def sample(self, rng: Random, level: int) -> tuple[Givens, str, int]:
        """Return givens, the unknown and the seed of a clear figure."""
        for _ in range(TRIES):
            givens, unknown = self.numbers(rng, level)
            shape = rng.getrandbits(32)
            try:
                _, answer = self.solve(givens, unknown)
                figure = self.figure(givens, unknown, shape)
            except ValueError:
                continue
            if not figure.is_clear() or (level < 3 and self.is_whole and not answer.isdigit()):
                continue
            has_label = figure.asked is not None and figure.asked.text
            if self.takes_algebra and has_label and answer.isdigit() and rng.random() < ALGEBRA[level]:
                return *_with_expression(givens, unknown, int(answer), rng), shape
            return givens, unknown, shape
        raise RuntimeError(f"{TRIES} figures of {self.name}, level {level}: none is clear")

    def word(self, givens: Givens, unknown: str, shape: int, rng: Random) -> tuple[str, Wording]:
        """Return the question, and what it leaves to the figure."""
        figure = self.figure(givens, unknown, shape)
        if rng.random() < LETTERED:
            letters = _letters(figure, rng)
        else:
            letters = ""
        wording = Wording(shape, letters, rng.choice(VARIABLES), spare=rng.random() < WITH_SPARE)
        if figure.asked is not None and figure.asked.text:
            wording = replace(wording, **self._ask(figure, bool(letters), rng))
        told = [k for k, label in enumerate(figure.labels) if letters and label.part.has_name and rng.random() < TOLD]
        if len(told) < len(figure.labels) + bool(unknown[-1] in "+-"):
            wording = replace(wording, told=tuple(told))
        return self._question(figure, wording, self.remark(unknown)), wording

    def _ask(self, figure: Figure, is_lettered: bool, rng: Random) -> dict[str, object]:
        """Choose the variables of the asked part and of further parts."""
        assert figure.asked is not None
        variable = rng.choice(VARIABLES)
        number = 0
        if not figure.asked.givens and not any("x" in label.text for label in figure.labels):
            roll = rng.random()
            if is_lettered and figure.asked.part.has_name and roll < ASKED_BY_NAME:
                variable = ""
            elif figure.asked.part.kind == "angle" and roll > 1 - ASKED_BY_NUMBER:
                variable = str(rng.randint(1, 2))
                number = 3
        if number:
            others = [str(k) for k in range(1, 2 + len(figure.others)) if str(k) != variable]
        else:
            others = [letter for letter in "yzwuv" if letter != variable]
        if rng.random() < WITH_OTHERS:
            count = len(figure.others)
        else:
            count = 0
        return {"variable": variable, "others": tuple(others[:count])}

    def _question(self, figure: Figure, wording: Wording, remark: str) -> str:
        letters = names(figure, wording.letters)
        told = " and ".join(
            f"{label.part.name(letters)} = {spaced(label.text, wording.variable)}"
            for label in (figure.labels[place] for place in wording.told)
        )
        if figure.asked is None:
            wanted = wording.variable
        elif not figure.asked.text:
            wanted = WHOLES[figure.asked.part.kind]
            if figure.shaded:
                wanted = wanted.replace("figure", "shaded region")
        elif wording.variable.isdigit():
            wanted = f"m \\angle {wording.variable}"
        else:
            wanted = wording.variable or figure.asked.part.name(letters)
        if told:
            question = f"If {told}, find {wanted}."
        else:
            question = f"Find {wanted}."
        return f"{question} {remark}".strip()


class AngleTheorem(Theorem):
    """A theorem whose unknown makes a whole together with the given angles, or equals the given one.

    `wholes` has the whole of each unknown of the first kind, in degrees.
    """

    wholes: ClassVar[Mapping[str, int]]

    def work(self, givens: Givens, unknown: str) -> Solution:
        return solve_angle(givens, self.wholes.get(unknown))


def spaced(text: str, variable: str) -> str:
    """Return a label's text as a question writes it: "(2x + 3)°" becomes "2 y + 3"."""
    bare = text.strip("()°").replace("−", "-")
    return " ".join(bare.replace("x", f" {variable} ").split())


def names(figure: Figure, letters: str) -> dict[str, str]:
    """Return the letter of each capital point; O stays O, as the center of a circle."""
    capitals = [name for name in figure.points if name.isupper()]
    if letters:
        return dict(zip(capitals, letters, strict=True))
    return {}


def _letters(figure: Figure, rng: Random) -> str:
    """Return letters that follow each other in the alphabet, for the capital points."""
    count = sum(name.isupper() for name in figure.points)
    start = rng.randint(0, len(ALPHABET) - count)
    letters = list(ALPHABET[start : start + count])
    if rng.random() < 0.3:
        letters.reverse()
    capitals = [name for name in figure.points if name.isupper()]
    return "".join(
        "O" if name == "O" and rng.random() < 0.5 else letter for name, letter in zip(capitals, letters, strict=True)
    )


def _with_expression(givens: Givens, unknown: str, answer: int, rng: Random) -> tuple[Givens, str]:
    """Replace the unknown by an expression in x of the same value, with a whole x above 0."""
    factor = rng.randint(1, max(1, min(9, answer // 2)))
    x = rng.randint(1, max(1, (answer + 12) // factor))
    rest = answer - factor * x
    if rest == 0:
        x, rest = (x - 1, factor) if x > 1 else (x + 1, -factor)
    return (*givens, factor, abs(rest)), unknown + ("+" if rest > 0 else "-")
