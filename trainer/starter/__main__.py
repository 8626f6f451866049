"""Make the starter model: `python -m trainer.starter --recipe starter`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from envs.config.cli import exit_code
from envs.errors import UserError, did_you_mean
from trainer.starter.recipe import RECIPES, train


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, train and print a summary."""
    parser = argparse.ArgumentParser(prog="python -m trainer.starter", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="starter", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=Path("runs/starter"), help="checkpoint folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that make demonstrations; 0: none")
    parser.add_argument("--init", type=Path, help="checkpoint to continue from, with --first-stage")
    parser.add_argument("--first-stage", type=int, default=1, help="stage to begin with, counted from 1")
    args = parser.parse_args(argv)
    if args.recipe not in RECIPES:
        raise UserError("--recipe", "must be a known recipe", args.recipe, did_you_mean(args.recipe, RECIPES))
    recipe = RECIPES[args.recipe]
    if not 1 <= args.first_stage <= len(recipe.stages):
        raise UserError("--first-stage", f"must be 1 to {len(recipe.stages)}", args.first_stage, "leave it out for all")
    if (args.init is None) != (args.first_stage == 1):
        raise UserError("--init", "goes with --first-stage 2 or later", str(args.init), "give both or neither")
    report = train(recipe, args.out, torch.device(args.device), args.num_workers, args.init, args.first_stage - 1)
    print(json.dumps({key: report[key] for key in ("parameters", "seconds", "sha256")}))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
