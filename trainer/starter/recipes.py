"""The recipes of the starter: stages of training over mixtures of demonstrations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trainer.starter.plans import MIXED_HABITS, Mixture


@dataclass(frozen=True)
class Stage:
    """A learning-rate schedule over one mixture of demonstrations."""

    steps: int
    batch_size: int
    lr: float
    warmup_steps: int
    mixture: Mixture = field(default_factory=Mixture)


@dataclass(frozen=True)
class Recipe:
    """All settings that decide a starter's weights; besides these, only the hardware matters."""

    shape: str
    stages: tuple[Stage, ...]
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    seed: int = 17
    levels: tuple[int, ...] = (1, 2, 3)
    corpus_size: int = 20_000


RECIPES = {
    "starter": Recipe(
        "starter",
        stages=(
            Stage(steps=14_946, batch_size=384, lr=1.2e-3, warmup_steps=400),
            Stage(steps=5_000, batch_size=384, lr=4e-4, warmup_steps=100, mixture=MIXED_HABITS),
            Stage(steps=160, batch_size=64, lr=1e-4, warmup_steps=20, mixture=replace(MIXED_HABITS, checks=0.65)),
        ),
    ),
    "smoke": Recipe(
        "smoke",
        stages=(
            Stage(steps=36, batch_size=8, lr=4e-3, warmup_steps=4),
            Stage(steps=12, batch_size=8, lr=2e-3, warmup_steps=2, mixture=MIXED_HABITS),
        ),
        levels=(1,),
        corpus_size=300,
    ),
}
