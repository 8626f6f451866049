"""Claims about the learner over Megatron: its step is that of the other backend, under every layout.

They run Megatron-core and Megatron-Bridge themselves on a CPU (`tests.megatron_cpu`), where these are installed.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from agents.model.policy import PolicyModel
from agents.types import ProcessedImage, SamplingParams
from envs.errors import UserError
from tests.builders import fresh_model
from tests.processes import run_ranks
from tests.tiny_models import write_tiny_model
from tests.trainer.steps import random_samples
from trainer.config.learner import LayoutConfig, LearnerConfig, OptimConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.layout import Layout
from trainer.learner.megatron.adapters import megatron_targets
from trainer.learner.megatron.network import check_rope, provider_settings
from trainer.learner.megatron.tower import shared_groups
from trainer.learner.weights_io import empty_model
from trainer.types import TrainingSample

OPTIM = OptimConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1, minibatches=2)
PARAMS = SamplingParams(temperature=0.7)
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tp": 2},
    "pipeline": {"pp": 2},
}


def streams(folder: Path) -> list[list[TrainingSample]]:
    """Return two minibatches of streams, each with a key of its own."""
    every = [replace(s, key=(0, 0, number)) for number, s in enumerate(random_samples(PolicyModel.load(folder)))]
    return [every[0::2], every[1::2]]


def rank_main(rank: int, folder: Path, layouts: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Take a step under each layout, resume what the first one wrote, and let rank 0 keep what is left."""
    from tests.megatron_cpu import on_cpu, with_layout

    minibatches = streams(folder)
    on_cpu()
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    from trainer.learner.megatron.learner import MegatronLearner

    for name, flags in layouts.items():
        backend = LayoutConfig(backend="megatron", **flags)
        learner = MegatronLearner(
            folder, PARAMS, 5, OPTIM, backend=backend, device="cpu", dtype=torch.float32, changed=with_layout(flags)
        )
        shares = Layout.of(backend).data_parallel(2)
        number = learner.layout.data_rank(rank, 2)
        mine = [samples[number::shares] for samples in minibatches]
        before = {n: w.clone() for n, w in learner.weights().items()}
        if name == "data":
            learner.begin_checkpoint(out / "untrained")  # before the first step makes the moments
            assert learner.is_checkpoint_written(wait=True)
            learner.restore(out / "untrained")
        stats = learner.step(mine)
        keys: list[Any] = [None, None]
        dist.all_gather_object(keys, dict(stats.logprobs))
        logprobs = {key: value for part in keys for key, value in part.items()}
        stream = minibatches[0][0]
        left = {
            "before": before,
            "stats": replace(stats, logprobs={}),
            "logprobs": logprobs,
            "weights": {n: w.clone() for n, w in learner.weights().items()},
            "score": learner.score(stream.ids_T.tolist(), stream.images),
            "sum": learner.sum_logprobs([s for samples in mine for s in samples]),
            "shapes": learner.shapes(),
        }
        folders = out / "checkpoint", out / f"{name}-model"
        learner.save(folders[1], torch.float32)
        if name == "tensor":
            learner.begin_checkpoint(folders[0])
            assert learner.is_checkpoint_written(wait=True)
            left["second"] = learner.step(mine)
        if name == "pipeline":
            learner.restore(folders[0])
            left["resumed"] = {n: w.clone() for n, w in learner.weights().items()}
            left["second"] = learner.step(mine)
        if rank == 0:
            torch.save(left, out / f"{name}.pt")
        parallel_state.destroy_model_parallel()


