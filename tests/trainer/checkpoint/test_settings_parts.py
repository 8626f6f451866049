"""Claims about a run whose settings change when it is resumed: each step keeps the settings that it had."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.settings_parts import found_parts, history, keep_settings
from trainer.config.learner import OptimConfig
from trainer.config.run import RunConfig


def config(lr: float) -> RunConfig:
    return RunConfig(optim=OptimConfig(lr=lr))


def rates(run: Path) -> list[tuple[int, float]]:
    return [(part.first_step, part.read(RunConfig).optim.lr) for part in found_parts(run)]


def test_a_resume_says_and_keeps_what_it_changes(tmp_path: Path) -> None:
    assert keep_settings(tmp_path, 0, config(1e-5)) == []
    assert keep_settings(tmp_path, 2, config(1e-5)) == []
    assert keep_settings(tmp_path, 2, config(1e-6)) == ["lr 1e-05 -> 1e-06 from step 3"]
    assert rates(tmp_path) == [(1, 1e-5), (3, 1e-6)]


def test_settings_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    for step, lr in ((0, 1e-5), (2, 1e-6), (4, 1e-7), (2, 1e-5)):
        keep_settings(tmp_path, step, config(lr))
    assert rates(tmp_path) == [(1, 1e-5)]


def test_weights_of_an_earlier_step_have_the_settings_until_then(tmp_path: Path) -> None:
    for step, lr in ((0, 1e-5), (2, 1e-6)):
        keep_settings(tmp_path, step, config(lr))
    found = [[(first, part.optim.lr) for first, part in history(tmp_path, step, config(1))] for step in (0, 2, 3)]
    assert found == [[(1, 1e-5)], [(1, 1e-5)], [(1, 1e-5), (3, 1e-6)]]
