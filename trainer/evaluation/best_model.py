"""The model folder `best` of a run: the weights with the best held-out figure so far, and what they reached.

The folder itself says which step it is of. A resumed run takes the steps after its checkpoint again, so it keeps only
a model that the checkpoint's evaluations know: `best`, or else the one before it, which stays as `best.before` until a
checkpoint knows of the new one.
"""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from agents.cli.text import path_text
from agents.recording.append_log import ABANDONED
from trainer.checkpoint.run_dir import BEST
from trainer.evaluation.curve import Curve, trained
from trainer.evaluation.results import Figure

logger = logging.getLogger(__name__)

#: The file of the folder that says so.
RECORD = "best.json"
#: The folder of the best model before this one.
BEFORE = "best.before"


@dataclass(frozen=True)
class BestModel:
    """The step of the best weights, and their figure in the way of playing that is trained.

    Example: `BestModel(step=30, way="with_tool", figure="accuracy", value=0.61)`.
    """

    step: int
    way: str
    figure: Figure
    value: float

    @classmethod
    def found(cls, folder: Path) -> BestModel | None:
        """Return what a model folder says; None where there is no such folder, or a killed process left half of one."""
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            figure: Figure = "accuracy" if "accuracy" in record else "mean_reward"
            return cls(record["step"], record["way"], figure, record[figure])
        # Anything may stand in a file that a killed process has left, or that somebody has edited.
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def record(self) -> dict[str, object]:
        """Return what the folder's file and the run's summary say."""
        return {"step": self.step, "way": self.way, self.figure: self.value}

    def files(self) -> dict[str, str]:
        """Return the file for the model folder, by name."""
        return {RECORD: json.dumps(self.record()) + "\n"}

    def is_of(self, evaluations: Curve, step: int) -> bool:
        """Return whether a run with these evaluations by `step` has reached this figure.

        The evaluation at a run's start or end is in no checkpoint, but the weights of `step` are the run's own.
        """
        if self.step not in evaluations:
            # There is no evaluation to compare with: only the weights of this very step are surely the run's own.
            return self.step == step
        # Taken again, a step may have other weights, which show in another figure.
        estimate = trained(evaluations[self.step], self.figure)
        return estimate is not None and estimate.value == self.value


def resume_best(folder: Path, evaluations: Curve, step: int) -> BestModel | None:
    """Return the best model of a run folder that resumes after `step`; None where it has none.

    A model of steps that the run takes again is moved to `abandoned/`.
    """
    for path in (folder / BEST, folder / BEFORE):
        if not path.is_dir():
            continue
        best = BestModel.found(path)
        if best and best.is_of(evaluations, step):
            # The process ended between two renames, or `best` was of a step that is taken again.
            if path.name != BEST:
                path.rename(folder / BEST)
            return best
        _abandon(path, best)
    return None


def _abandon(path: Path, best: BestModel | None) -> None:
    step = f"step-{best.step}" if best else "unknown"
    # A run may be resumed several times from before the same step; nothing is overwritten.
    numbers = (f"{BEST}-{step}{f'-{number}' if number else ''}" for number in itertools.count())
    aside = next(each for name in numbers if not (each := path.parent / ABANDONED / name).exists())
    aside.parent.mkdir(exist_ok=True)
    path.rename(aside)
    logger.warning(f"{path.name} is of a step that the run takes again or never took: it is now {path_text(aside)}")
