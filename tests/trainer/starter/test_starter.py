"""The starter: its recipe runs, its demonstrations teach what they say, and the weights that ship are the recipe's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from envs.config.cli import exit_code
from envs.geo3k.procedural import ProceduralGeo3k, split_of
from trainer.starter.__main__ import run
from trainer.starter.architecture import build_image_processor
from trainer.starter.demonstrations import Demonstration, Demonstrator
from trainer.starter.plans import MIXED_HABITS, Mixture
from trainer.starter.recipes import RECIPES
from trainer.starter.training import Collator, lr_at, patchify, sft_loss


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Renderer.from_checkpoint(STARTER_PATH).tokenizer


@pytest.fixture(scope="module")
def collator(tokenizer: Any) -> Collator:
    return Collator(tokenizer.convert_tokens_to_ids("<|image_pad|>"), tokenizer.pad_token_id)


def taught(tokenizer: Any, demonstration: Demonstration) -> str:
    return tokenizer.decode(demonstration.ids_T[demonstration.loss_mask_T])


@pytest.mark.slow
def test_the_smoke_recipe_trains_a_checkpoint_whose_loss_has_fallen(tmp_path: Path) -> None:
    assert run(["--recipe", "smoke", "--out", str(tmp_path), "--device", "cpu"]) == 0
    report = json.loads((tmp_path / "recipe.json").read_text())
    first, second = (stage["losses"] for stage in report["stages"])
    # Nats per token, one number a step; 6.5 is a guess among the vocabulary.
    assert first[0] > 6.0 and sum(first[-4:]) / 4 < 2.0
    assert sum(second[-4:]) < sum(second[:4])
    assert report["sha256"] == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    model, renderer = PolicyModel.load(tmp_path), Renderer.from_checkpoint(tmp_path)
    assert model.image_token_id == renderer.image_token_id


def test_the_weights_that_ship_are_those_of_the_model_card() -> None:
    weights = (STARTER_PATH / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    assert len(weights) <= 12e6
    assert json.loads((STARTER_PATH / "recipe.json").read_text())["sha256"] == digest
    card = (STARTER_PATH / "README.md").read_text()
    assert digest in card
    assert f"{sum(p.numel() for p in PolicyModel.load(STARTER_PATH).parameters()):,}" in card


def test_the_recipe_that_ships_is_the_recipe_in_the_code() -> None:
    recorded = json.loads((STARTER_PATH / "recipe.json").read_text())["recipe"]
    recipe = RECIPES["starter"]
    assert recorded["seed"] == recipe.seed
    assert recorded["stages"] == [asdict(stage) for stage in recipe.stages]


def test_demonstrations_show_only_problems_of_their_own_split() -> None:
    problems = ProceduralGeo3k("demonstrations", 200, seed=17)
    assert {split_of(problems.problem(i).key) for i in range(200)} == {"demonstrations"}


def test_a_demonstration_is_the_same_every_time(tokenizer: Any) -> None:
    one, other = (Demonstrator(tokenizer, 40, seed=3, mixture=MIXED_HABITS) for _ in range(2))
    for index in reversed(range(40)):
        assert one[index].ids_T.tolist() == other[index].ids_T.tolist()
        assert one[index].loss_mask_T.tolist() == other[index].loss_mask_T.tolist()
        assert np.array_equal(one[index].image_HW, other[index].image_HW)


def test_a_misreading_is_shown_but_never_taught(tokenizer: Any) -> None:
    always = Mixture(tools_offered=1.0, checks=1.0, first_wrong=1.0, second_wrong=1.0)
    demonstrator = Demonstrator(tokenizer, 30, seed=5, mixture=always)
    problems = ProceduralGeo3k("demonstrations", 30, seed=5)
    for index in range(30):
        problem, demonstration = problems.problem(index), demonstrator[index]
        text = tokenizer.decode(demonstration.ids_T)
        if text.count("is wrong") == 2:  # both misreadings were possible
            assert taught(tokenizer, demonstration) == f"{problem.reasoning} \\boxed{{{problem.answer}}}<|im_end|>"
        assert "<tool_call>" not in taught(tokenizer, demonstration) or "is right" in text


@pytest.mark.parametrize(
    ("mixture", "pattern"),
    [
        (Mixture(tools_offered=0.0), "{reasoning} \\boxed{{{answer}}}<|im_end|>"),
        (Mixture(tools_offered=0.0, reasons=0.0), "\\boxed{{{answer}}}<|im_end|>"),
        (Mixture(tools_offered=1.0, checks=0.0, reasons=0.0), "\\boxed{{{answer}}}<|im_end|>"),
    ],
)
def test_each_habit_is_shown_as_its_mixture_says(mixture: Mixture, pattern: str, tokenizer: Any) -> None:
    demonstrator = Demonstrator(tokenizer, 20, seed=8, mixture=mixture)
    problems = ProceduralGeo3k("demonstrations", 20, seed=8)
    for index in range(20):
        problem = problems.problem(index)
        expected = pattern.format(reasoning=problem.reasoning, answer=problem.answer)
        assert taught(tokenizer, demonstrator[index]) == expected


def test_giving_up_repeats_the_wrong_answer(tokenizer: Any) -> None:
    mixture = Mixture(tools_offered=1.0, checks=1.0, first_wrong=1.0, gives_up=1.0)
    demonstrator = Demonstrator(tokenizer, 20, seed=9, mixture=mixture)
    shown = [(tokenizer.decode(d.ids_T), taught(tokenizer, d)) for d in (demonstrator[i] for i in range(20))]
    wrong = [(text, last) for text, last in shown if "is wrong" in text]
    assert len(wrong) > 15
    for text, last in wrong:
        called = json.loads(text.split("<tool_call>")[2].split("</tool_call>")[0])["arguments"]["answer"]
        assert last == f"\\boxed{{{called}}}<|im_end|>"


def test_packed_demonstrations_have_the_loss_that_they_have_alone(tokenizer: Any, collator: Collator) -> None:
    model = PolicyModel.load(STARTER_PATH)
    demonstrations = [Demonstrator(tokenizer, 8, seed=2)[i] for i in range(8)]
    with torch.no_grad():
        together = sft_loss(model, collator(demonstrations)).item()
        sums = [(sft_loss(model, collator([d])).item(), int(d.loss_mask_T.sum())) for d in demonstrations]
    assert together == pytest.approx(sum(loss * n for loss, n in sums) / sum(n for _, n in sums), rel=1e-5)


def test_patches_cut_on_the_device_equal_those_of_the_image_processor() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (2, 128, 160), dtype=np.uint8)
    pictures = [Image.fromarray(picture).convert("RGB") for picture in grey]
    expected = build_image_processor()(images=pictures, return_tensors="np")["pixel_values"]
    assert np.abs(patchify(torch.from_numpy(grey)).numpy() - expected).max() < 1e-6


def test_the_learning_rate_warms_up_and_falls_to_a_hundredth() -> None:
    stage = RECIPES["starter"].stages[0]
    assert lr_at(0, stage) == pytest.approx(stage.lr / stage.warmup_steps)
    assert lr_at(stage.warmup_steps, stage) == pytest.approx(stage.lr)
    assert lr_at(stage.steps, stage) == pytest.approx(stage.lr / 100)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe", "smok"], "did you mean 'smoke'"),
        (["--first-stage", "9"], f"1 to {len(RECIPES['starter'].stages)}"),
        (["--first-stage", "2"], "--init"),
    ],
)
def test_bad_arguments_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(argv)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line
