"""The recipes of the starter: stages of training, each with its lessons and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starter.plans import MIXED_HABITS, Mixture


@dataclass(frozen=True)
class Numbers:
    """Images of bare numbers: 1 to `most` numbers of 1 to `digits` digits, in type of `sizes` pixels.

    The numbers stand in columns; `spread` is the share of its column that a number may move in, 0 for the middle. With
    `unknown`, half of the images also show an x; with `lines`, some lines run beside and through the numbers.
    """

    most: int = 1
    digits: int = 1
    sizes: tuple[int, int] = (96, 112)
    spread: float = 1.0
    unknown: bool = False
    lines: bool = False


#: One digit as large as the image and in its middle is read after a thousand lessons. From there, every rung is a
#: little harder: beside the middle, smaller, anywhere, several, then as in figures.
LADDER = (
    Numbers(spread=0.0),
    Numbers(sizes=(72, 112), spread=0.2),
    Numbers(sizes=(40, 112), spread=0.6),
    Numbers(sizes=(20, 80)),
    Numbers(2, 2, (14, 44)),
    Numbers(3, 3, (12, 24), unknown=True, lines=True),
)


@dataclass(frozen=True)
class Stage:
    """One run of `trainer.sft`: what it teaches, for how long, and how fast.

    `shares` has the share of each kind of lesson: "numbers" and "figure" are to be read; "problem" is a demonstration
    of `mixture`; "zoom" looks at parts of an image enlarged, or in a share `blind_frac` answers at once; "attempt" goes
    on after a wrong attempt of the policy itself, which plays `num_played` problems before the stage. Numbers are those
    of a `rung` of the ladder. Figures and problems are of `problems`, which are arguments of `problems_of`, each as
    often; what is zoomed into is of `zoomed`.
    """

    name: str
    num_lessons: int
    shares: Mapping[str, float]
    epochs: int = 1
    batch_size: int = 384
    lr: float = 1e-3
    warmup_steps: int = 20
    schedule: str = "constant"
    rung: int = len(LADDER) - 1
    problems: tuple[dict[str, Any], ...] = ({},)
    zoomed: Mapping[str, Any] = field(default_factory=lambda: {"style": "small_print"})
    mixture: Mixture = field(default_factory=Mixture)
    blind_frac: float = 0.3
    num_played: int = 0


@dataclass(frozen=True)
class Recipe:
    """All settings that decide a starter's weights; besides these, only the hardware matters."""

    shape: str
    stages: tuple[Stage, ...]
    weight_decay: float = 0.05
    seed: int = 17
    corpus_size: int = 20_000
    num_heldout: int = 512  # lessons of problems that no stage shows, for the loss before and after a stage


def _rung(rung: int, num_lessons: int, batch_size: int = 384, **others: Any) -> Stage:
    """Return the stage of a rung of the ladder."""
    return Stage(f"rung-{rung}", num_lessons, {"numbers": 1.0}, batch_size=batch_size, rung=rung, **others)


REASONED = Mixture(checks=0.5, corrects=True)
CHECKED = replace(REASONED, checks=0.85)
MIXED = replace(MIXED_HABITS, checks=0.65, corrects=True)
ANGLES = ("triangle_angles", "linear_pair", "vertical_angles", "angles_at_point", "quadrilateral_angles")
FEW = ({"levels": (1,), "families": ANGLES},)
#: By stage 10 the network reads plain images, so the others are of textbooks, or can be read in two ways.
HARD: tuple[dict[str, Any], ...] = ({"style": "overprint"}, {"style": "textbook"})

RECIPES = {
    "starter": Recipe(
        "starter",
        stages=(
            *(_rung(rung, num_lessons=40_000, epochs=1 + rung) for rung in range(len(LADDER))),
            Stage("figures", 50_000, {"numbers": 0.3, "figure": 0.7}, 5, problems=FEW, mixture=REASONED),
            Stage("steps", 50_000, {"numbers": 0.1, "figure": 0.3, "problem": 0.6}, 2, problems=FEW, mixture=REASONED),
            Stage(
                "families",
                100_000,
                {"numbers": 0.1, "figure": 0.3, "problem": 0.6},
                6,
                problems=({"levels": (1, 2)},),
                mixture=REASONED,
            ),
            Stage(
                "all",
                200_000,
                {"figure": 0.18, "problem": 0.74, "zoom": 0.08},
                8,
                schedule="cosine",
                problems=HARD,
                mixture=CHECKED,
            ),
            Stage(
                "second-attempts",
                60_000,
                {"problem": 0.44, "attempt": 0.5, "zoom": 0.06},
                3,
                lr=3e-4,
                schedule="cosine",
                problems=HARD,
                mixture=CHECKED,
                num_played=32_768,
            ),
            # Habits of every kind, for reinforcement learning to choose from.
            Stage(
                "habits",
                60_000,
                {"problem": 0.65, "attempt": 0.25, "zoom": 0.1},
                3,
                lr=2e-4,
                schedule="cosine",
                problems=HARD,
                mixture=MIXED,
                blind_frac=0.6,
                num_played=16_384,
            ),
        ),
    ),
    # The first rungs by the smallest network: what a CPU can show in minutes.
    "digits": Recipe(
        "smoke",
        stages=tuple(_rung(rung, 2048, batch_size=16) for rung in range(3)),
        corpus_size=300,
        num_heldout=128,
    ),
    # Every kind of lesson once: does everything run?
    "smoke": Recipe(
        "smoke",
        stages=(
            _rung(0, 32, batch_size=8),
            Stage("figures", 32, {"figure": 0.5, "problem": 0.5}, batch_size=8, problems=({"levels": (1,)},)),
            Stage(
                "habits",
                32,
                {"problem": 0.4, "attempt": 0.4, "zoom": 0.2},
                batch_size=8,
                problems=HARD,
                mixture=MIXED,
                num_played=8,
            ),
        ),
        corpus_size=300,
        num_heldout=8,
    ),
}
