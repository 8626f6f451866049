"""Translate a command of another trainer: `python -m trainer.translate "train.py --lr 1e-6"`.

It prints our command for a command or YAML of slime, verl, TRL or RLinf, and names what has no counterpart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from trainer.translate.reading import read_settings
from trainer.translate.translation import translate


class TranslateConfig(Section):
    """The options of `python -m trainer.translate`."""

    source: str = Field(description="the command with its flags in quotes, or a YAML file")
    trainer: Literal["auto", "slime", "verl", "trl", "rlinf"] = Field(
        default="auto", description="whose settings they are; auto: recognized by their names"
    )


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, translate, print."""
    description = "Translate a command of slime, verl, TRL or RLinf into ours."
    config = parse(TranslateConfig, argv, "python -m trainer.translate", description)
    found = translate(read_settings(config.source), "" if config.trainer == "auto" else config.trainer)
    head = f"# from {found.trainer}; the environment and its rewards are code: see --env"
    notes = [f"# {line}" for line in found.notes()]
    print(head, found.command(), "", *notes, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
