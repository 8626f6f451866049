"""The recipes of the starter: stages of training, each with its lessons, learning rate and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.starter.plans import MIXED_HABITS, Mixture


@dataclass(frozen=True)
class Numbers:
    """Pictures of bare numbers: 1 to `most` numbers of 1 to `digits` digits, in type of `sizes` pixels.

    The numbers stand in columns; `spread` is the share of its column that a number may move in, 0 for the middle. With
    `unknown`, half of the pictures also show an x; with `lines`, some lines run beside and through the numbers.
    """

    most: int = 1
    digits: int = 1
    sizes: tuple[int, int] = (96, 112)
    spread: float = 1.0
    unknown: bool = False
    lines: bool = False


@dataclass(frozen=True)
class Stage:
    """One part of the training: what it teaches, for how long, and how fast.

    A lesson is one of five kinds. `zoom_frac` of all zoom into the picture of one of `zoom_problems`, or answer at once
    in a share `blind_frac` of these. Of the others, `numbers_frac` show bare numbers, and `figures_frac` a problem's
    figure, whose numbers are to be read; `attempts_frac` go on after a wrong attempt of the policy itself, which plays
    `num_attempts` problems and reads `num_readings` pictures at the beginning of each of `rounds`. What is left are
    demonstrations of `mixture`.

    Figures and demonstrations are of `textbook` in a share `textbook_frac`, else of `problems`. Textbook and zoom
    pictures take long to draw, so each serves `lessons_per_drawing` neighbouring lessons.

    The rate warms up over `warmup_steps` and falls by half a cosine to `final_lr` of itself. The stage ends early once
    the policy reads `until` of the held-out pictures exactly (`trainer.starter.progress`).
    """

    steps: int
    batch_size: int
    lr: float
    warmup_steps: int
    mixture: Mixture = field(default_factory=Mixture)
    problems: Mapping[str, Any] = field(default_factory=dict)  # arguments of `ProceduralGeo3k`
    numbers: Numbers = field(default_factory=Numbers)
    numbers_frac: float = 0.0
    figures_frac: float = 0.0
    textbook: Mapping[str, Any] = field(default_factory=lambda: {"style": "textbook"})
    textbook_frac: float = 0.0
    lessons_per_drawing: int = 8
    zoom_frac: float = 0.0
    zoom_problems: Mapping[str, Any] = field(default_factory=lambda: {"style": "small_print"})
    blind_frac: float = 0.3
    attempts_frac: float = 0.0
    num_attempts: int = 0
    num_readings: int = 0
    rounds: int = 1
    final_lr: float = 0.01
    until: float | None = None

    @property
    def num_lessons(self) -> int:
        """How many lessons the stage shows at most."""
        return self.steps * self.batch_size


@dataclass(frozen=True)
class Recipe:
    """All settings that decide a starter's weights; besides these, only the hardware matters."""

    shape: str
    stages: tuple[Stage, ...]
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    seed: int = 17
    corpus_size: int = 20_000
    num_probes: int = 512  # held-out lessons that measure progress, some thirty times in a stage


REASONED = Mixture(checks=0.5, corrects=True)
CHECKED = replace(REASONED, checks=0.85)
MIXED = replace(MIXED_HABITS, checks=0.65, corrects=True)

#: One digit as large as the picture and in its middle is read after a thousand lessons. From there, every rung is a
#: little harder: beside the middle, smaller, anywhere, several, then as in figures.
LADDER = (
    Numbers(spread=0.0),
    Numbers(sizes=(72, 112), spread=0.2),
    Numbers(sizes=(40, 112), spread=0.6),
    Numbers(sizes=(20, 80)),
    Numbers(2, 2, (14, 44)),
    Numbers(3, 3, (12, 24), unknown=True, lines=True),
)
LABELS = LADDER[-1]
ANGLES = ("triangle_angles", "linear_pair", "vertical_angles", "angles_at_point", "quadrilateral_angles")
OVERPRINT: Mapping[str, Any] = {"style": "overprint"}
FEW: Mapping[str, Any] = {"levels": (1,), "families": ANGLES}


def _climb(steps: int, batch_size: int, until: float) -> tuple[Stage, ...]:
    """Return a stage for each rung of the ladder."""
    return tuple(
        Stage(
            steps,
            batch_size,
            1e-3,
            100 if number == 0 else 20,
            numbers=rung,
            numbers_frac=1.0,
            final_lr=1.0,
            until=until,
        )
        for number, rung in enumerate(LADDER)
    )


RECIPES = {
    "starter": Recipe(
        "starter",
        stages=(
            *_climb(steps=700, batch_size=384, until=0.9),
            # Figures of few families with round numbers, all families, all levels; then problems with their steps.
            Stage(800, 384, 1e-3, 20, REASONED, FEW, LABELS, 0.3, 0.7, final_lr=1.0, until=0.9),
            Stage(800, 384, 1e-3, 20, REASONED, FEW, LABELS, 0.1, 0.3, final_lr=1.0, until=0.9),
            Stage(2_000, 384, 1e-3, 20, REASONED, {"levels": (1, 2)}, LABELS, 0.1, 0.3, final_lr=1.0, until=0.95),
            # By now the network reads plain pictures, so the others are of textbooks, or can be read in two ways.
            Stage(5_000, 384, 1e-3, 20, CHECKED, OVERPRINT, figures_frac=0.2, textbook_frac=0.5, zoom_frac=0.08),
            # After a wrong attempt of its own: another reading, another sum. In each round nearly as many attempts
            # as lessons after them, so that they are those of today's policy and none is learnt by heart.
            Stage(
                800,
                384,
                3e-4,
                50,
                CHECKED,
                OVERPRINT,
                textbook_frac=0.4,
                zoom_frac=0.06,
                attempts_frac=0.5,
                num_attempts=256,
                num_readings=32_768,
                rounds=5,
            ),
            # Habits of every kind, for reinforcement learning to choose from.
            Stage(
                500,
                384,
                2e-4,
                50,
                MIXED,
                OVERPRINT,
                textbook_frac=0.4,
                zoom_frac=0.1,
                blind_frac=0.6,
                attempts_frac=0.25,
                num_attempts=256,
                num_readings=24_576,
                rounds=2,
            ),
        ),
        num_probes=768,
    ),
    "smoke": Recipe(
        "smoke",
        stages=(
            Stage(4, 8, 4e-3, 4, numbers_frac=1.0, final_lr=1.0, until=0.95),
            Stage(32, 8, 4e-3, 4, problems={"levels": (1,)}, figures_frac=0.2),
            Stage(
                12,
                8,
                2e-3,
                2,
                MIXED,
                {"levels": (1,)},
                zoom_frac=0.3,
                attempts_frac=0.4,
                num_attempts=8,
                num_readings=16,
                rounds=2,
            ),
        ),
        corpus_size=300,
        num_probes=16,
    ),
}
