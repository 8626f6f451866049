"""Claims about a run of every architecture: it resumes to the bit, its model loads anywhere, its recording replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from agents.model.architectures import ARCHITECTURES
from agents.model.policy import PolicyModel
from agents.replay import run as replay
from agents.types import SamplingParams
from tests.agents.model.test_architectures import SMALL as IMAGE
from tests.agents.model.test_architectures import piece, plain_logits
from tests.builders import full_logprobs
from tests.by_architecture import all_but_two_slow
from tests.environments import lucky_geometry, lucky_lengths
from tests.tiny_models import write_tiny_model
from tests.trainer.networks import parameters
from tests.trainer.runs import PATIENT, assert_equal_runs, metrics_of, state_of
from tests.trainer.test_run import train
from trainer.export import run as export
from trainer.run import run


@contextmanager
def environment_of(model_type: str, folder: Path) -> Iterator[list[str]]:
    """Give the flags of an environment that teaches something: with images, or without for a text network."""
    if ARCHITECTURES[model_type].vision:
        reward = "return float(len(text) % 3)"
        with lucky_geometry(folder, f"lucky_{model_type}", reward) as flags:
            yield flags
    else:
        with lucky_lengths(folder, f"lucky_{model_type}", "float(len(text) % 3)", num_rows=8) as flags:
            yield [*flags, "--eval-data", str(folder / "rows.jsonl")]


@pytest.mark.parametrize("model_type", all_but_two_slow())
def test_a_run_resumes_to_the_bit_and_exports_and_replays(model_type: str, tmp_path: Path) -> None:
    base, whole, cut = tmp_path / "base", tmp_path / "whole", tmp_path / "cut"
    write_tiny_model(base, model_type)
    with environment_of(model_type, tmp_path) as flags:
        often = [*flags, "--lr", "1e-3", "--save-every", "1", "--config", PATIENT]
        train(base, whole, *often, steps=2)
        train(base, cut, *often, steps=1)
        assert run(["--resume", str(cut), "--steps", "2"]) == 0
        assert_equal_runs(whole, cut, 2, "steps_done", "end_reasons")
        assert all(row["grad_norm"] > 0 and row["rollout_train_kl"] < 1e-8 for row in metrics_of(whole))
        assert replay([str(whole), *flags[:4]]) == 0
    assert export([str(whole), "--to", str(tmp_path / "exported"), "--dtype", "float32"]) == 0
    assert_exported(tmp_path / "exported", whole, model_type)


def assert_exported(folder: Path, run_folder: Path, model_type: str) -> None:
    """The exported folder has the checkpoint's weights, and plain Transformers computes with it what we compute."""
    ours = PolicyModel.load(folder)
    trained = state_of(run_folder, 2)
    for name, weight in parameters(ours).items():
        assert torch.equal(weight, trained[f"model.{name}"]), name
    plain = ARCHITECTURES[model_type].read(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids, images = piece(ours, 20, (IMAGE,))
    expected = plain_logits(plain, ids, images).log_softmax(-1)[:-1]
    with torch.no_grad():
        got = full_logprobs(ours, ids, images, SamplingParams())
    assert (got - expected).abs().max() <= 1e-4
