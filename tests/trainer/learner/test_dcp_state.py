"""Claims about a learner's state: written and read back it trains on as if nothing had happened, on any ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agents.types import SamplingParams
from envs.errors import UserError
from tests.processes import run_ranks
from tests.tiny_models import write_tiny_model
from tests.trainer.checkpoint.test_checkpointer import largest_file
from tests.trainer.steps import random_samples, split, whole
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.learner.dcp_state import reason
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.protocol import CheckpointFailed
from trainer.learner.weights_io import empty_model
from trainer.types import StepStats, TrainingSample

OPTIM = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=2, weight_decay=0.1)


def learner_of(checkpoint: Path, **settings: Any) -> FSDPLearner:
    model = empty_model(checkpoint)
    config = LearnerConfig(**settings)
    return FSDPLearner(model, SamplingParams(), 6, OPTIM, config=config, path=checkpoint)


def everything(learner: FSDPLearner) -> dict[str, Tensor]:
    """Return copies of weights and moments."""
    if learner._state:
        learner._state.to_device()
    names = {p: name for name, p in learner.model.named_parameters()}
    found = {name: whole(p) for p, name in names.items()}
    for parameter, state in learner.optimizer.state.items():
        found |= {f"{names[parameter]}/{key}": whole(value) for key, value in state.items()}
    if learner._state:
        learner._state.to_host()
    return found


def save(learner: FSDPLearner, folder: Path) -> None:
    learner.begin_checkpoint(folder)
    assert learner.is_checkpoint_written(wait=True)


def assert_same(got: FSDPLearner, expected: FSDPLearner) -> None:
    ours, theirs = everything(got), everything(expected)
    assert ours.keys() == theirs.keys() and any("exp_avg" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def trained(learner: FSDPLearner, steps: int) -> list[StepStats]:
    return [learner.step([random_samples(learner.model, seed)]) for seed in range(steps)]


@pytest.mark.parametrize(
    "settings", [{}, {"offload": "optimizer"}, {"offload": "all"}, {"lora_rank": 4}, {"freeze_vision": True}], ids=str
)
def test_a_restored_learner_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    if "lora_rank" in settings:
        pytest.importorskip("peft")
    assert_goes_on(checkpoint, tmp_path / "state", settings)


def test_a_network_with_states_goes_on_bit_for_bit(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "qwen3_5")
    assert_goes_on(tmp_path / "model", tmp_path / "state", {"recompute": 0.5})


def assert_goes_on(checkpoint: Path, folder: Path, settings: dict[str, Any]) -> None:
    unbroken = learner_of(checkpoint, **settings)
    trained(unbroken, 3)
    save(unbroken, folder)
    expected = trained(unbroken, 2)  # while the state may still be being written, had it not been waited for
    restored = learner_of(checkpoint, **settings)
    restored.restore(folder)
    assert restored.steps_done == 3
    assert trained(restored, 2) == expected
    assert_same(restored, unbroken)


@pytest.mark.parametrize("settings", [{}, {"offload": "optimizer"}], ids=str)
def test_a_state_that_is_written_before_the_first_update_changes_nothing_in_training(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    never_saved, saved, restored = (learner_of(checkpoint, **settings) for _ in range(3))
    equal = [replace(sample, advantage=0.0) for sample in random_samples(saved.model)]
    for learner in (never_saved, saved):
        assert learner.step([equal]).num_updates == 0  # all groups have equal rewards
    save(saved, tmp_path / "state")
    restored.restore(tmp_path / "state")
    assert restored.steps_done == 1
    assert trained(saved, 2) == trained(restored, 2) == trained(never_saved, 2)
    assert_same(saved, never_saved)
    assert_same(restored, never_saved)


def test_parameters_that_had_no_gradient_yet_have_no_moments_afterwards(checkpoint: Path, tmp_path: Path) -> None:
    def without_images(learner: FSDPLearner, seed: int) -> list[TrainingSample]:
        return [sample for sample in random_samples(learner.model, seed) if not sample.images]

    unbroken = learner_of(checkpoint)
    unbroken.step([without_images(unbroken, 0)])
    save(unbroken, tmp_path / "state")
    restored = learner_of(checkpoint)
    restored.restore(tmp_path / "state")
    assert not any("visual" in name and "/" in name for name in everything(restored))
    for learner in (unbroken, restored):
        learner.step([random_samples(learner.model, 1)])  # now the tower learns too
    assert any("visual" in name and "/" in name for name in everything(restored))
    assert_same(restored, unbroken)


def test_training_goes_on_while_the_state_of_before_is_written(checkpoint: Path, tmp_path: Path) -> None:
    learner = learner_of(checkpoint)
    trained(learner, 1)
    before = everything(learner)
    learner.begin_checkpoint(tmp_path / "state")
    trained(learner, 1)
    assert learner.is_checkpoint_written(wait=True)
    restored = learner_of(checkpoint)
    restored.restore(tmp_path / "state")
    after = everything(restored)
    assert all(torch.equal(after[name], before[name]) for name in before)
    name = "backbone.model.language_model.norm.weight"
    assert not torch.equal(everything(learner)[name], before[name])


def test_settings_of_the_optimizer_are_those_of_the_run_that_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    first = learner_of(checkpoint)
    trained(first, 1)
    save(first, tmp_path / "state")
    other = FSDPLearner(
        empty_model(checkpoint), SamplingParams(), 6, OptimConfig(lr=5e-4, beta2=0.98, warmup_steps=0), path=checkpoint
    )
    other.restore(tmp_path / "state")
    assert [(g["betas"], g["weight_decay"]) for g in other.optimizer.param_groups] == [((0.9, 0.98), 0.0)]
    assert trained(other, 1)[0].lr == 5e-4


def test_only_what_is_trained_is_written(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    sizes = {}
    for name, settings in {"all": {}, "adapters": {"lora_rank": 2}}.items():
        learner = learner_of(checkpoint, **settings)
        trained(learner, 1)
        save(learner, tmp_path / name)
        sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).glob("*.distcp"))
    assert sizes["adapters"] < sizes["all"] / 4


def test_the_state_of_another_network_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    save(learner_of(checkpoint), tmp_path / "state")
    with pytest.raises(UserError, match="--resume"):
        learner_of(checkpoint, lora_rank=4).restore(tmp_path / "state")


@pytest.mark.skipif(os.name != "posix", reason="needs a path that nobody can write to")
def test_a_place_that_cannot_be_written_is_said_and_the_learner_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    learner = learner_of(checkpoint)
    with pytest.raises((CheckpointFailed, OSError)):
        save(learner, tmp_path / "file" / "state")
    trained(learner, 1)
    save(learner, tmp_path / "state")


def test_a_write_that_stops_half_way_is_said_in_words(tmp_path: Path) -> None:
    with largest_file(300), pytest.raises(RuntimeError, match="unexpected pos") as raised:
        torch.save(torch.zeros(999), tmp_path / "x.pt")
    assert "unexpected pos" not in reason(raised.value) and "the disk is full" in reason(raised.value)


def on_rank(rank: int, checkpoint: Path, shares: Sequence[Sequence[TrainingSample]], written: Path, read: Path) -> None:
    """Go on from the state of one rank, then write that of this group."""
    learner = learner_of(checkpoint)
    learner.restore(read)
    learner.step([shares[rank]])
    save(learner, written)


@pytest.mark.slow
def test_two_ranks_go_on_from_one_and_one_from_two(checkpoint: Path, tmp_path: Path) -> None:
    alone = learner_of(checkpoint)
    trained(alone, 2)
    save(alone, tmp_path / "one")
    samples = random_samples(alone.model, seed=7)
    shares = split(samples, 2)
    run_ranks(on_rank, 2, tmp_path / "store", checkpoint, shares, tmp_path / "two", tmp_path / "one")
    alone.step([samples])
    together = learner_of(checkpoint)
    together.restore(tmp_path / "two")
    assert together.steps_done == 3
    ours, theirs = everything(together), everything(alone)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)
