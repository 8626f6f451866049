"""A finished or running training, read from its folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.cli.text import path_text
from agents.recording import Recording
from agents.recording.run_files import METRICS, SUMMARY
from agents.types import Trajectory
from envs.errors import UserError
from trainer.checkpoint.run_dir import BEST, MODEL
from trueturn.arguments import public

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Run:
    """A training run in its folder, as `tt.train` returns it; `tt.Run("runs/x")` opens an earlier one.

    Example::

        run = tt.train("geo3k", steps=1, eval_size=8)
        run.metrics["reward"]                  # a column of a pandas table; run.rows has the same as dicts
        run.accuracy                           # {"with_tool": 0.125, "without_tool": 0.125}
        run.model_path                         # a model folder for tt.rollout, Transformers or SGLang
    """

    folder: Path

    @public()
    def __init__(self, folder: str | Path) -> None:
        object.__setattr__(self, "folder", Path(folder).absolute())
        if not (self.folder / METRICS).is_file():
            raise UserError("run", f"must be a run folder, with {METRICS}", str(folder), "give a folder of tt.train")

    def __repr__(self) -> str:
        return f"Run({path_text(self.folder)!r}, {len(self.rows)} steps)"

    @property
    def rows(self) -> list[dict[str, float]]:
        """The metrics of each step so far."""
        return [json.loads(line) for line in (self.folder / METRICS).read_text(encoding="utf-8").splitlines()]

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics of each step so far: a pandas table with a row a step."""
        import pandas

        return pandas.DataFrame(self.rows)

    @property
    def summary(self) -> Mapping[str, Any]:
        """What the run says of itself at its end; empty while it runs."""
        file = self.folder / SUMMARY
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        return {}

    @property
    def accuracy(self) -> Mapping[str, float]:
        """Held-out accuracy at the end, by way of playing; empty without an evaluation or without a success."""
        return self.summary.get("accuracy_after", {})

    @property
    def accuracy_before(self) -> Mapping[str, float]:
        """Held-out accuracy before the first step, by way of playing."""
        return self.summary.get("accuracy_before", {})

    @property
    def curve(self) -> list[Mapping[str, Any]]:
        """Every evaluation on held-out problems: step, and accuracy, mean reward and interval by way of playing."""
        return self.summary.get("evaluations", [])

    @property
    def model_path(self) -> Path:
        """The folder of the trained model. Raises `UserError` if the run has not written it."""
        if not (self.folder / MODEL).is_dir():
            fix = "wait for its end, or use trainer.export for a checkpoint"
            raise UserError("run", "must have written its model", str(self.folder), fix)
        return self.folder / MODEL

    @property
    def best_path(self) -> Path:
        """The folder of the model with the best held-out figure. Raises `UserError` unless `eval_every` was given."""
        if not (self.folder / BEST).is_dir():
            fix = "train with eval_every"
            raise UserError("run", "must have kept its best model", str(self.folder), fix)
        return self.folder / BEST

    @functools.cached_property
    def recording(self) -> Recording:
        """The recorded episodes: `recording.episodes()` reads them one by one."""
        return Recording.open(self.folder)

    def episodes(self) -> Iterator[Trajectory]:
        """Yield the recorded episodes without processed images, in the order in which they ended."""
        return (self.recording.trajectory(episode) for episode in self.recording.episodes())
