"""Textbook problems as `Sample`s, like `envs.geo3k.procedural`: other families, other images, the same splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any

from PIL import Image

from envs.errors import UserError, did_you_mean
from envs.geo3k.families.family import Solution
from envs.geo3k.problem import LEVELS, Box, Problem
from envs.geo3k.procedural import ProceduralGeo3k, Split
from starter.textbook.drawing import SCALES, draw
from starter.textbook.theorem import Wording
from starter.textbook.theorems import THEOREMS

#: Of all sources of problems: the families that are drawn in each style.
STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {**ProceduralGeo3k.styles, "textbook": THEOREMS, "small_print": THEOREMS}
)


@dataclass(frozen=True)
class TextbookProblem(Problem):
    """A problem about a theorem, with its wording: letters, variables and what the question tells."""

    wording: Wording = field(kw_only=True)

    @property
    def drawn_givens(self) -> Sequence[int]:
        """The places of the givens that the image shows; the question tells the others."""
        return THEOREMS[self.family].drawn_givens(self.givens, self.unknown, self.wording)

    def canonical_givens(self) -> tuple[int, ...]:
        """Return the givens in an order that is the same for problems that differ only in the drawing."""
        return THEOREMS[self.family].canonical(self.givens, self.unknown)

    def solve(self, givens: tuple[int, ...]) -> Solution:
        """Return the reasoning and the exact answer for given numbers; ValueError if no such figure exists."""
        return THEOREMS[self.family].solve(givens, self.unknown)


def make_textbook_problem(family: str, level: int, rng: Random) -> TextbookProblem:
    """Sample a problem of a theorem and a level (1 to 3); raise UserError if either is unknown."""
    if family not in THEOREMS:
        raise UserError("family", "must be a known family", family, did_you_mean(family, THEOREMS))
    if level not in LEVELS:
        raise UserError("level", "must be 1, 2 or 3", level, "give one of 1, 2, 3")
    theorem = THEOREMS[family]
    givens, unknown, shape = theorem.sample(rng, level)
    question, wording = theorem.word(givens, unknown, shape, rng)
    reasoning, answer = theorem.solve(givens, unknown)
    return TextbookProblem(family, level, givens, unknown, question, answer, reasoning, wording=wording)


class TextbookGeo3k(ProceduralGeo3k):
    """Textbook problems of one split, of the theorems of docs/diagrams.md.

    Example::

        source = TextbookGeo3k("train", size=1000, style="small_print", families=["kite_angles"], levels=(1, 2))
        problem, image = source.item(0)                  # 448x352 RGB with digits of about 7 pixels
    """

    styles = MappingProxyType({style: families for style, families in STYLES.items() if families is THEOREMS})

    def make_problem(self, family: str, level: int, rng: Random) -> Problem:
        """Return a problem of a theorem and a level that may be of any split."""
        return make_textbook_problem(family, level, rng)

    def draw(self, problem: Problem, rng: Random) -> tuple[Image.Image, list[Box]]:
        """Return the image of a problem, in the style's scale, and the edges of its labels in pixels."""
        assert isinstance(problem, TextbookProblem)
        figure = THEOREMS[problem.family].figure(problem.givens, problem.unknown, problem.wording.shape)
        drawing = draw(figure, problem.wording, rng, SCALES[self.style])
        return drawing.image, [box for _, box in drawing.texts]


def problems_of(split: Split, size: int, seed: int, style: str = "plain", **options: Any) -> ProceduralGeo3k:
    """Return the source of problems of any style."""
    if style in TextbookGeo3k.styles:
        return TextbookGeo3k(split, size, seed, style=style, **options)
    return ProceduralGeo3k(split, size, seed, style=style, **options)