def images_main(rank: int, folder: Path, together: Sequence[int], out: Path) -> None:
    """Take a step with images and recomputed blocks, up to so many of their tokens encoded together; keep what is
    left of it, and what it left in memory.
    """
    from tests.megatron_cpu import on_cpu, without_kernels

    samples = random_samples(PolicyModel.load(folder))
    config = LearnerConfig(recompute=1.0, max_tokens_per_microbatch=max(len(sample.ids_T) for sample in samples))
    on_cpu()
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    from trainer.learner.megatron.learner import MegatronLearner

    for most in together:
        learner = MegatronLearner(
            folder, PARAMS, 5, OPTIM, config=config, device="cpu", dtype=torch.float32, changed=without_kernels
        )
        learner.network._most_encoded = most
        (tower,) = learner.network._towers
        encode, encoded = tower._encode, []

        def counted(
            hidden_states: torch.Tensor, grid_thw: torch.Tensor, encode: Any = encode, encoded: list[int] = encoded
        ) -> Any:
            assert len(hidden_states) == int(grid_thw.prod(-1).sum())
            encoded.append(len(hidden_states))
            return encode(hidden_states=hidden_states, grid_thw=grid_thw)

        tower._encode = counted
        collated, collate = [], learner._collate
        learner._collate = lambda *given, many=collated, make=collate: many.append(1) or make(*given)
        stats = learner.step([samples])
        computed = [x for x in gc.get_objects() if torch.is_tensor(x) and x.grad_fn is not None]
        alive = [x for x in computed if x.ndim == 3 and x.shape[1] == 1]  # hidden states: tokens, 1, hidden size
        left = {"stats": stats, "weights": {n: w.clone() for n, w in learner.weights().items()}, "encoded": encoded}
        torch.save({**left, "alive": len(alive), "micro_batches": len(collated)}, out / f"images-{most}.pt")
        parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "qwen3"
    write_tiny_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    learner = FSDPLearner(fresh_model(folder), PARAMS, 5, OPTIM, path=folder)
    stats = learner.step(streams(folder))
    weights = {name: weight.clone() for name, weight in learner.weights().items()}
    stream = streams(folder)[0][0]
    total = learner.sum_logprobs([s for samples in streams(folder) for s in samples])
    return {"stats": stats, "weights": weights, "score": learner.score(stream.ids_T.tolist(), ()), "sum": total}


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron", reason="needs Megatron")
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, 2, out / "store", folder, LAYOUTS, out)
    return out


