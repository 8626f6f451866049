"""Claims about the best model of a run that resumes: it is one that the run itself has reached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agents.types import EndReason
from tests.environments import lucky_geometry
from tests.trainer.test_run import train
from trainer.checkpoint.run_dir import BEST
from trainer.evaluation.best_model import BEFORE, RECORD, BestModel, resume_best
from trainer.evaluation.curve import Curve
from trainer.evaluation.results import EvaluatedEpisode, ProblemResult, summarise
from trainer.evaluation.statistics import Intervals
from trainer.run import run


def curve(**rewards: float) -> Curve:
    """Return a curve: `s2=0.5` is a mean reward, and an accuracy, of 0.5 after step 2."""

    def ways(reward: float) -> dict:
        episodes = [
            EvaluatedEpisode(float(n < 4 * reward), n < 4 * reward, EndReason.COMPLETED, 1, 1) for n in range(4)
        ]
        results = [ProblemResult(n, "x", {}, (episode,)) for n, episode in enumerate(episodes)]
        return {"with_tool": summarise(results, (1,), Intervals())}

    return {int(step[1:]): ways(reward) for step, reward in rewards.items()}


def write(folder: Path, step: int, value: float) -> BestModel:
    best = BestModel(step, "with_tool", "accuracy", value)
    folder.mkdir(parents=True)
    for name, text in best.files().items():
        (folder / name).write_text(text)
    return best


@pytest.mark.parametrize(
    ("step", "value", "is_kept"),
    [
        (2, 0.5, True),
        (2, 0.75, False),  # that step came out otherwise
        (3, 0.75, False),  # a step after the checkpoint
        (4, 0.75, True),  # the end of the run, which no checkpoint evaluates, of the checkpoint's own weights
    ],
)
def test_the_best_model_is_kept_only_if_the_checkpoint_knows_it(
    tmp_path: Path, step: int, value: float, is_kept: bool
) -> None:
    best = write(tmp_path / BEST, step, value)
    found = resume_best(tmp_path, curve(s0=0.25, s2=0.5), 4)
    assert found == (best if is_kept else None)
    aside = tmp_path / "abandoned" / f"best-step-{step}"
    assert (tmp_path / BEST).exists() is is_kept and aside.exists() is not is_kept


def test_the_best_model_before_an_abandoned_one_takes_its_place(tmp_path: Path) -> None:
    write(tmp_path / BEST, 6, 1.0)
    before = write(tmp_path / BEFORE, 2, 0.5)
    assert resume_best(tmp_path, curve(s0=0.25, s2=0.5), 4) == before
    assert BestModel.found(tmp_path / BEST) == before and not (tmp_path / BEFORE).exists()
    write(tmp_path / BEFORE, 0, 0.0)
    shutil.rmtree(tmp_path / BEST)  # a process killed between two renames
    write(tmp_path / BEST, 6, 0.75)
    assert resume_best(tmp_path, curve(s2=0.5), 4) is None
    names = {path.name for path in (tmp_path / "abandoned").iterdir()}
    assert names == {"best-step-6", "best-step-6-1", "best-step-0"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"step": 2, "way": "x"}', "\xff"])
def test_a_damaged_record_of_the_best_model_is_moved_away_and_stops_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / BEST).mkdir()
    (tmp_path / BEST / RECORD).write_text(text, encoding="latin-1")
    assert resume_best(tmp_path, curve(s2=0.5), 4) is None
    assert (tmp_path / "abandoned" / "best-unknown").is_dir()


def test_a_run_resumed_from_before_its_best_step_ends_with_the_best_of_its_own_steps(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = ["--lr", "1e-3", "--eval-every", "1", "--save-every", "2"]
    with lucky_geometry(tmp_path, "lucky_best", "return float(len(text) % 3)") as env:
        train(checkpoint, folder, *env, *flags, steps=4)
        # As if the process had been killed after the evaluation of step 3, which was the best, and before step 4 ended.
        shutil.rmtree(folder / "checkpoints" / "step-4")
        lucky = BestModel(3, "with_tool", "accuracy", 1.5)
        (folder / BEST / RECORD).write_text(lucky.files()[RECORD])
        assert run(["--resume", str(folder), "--lr", "1e-6"]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert BestModel.found(folder / "abandoned" / "best-step-3") == lucky
    reached = {point["step"]: point["accuracy"]["with_tool"] for point in summary["evaluations"]}
    best = summary["best"]
    assert best["accuracy"] == reached[best["step"]] and BestModel.found(folder / BEST)
    assert f" after {best['step']} steps of" in (folder / BEST / "README.md").read_text()
