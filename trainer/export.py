"""Write a checkpoint's model as a Hugging Face folder, with adapters merged: `python -m trainer.export runs/x`.

It reads the run's settings, its checkpoint and the model that the run started from. It needs no GPU and no data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section


class ExportConfig(Section):
    """Which checkpoint to export, and where to."""

    run: Path = Field(description="run folder")
    step: int | None = Field(default=None, ge=0, description="checkpoint of this step; empty: the newest whole one")
    to: Path | None = Field(default=None, description="folder to write; empty: model-step-N in the run folder")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="dtype of the written weights")


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, write the model and print its folder."""
    config = parse(ExportConfig, argv, "python -m trainer.export", "Write the model of a checkpoint.")
    # Imported late, so that --help and a mistyped flag answer at once.
    import torch

    from agents.cli.text import path_text
    from trainer.metrics.console import open_console
    from trainer.setup.export import export

    # Libraries print progress bars otherwise, among the one line that scripts read.
    open_console()
    print(path_text(export(config.run, config.step, config.to, getattr(torch, config.dtype))))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