def left(done: Path, name: str) -> dict[str, Any]:
    return torch.load(done / f"{name}.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_that_of_the_other_backend(expected: dict[str, Any], done: Path, name: str) -> None:
    got, stats = left(done, name), expected["stats"]
    for field in ("loss", "grad_norm", "entropy", "rollout_train_kl", "logprob_gap_mean", "num_tokens", "num_updates"):
        assert getattr(got["stats"], field) == pytest.approx(getattr(stats, field), rel=1e-4), field
    assert got["stats"].objective == pytest.approx(dict(stats.objective), rel=1e-4)
    assert got["logprobs"].keys() == stats.logprobs.keys()
    assert max(np.abs(got["logprobs"][key] - value).max() for key, value in stats.logprobs.items()) < 1e-4
    moved = torch.cat([(expected["weights"][n] - w).flatten() for n, w in got["before"].items()]).norm()
    apart = torch.cat([(expected["weights"][n] - w).flatten() for n, w in got["weights"].items()]).norm()
    assert got["weights"].keys() == expected["weights"].keys() and apart < 0.01 * moved
    assert np.abs(got["score"] - expected["score"]).max() < 0.01
    assert got["sum"] == pytest.approx(expected["sum"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_come_out_as_they_went_in_and_transformers_reads_what_is_saved(
    folder: Path, done: Path, name: str
) -> None:
    got, model = left(done, name), PolicyModel.load(folder)
    assert all(torch.equal(got["before"][n], weight) for n, weight in model.named_parameters())
    saved = dict(PolicyModel.load(done / f"{name}-model").named_parameters())
    assert saved.keys() == got["weights"].keys()
    assert all(torch.equal(saved[n], weight) for n, weight in got["weights"].items())
    assert {f"backbone.{n}": shape for n, shape in got["shapes"]} == {n: tuple(w.shape) for n, w in saved.items()}


@pytest.mark.slow
def test_a_run_of_two_tensor_ranks_resumes_on_two_pipeline_stages(done: Path) -> None:
    wrote, read = left(done, "tensor"), left(done, "pipeline")
    assert all(torch.equal(read["resumed"][n], weight) for n, weight in wrote["weights"].items())
    for field in ("loss", "grad_norm", "entropy"):
        assert getattr(read["second"], field) == pytest.approx(getattr(wrote["second"], field), rel=1e-4), field


@pytest.mark.slow
def test_images_are_encoded_once_for_many_micro_batches_and_recomputed_blocks_leave_nothing_in_memory(
    tmp_path: Path,
) -> None:
    pytest.importorskip("megatron", reason="needs Megatron")
    write_tiny_model(tmp_path / "qwen3_vl", "qwen3_vl")
    model = fresh_model(tmp_path / "qwen3_vl")
    samples = random_samples(model)
    learner = FSDPLearner(model, PARAMS, 5, OPTIM, path=tmp_path / "qwen3_vl")
    stats = learner.step([samples])
    weights = learner.weights()
    patches = {image.digest: len(image.pixels_PD) for sample in samples for image in sample.images}
    all_of_them, none = 10**6, 0
    run_ranks(images_main, 1, tmp_path / "store", tmp_path / "qwen3_vl", (all_of_them, none), tmp_path)
    for most in (all_of_them, none):
        got = left(tmp_path, f"images-{most}")
        assert got["stats"].loss == pytest.approx(stats.loss, rel=1e-5)
        assert got["stats"].grad_norm == pytest.approx(stats.grad_norm, rel=1e-5)
        for name, weight in got["weights"].items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-4)  # a step moves by 1e-3
        assert got["alive"] == 0 and got["micro_batches"] > 1
        encoded = got["encoded"]
        if most:
            assert len(encoded) == 2 and sum(encoded) == sum(patches.values())  # measured alone, and trained
        else:
            assert 2 < len(encoded) <= got["micro_batches"] and sum(encoded) > sum(patches.values())


@pytest.mark.parametrize(
    ("most", "groups"),
    [(100, [4]), (30, [4]), (29, [1, 3]), (10, [1, 1, 2]), (0, [1, 1, 1, 1])],
)
def test_micro_batches_share_an_encoding_while_their_different_images_are_few(most: int, groups: list[int]) -> None:
    """Micro-batches with images A and B, B and C, C twice, none: 10 tokens each."""
    a, b, c = (ProcessedImage(name, np.zeros((40, 3), np.float32), (1, 5, 8), num_tokens=10) for name in "abc")
    batches = [(a, b), (b, c), (c, c), ()]
    found = shared_groups(batches, most)
    assert [own for group in found for own in group] == batches
    assert [len(group) for group in found] == groups


def test_rotary_positions_that_megatron_would_compute_otherwise_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    with pytest.raises(UserError, match=r"rotary positions that Megatron knows.*original_max_position_embeddings.*512"):
        check_rope(empty_model(tmp_path).config)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = 8192
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_rope(empty_model(tmp_path).config)


def test_nothing_averages_the_loss_and_lengths_may_vary() -> None:
    settings = provider_settings(LearnerConfig(), Layout(pipeline=2), torch.bfloat16)
    assert settings["calculate_per_token_loss"] and settings["moe_aux_loss_coeff"] == 0.0
    assert settings["variable_seq_lengths"]


def test_a_target_of_lora_is_the_layer_that_holds_it() -> None:
    assert megatron_targets((), reads_images=True) == [
        "*language_model*.linear_qkv",
        "*language_model*.linear_proj",
        "*language_model*.linear_fc1",
        "*language_model*.linear_fc2",
    ]
    with pytest.raises(UserError, match="q_proj"):
        megatron_targets(["q_prj"], reads_images=False)
