"""Make the starter model: `python -m trainer.starter --recipe starter`."""

from __future__ import annotations

import json
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
    init: Path | None = Field(default=None, description="checkpoint to continue from, with --first-stage; empty: none")
    first_stage: int = Field(default=1, description="stage to begin with, counted from 1")


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, train and print a summary."""
    config = parse(StarterConfig, argv, "python -m trainer.starter", "Make the starter model.")
    if config.recipe not in RECIPES:
        raise UserError("--recipe", "must be a known recipe", config.recipe, did_you_mean(config.recipe, RECIPES))
    recipe, first = RECIPES[config.recipe], config.first_stage
    if not 1 <= first <= len(recipe.stages):
        raise UserError("--first-stage", f"must be 1 to {len(recipe.stages)}", first, "leave it out for all")
    if (config.init is None) != (first == 1):
        raise UserError("--init", "goes with --first-stage 2 or later", str(config.init), "give both or neither")
    # Imported late, so that --help and a mistyped flag answer at once.
    import torch

    from trainer.starter.training import train

    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    report = train(recipe, config.out, device, config.num_workers, config.init, first - 1)
    print(json.dumps({key: report[key] for key in ("parameters", "seconds", "sha256")}))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
