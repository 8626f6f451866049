"""Trains by the public command in a process of its own, as benchmarks that compare whole runs do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.report import ROOT


def train(folder: Path, steps: int, *flags: str, module: str = "trainer.run") -> list[dict[str, float]]:
    """Train into `folder`, without evaluation and checkpoints; return the metrics of each step.

    A run that lies there and has as many steps is only read.

    Raises:
        subprocess.CalledProcessError: the run failed; `log_of(folder)` says why.
    """
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and len(lines := metrics.read_text().splitlines()) >= steps:
        return [json.loads(line) for line in lines[:steps]]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", module, "--out", str(folder.parent), "--name", folder.name]
    command += ["--steps", str(steps), "--eval-size", "0", "--save-every", "0", "--tracker=", *flags]
    with log_of(folder).open("w") as log:
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def log_of(folder: Path) -> Path:
    """Return what the command printed."""
    return folder.parent / f"{folder.name}.log"
