"""The benchmarks of taught networks: what is taught, which runs there are, and what the table says of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from benchmarks import taught
from benchmarks.routing import Wanted, table, wanted_runs
from starter.architecture import SHAPES, write_beginner
from tests.tiny_models import write_tiny_model


@pytest.mark.parametrize("place", range(len(taught.STAGES)))
def test_every_lesson_shows_an_image_and_the_last_ones_show_it_enlarged(place: int) -> None:
    samples = taught.make_batch(taught.STAGES[place][1], seed=0, first=0, size=12)
    assert len(samples) == 12 and all(sample.images and sample.mask_T.any() for sample in samples)
    assert any(len(sample.images) > 1 for sample in samples) == (place == len(taught.STAGES) - 1)


def test_a_beginner_reads_with_the_starters_tower_and_the_rest_is_new(tmp_path: Path) -> None:
    write_beginner(tmp_path, SHAPES["mixture"], seed=0)
    weights = dict(PolicyModel.load(tmp_path).named_parameters())
    starter = dict(PolicyModel.load(STARTER_PATH).named_parameters())
    is_same = {
        name: torch.equal(weight, weights[name])
        for name, weight in starter.items()
        if name in weights and weight.shape == weights[name].shape and weight.std() > 0
    }
    assert all(same == (".visual." in name and ".deepstack" not in name) for name, same in is_same.items())
    assert sum(is_same.values()) > 50
    assert 30e6 < sum(weight.numel() for weight in weights.values()) < 100e6


def test_some_seconds_of_lessons_make_a_checkpoint(tmp_path: Path) -> None:
    args = argparse.Namespace(
        shape="smoke",
        minutes=0.1,
        batch_size=4,
        lr=1e-3,
        max_tokens=4096,
        num_workers=1,
        device="cpu",
        seed=0,
        log_every=1,
        out=tmp_path,
    )
    assert taught.teach(args, tmp_path / "smoke")
    assert PolicyModel.load(tmp_path / "smoke").config.text_config.hidden_size == SHAPES["smoke"].hidden


def test_only_a_mixture_runs_with_each_routing_and_runs_take_turns_on_the_cards(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_vl_moe")
    models = [f"mixture={tmp_path}", f"dense={STARTER_PATH}"]
    args = argparse.Namespace(models=models, routings=("free", "replay"), seeds=[0, 1], gpus=2)
    runs = wanted_runs(args)
    names = ["mixture-free-0", "mixture-free-1", "mixture-replay-0", "mixture-replay-1", "dense-0", "dense-1"]
    assert [run.name for run in runs] == names
    assert [run.gpu for run in runs] == [0, 1, 0, 1, 0, 1]


def test_the_table_has_means_without_the_first_step_and_every_turn_and_layer_in_order() -> None:
    first = {"reward": 0.0, "rollout_train_kl": 9.0}
    later = {"reward": 0.6, "rollout_train_kl": 0.25, "rollout_train_kl/turn_1": 0.5, "routing/other_experts": 0.1}
    later |= {f"routing/other_experts/layer_{n}": n / 100 for n in (10, 9)}
    run = Wanted("mixture", Path(), "replay", 0, 0)
    *_, row = table({run: [first, later], Wanted("dead", Path(), "", 0, 0): []}).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["mixture", "replay", "1", "0.30 to 0.30", "0.25"]
    assert cells[-2:] == ["0.5", "0.09, 0.1"]
