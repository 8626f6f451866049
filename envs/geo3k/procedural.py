"""Generates geometry problems with diagrams, as `Sample`s of a split, size and seed; it needs no file or download.

The hash of a problem's key (family, numbers, unknown) decides its split, so no two splits share a problem, for any
seed, size, family and level. Supervised training uses `demonstrations`, reinforcement learning `train`, and neither
uses `validation`, on which settings are chosen, or `heldout`, on which results are reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from PIL import Image

from envs.errors import UserError, did_you_mean
from envs.geo3k.problem import FAMILIES, LEVELS, Box, Problem, draw_with_boxes, make_problem, with_rival
from envs.types import MadeSamples, Sample

Split = Literal["demonstrations", "train", "validation", "heldout"]
SPLITS = ("demonstrations", "train", "validation", "heldout")
KEY_TRIES = 2000  # at least one key in fifty is in a split, so all tries miss with a chance of 3e-18


def split_of(key: str) -> Split:
    """Return the split of a problem's key: one key in ten is `heldout`, one is `train`, one is `validation`.

    >>> split_of("triangle_angles/47-65/x")
    'heldout'
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    others, tenth = divmod(int.from_bytes(digest, "big"), 10)
    if tenth in (0, 5):
        if tenth == 0:
            return "heldout"
        return "train"
    if others % 8 == 0:
        return "validation"
    return "demonstrations"


class ProceduralGeo3k(MadeSamples):
    """Procedural problems of one split; sample i depends on seed, split and i alone (and on families and levels).

    Example::

        source = ProceduralGeo3k("train", size=1000, seed=7, families=["triangle_angles"], levels=(1,))
        source[0].label, source[0].metadata["key"]       # "40", "triangle_angles/50-90/x"
        problem, image = source.item(0)                  # the same problem with its reasoning, 160x128 RGB

    An image of the style `overprint` has a second reading (docs/diagrams.md). Raises UserError for an unknown split,
    style, family or level, or a negative size.
    """

    #: How problems are drawn, and the families that are drawn so; `starter.textbook.problems` has other styles.
    styles: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"plain": FAMILIES, "overprint": FAMILIES})

    def __init__(
        self,
        split: Split,
        size: int,
        seed: int = 0,
        families: Sequence[str] | None = None,
        levels: Sequence[int] = LEVELS,
        style: str | None = None,
    ) -> None:
        if split not in SPLITS:
            raise UserError("split", "must be a known split", split, did_you_mean(split, SPLITS))
        style = style or next(iter(self.styles))
        if style not in self.styles:
            raise UserError("style", "must be a known style", style, did_you_mean(style, self.styles))
        known = self.styles[style]
        super().__init__(size)
        if unknown := [name for name in families or () if name not in known]:
            if style == "plain":
                rule = "must be known families"
            else:
                rule = f"must be known families of style {style}"
            raise UserError("families", rule, unknown[0], did_you_mean(unknown[0], known))
        if wrong := [level for level in levels if level not in LEVELS]:
            raise UserError("levels", "must be among 1, 2, 3", wrong[0], "give some of 1, 2, 3")
        if not levels or (families is not None and not families):
            raise UserError("families and levels", "must not be empty", [], "leave them out for all")
        self.split: Split = split
        self.seed = seed
        self.families = tuple(families or known)
        self.levels = tuple(levels)
        self.style = style

    def item(self, index: int) -> tuple[Problem, Image.Image]:
        """Return the problem and its image at an index in -size to size - 1."""
        return self.drawn(index)[:2]

    def drawn(self, index: int) -> tuple[Problem, Image.Image, list[Box]]:
        """Return the problem at an index, its image, and the edges of every label in it.

        A box is left, top, right and bottom in pixels.
        """
        problem, rng = self._sample(index)
        image, boxes = self.draw(problem, rng)
        return problem, image, boxes

    def problem(self, index: int) -> Problem:
        """Return the problem at an index without drawing it."""
        return self._sample(index)[0]

    def make_problem(self, family: str, level: int, rng: Random) -> Problem:
        """Return a problem of a family and a level that may be of any split."""
        return make_problem(family, level, rng)

    def draw(self, problem: Problem, rng: Random) -> tuple[Image.Image, list[Box]]:
        """Return the image of a problem and the edges of its labels in pixels."""
        return draw_with_boxes(problem, rng)

    def _sample(self, index: int) -> tuple[Problem, Random]:
        rng = Random(f"{self.seed}/{self.split}/{self.place(index)}")
        family = rng.choice(self.families)
        level = rng.choice(self.levels)
        for _ in range(KEY_TRIES):
            problem = self.make_problem(family, level, rng)
            if split_of(problem.key) == self.split:
                if self.style == "overprint":
                    problem = with_rival(problem, rng)
                return problem, rng
        raise RuntimeError(f"{KEY_TRIES} problems of {family}, level {level}: none belongs to split {self.split}")

    def make(self, place: int) -> Sample:
        """Return the problem at a place as a sample, with its image."""
        problem, image = self.item(place)
        content = [{"type": "image", "image": image}, {"type": "text", "text": problem.question}]
        return Sample(
            id=f"geo3k-procedural-{self.split}-{self.seed}-{place}",
            label=problem.answer,
            prompt=({"role": "user", "content": content},),
            metadata={
                "family": problem.family,
                "level": problem.level,
                "key": problem.key,
                "unknown": problem.unknown,
            },
        )
