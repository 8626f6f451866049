"""Make the starter model: `python -m trainer.starter --recipe starter`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError, did_you_mean
from trainer.starter.recipes import RECIPES


class StarterConfig(Section):
    """The starter to make."""

    recipe: str = Field(default="starter", description=f"one of: {', '.join(RECIPES)}")
    out: Path = Field(default=Path("runs/starter"), description="checkpoint folder to write")
    device: str = Field(default="", description="torch device; empty: cuda, or cpu where there is none")
    num_workers: int = Field(default=0, ge=0, description="processes that make demonstrations; 0: none")
    max_minutes: float = Field(
        default=0.0, ge=0, description="stop after so many minutes; the same command goes on from there; 0: never"
    )


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, train and print a summary."""
    config = parse(StarterConfig, argv, "python -m trainer.starter", "Make the starter model.")
    if config.recipe not in RECIPES:
        raise UserError("--recipe", "must be a known recipe", config.recipe, did_you_mean(config.recipe, RECIPES))
    # Imported late, so that --help and a mistyped flag answer at once.
    import torch

    from trainer.metrics.console import open_console
    from trainer.setup.components import check_device
    from trainer.starter.training import StarterRun

    open_console()
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    starter = StarterRun(RECIPES[config.recipe], config.out, torch.device(device), config.num_workers)
    if starter.train(config.max_minutes or math.inf):
        print(f"done: {config.out}")
    else:
        print(f"stopped after {config.max_minutes:g} minutes; the same command goes on")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
