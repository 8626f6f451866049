"""Claims about every architecture: Transformers' own logits, one set of log-probs in engine and trainer, and its files.

Streams are drawn at random, images as patches of random values; only the networks are real.

Legend: T tokens of one stream, V vocabulary.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agents.engines.hf import HFEngine
from agents.model import STARTER_PATH
from agents.model.architectures import ARCHITECTURES, ModelFacts, architecture_of
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.model.vision import tower_inputs
from agents.types import (
    Completion,
    EndReason,
    GenerateRequest,
    ProcessedImage,
    RouteShape,
    SamplingDistribution,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from envs.errors import UserError
from tests.builders import full_logprobs
from tests.by_architecture import TEXT_TYPES, VISION_TYPES, OnDemand
from tests.tiny_models import MODEL_TYPES, write_tiny_model
from tests.trainer.steps import samples_of
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.data.packing import collate, filler_row
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.layout_rules import num_experts

#: Patches of an image of 3 x 5 windows of Qwen2.5-VL, the last ones cut off, and of one smaller than a window.
LARGE, SMALL = (1, 20, 34), (1, 4, 6)


@dataclass(frozen=True, eq=False)
class Case:
    """A tiny network of one architecture, its folder, and how it is sampled."""

    model_type: str
    folder: Path
    model: PolicyModel
    sampling: SamplingParams


def make_case(folder: Path, model_type: str, tied: bool | None = None) -> Case:
    write_tiny_model(folder, model_type, tied=tied)
    model = PolicyModel.load(folder)
    suppressed = (model.image_token_id, model.config.video_token_id) if model.architecture.vision else ()
    return Case(model_type, folder, model, SamplingParams(0.9, suppressed_ids=suppressed))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return OnDemand(lambda name: make_case(tmp_path_factory.mktemp(name), name))


@pytest.fixture(params=MODEL_TYPES)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def patches(model: PolicyModel, grid: tuple[int, int, int], seed: int) -> ProcessedImage:
    """Return an image of random patches."""
    vision = model.config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.random.default_rng(seed).normal(size=(grid[1] * grid[2], values)).astype(np.float32)
    return ProcessedImage(f"{grid} {seed}", pixels, grid, grid[1] * grid[2] // model.merge_size**2)


def piece(
    model: PolicyModel, num_tokens: int, grids: Sequence[tuple[int, int, int]] = (), seed: int = 0
) -> tuple[tuple[int, ...], tuple[ProcessedImage, ...]]:
    """Return random text with an image after every `num_tokens` tokens of it; a text-only network gets the text."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(20, 300, num_tokens).tolist()
    images = tuple(patches(model, g, seed + k) for k, g in enumerate(grids)) if model.architecture.vision else ()
    for image in images:
        ids += [model.image_token_id] * image.num_tokens + rng.integers(20, 300, num_tokens).tolist()
    return tuple(ids), images


@torch.no_grad()
def plain_logits(network: Any, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Tensor:
    """Return the (T, V) logits of Transformers' own forward pass, with its own positions and image features."""
    inputs: dict[str, Tensor] = {}
    ids_1T = torch.tensor([ids])
    if images:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([i.pixels_PD for i in images]))
        inputs["image_grid_thw"] = torch.tensor([i.grid_thw for i in images])
        inputs["mm_token_type_ids"] = (ids_1T == network.config.image_token_id).int()
    return network(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False, **inputs).logits[0]


def plain(case: Case) -> Any:
    return case.model.architecture.read(case.folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("grids", [(LARGE, SMALL), (LARGE, LARGE), (SMALL,)], ids=["two sizes", "one size", "small"])
def test_log_probs_equal_plain_transformers(case: Case, grids: tuple[tuple[int, int, int], ...]) -> None:
    ids, images = piece(case.model, 20, grids)
    expected = plain_logits(plain(case), ids, images)
    got = full_logprobs(case.model, ids, images, SamplingParams())
    assert expected.std() > 1  # weights large enough to tell a wrong network from a right one
    assert (got - expected.log_softmax(-1)[:-1]).abs().max() <= 1e-4


def test_a_part_left_out_would_show(cases: dict[str, Case]) -> None:
    """The tiny networks tell windows from whole images and DeepStack from none, so that equality says something."""
    for name in VISION_TYPES:
        row = ARCHITECTURES[name]
        network = plain(cases[name])
        ids, images = piece(cases[name].model, 20, (LARGE,))
        before = plain_logits(network, ids, images)
        if row.deepstack:
            network.model.visual.deepstack_visual_indexes = []
        if row.windows:
            network.model.visual.fullatt_block_indexes = list(range(len(network.model.visual.blocks)))
        if row.deepstack or row.windows:
            assert (plain_logits(network, ids, images) - before).abs().max() > 0.1, name


async def episode(engine: HFEngine, case: Case, seed: int, share: int) -> list[tuple[GenerateRequest, Completion]]:
    """Play three turns, an image before each; episodes with one `share` have one prompt."""
    turns: list[tuple[GenerateRequest, Completion]] = []
    prompt, images = piece(case.model, 8 + share, (SMALL, LARGE), seed=100 * share)
    async with engine.session() as session:
        for turn in range(3):
            if turn:
                asked, done = turns[-1]
                grid = (1, 4 * turn, 6 + 2 * (seed % 3))
                said, shown = piece(case.model, 3 + seed, (grid,), seed=1000 * turn + seed)
                prompt, images = asked.ids + done.ids + said, asked.images + shown
            request = GenerateRequest(prompt, images, 3 + (seed + turn) % 4, case.sampling, seed=10 * seed + turn)
            turns.append((request, await session.generate(request)))
    return turns


async def episodes(engine: HFEngine, case: Case) -> list[list[tuple[GenerateRequest, Completion]]]:
    """Play four episodes at once, two of which share a prompt."""
    return list(await asyncio.gather(*(episode(engine, case, seed, share=seed // 2) for seed in range(4))))


def as_trajectory(case: Case, turns: Sequence[tuple[GenerateRequest, Completion]], reward: float) -> Trajectory:
    asked, done = turns[-1]
    ids_T = np.array(asked.ids + done.ids)
    mask_T, logprobs_T = np.zeros(len(ids_T), dtype=np.bool_), np.zeros(len(ids_T), dtype=np.float32)
    spans = []
    for request, completion in turns:
        start, end = len(request.ids), len(request.ids) + len(completion.ids)
        mask_T[start:end], logprobs_T[start:end] = True, completion.logprobs
        spans.append(Turn(start, end, "", completion.finish, completion.versions, 0, (), {}, 0.0, 0.0))
    return Trajectory(
        sample_id="sample",
        sample_index=0,
        seed=0,
        ids_T=ids_T,
        mask_T=mask_T,
        logprobs_T=logprobs_T,
        images=asked.images,
        turns=tuple(spans),
        reward=reward,
        end_reason=EndReason.COMPLETED,
        prompt_length=len(turns[0][0].ids),
    )


@torch.no_grad()
def gaps(case: Case) -> np.ndarray:
    """Return trainer's log-prob less engine's of every token that the engine samples in cached, batched episodes."""
    differences = []
    for turns in asyncio.run(episodes(HFEngine(case.model), case)):
        played = as_trajectory(case, turns, reward=0.0)
        assert len(played.images) == (4 if case.model.architecture.vision else 0)
        expected = full_logprobs(case.model, played.ids_T.tolist(), played.images, case.sampling)
        chosen = expected.gather(-1, torch.from_numpy(played.ids_T[1:])[:, None])[:, 0].numpy()
        differences.append((chosen - played.logprobs_T[1:])[played.mask_T[1:]])
    return np.concatenate(differences)


def test_cached_turns_with_new_images_have_the_log_probs_of_one_whole_forward(case: Case) -> None:
    assert np.abs(gaps(case)).max() <= 1e-4


def test_in_bfloat16_engine_and_trainer_differ_by_its_rounding(case: Case) -> None:
    half = gaps(replace(case, model=PolicyModel.load(case.folder, torch.bfloat16)))
    # The median, since a router with two experts all but equal may round to either: that token differs by nats.
    assert np.median(np.abs(half)) < 0.02 and np.abs(half).max() > 0


def test_a_step_trains_every_part_on_what_the_engine_sampled_and_the_engine_follows(case: Case) -> None:
    engine = HFEngine(PolicyModel.load(case.folder))
    played = asyncio.run(episodes(engine, case))
    # Two episodes of a group share a prompt, so the step also runs rows of several samples.
    groups = [
        TrajectoryGroup("sample", tuple(as_trajectory(case, turns, reward=float(k)) for k, turns in enumerate(pair)))
        for pair in (played[:2], played[2:])
    ]
    samples = samples_of(groups, engine.model.image_token_id, engine.model.merge_size)
    optim, config = OptimConfig(lr=1e-3, warmup_steps=0), LearnerConfig(max_tokens_per_microbatch=2000)
    learner = FSDPLearner(PolicyModel.load(case.folder), case.sampling, 2, optim, config=config)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    stats = learner.step([samples])
    assert stats.num_tokens == sum(t.num_model_tokens for g in groups for t in g.trajectories)
    assert stats.logprob_gap_max <= 1e-4
    assert np.isfinite(stats.grad_norm) and stats.grad_norm > 0
    after = learner.weights()
    still = [name for name, weight in after.items() if torch.equal(weight, before[name])]
    # Adding one number to every score of a softmax changes nothing, so a key's bias moves by rounding alone.
    assert [name for name in still if not name.endswith("k_proj.bias")] == []
    places = {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}
    engine.load_weights(after, version=1)
    assert {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()} == places
    again = as_trajectory(case, asyncio.run(episode(engine, case, seed=0, share=0)), reward=1.0)
    group = TrajectoryGroup("sample", (again, again))
    (first, *_) = samples_of([group], engine.model.image_token_id, engine.model.merge_size)
    assert learner.step([[first]]).logprob_gap_max <= 1e-4


def test_every_expert_that_was_routed_to_has_a_gradient(case: Case) -> None:
    if not num_experts(case.model.config):
        return
    ids, images = piece(case.model, 20, (LARGE,))
    full_logprobs(case.model, ids, images, case.sampling)[:, 30].sum().backward()
    for name, parameter in case.model.named_parameters():
        if ".experts." in name:
            assert parameter.grad is not None
            assert parameter.grad.flatten(1).norm(dim=1).min() > 0, name
        if name.endswith("mlp.gate.weight"):
            assert parameter.grad is not None and parameter.grad.norm() > 0, name
    case.model.zero_grad()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_saved_network_is_read_back_the_same(model_type: str, tied: bool, tmp_path: Path) -> None:
    case = make_case(tmp_path / "first", model_type, tied)
    case.model.save(tmp_path / "second", torch.float32)
    read = PolicyModel.load(tmp_path / "second").state_dict()
    for name, weight in case.model.state_dict().items():
        assert torch.equal(read[name], weight), name
    # Names and shapes as Transformers writes them, which are not everywhere those in memory; experts as on the hub.
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    others = first.keys() ^ second.keys()
    assert bool(others) == (model_type == "qwen3_5_moe") and all(".mlp.experts." in name for name in others)
    for name in first.keys() & second.keys():
        is_turned = ".mlp.experts." in name and case.model.architecture.transposes_experts
        assert first[name].shape == (second[name].mT.shape if is_turned else second[name].shape), name
    assert ("lm_head.weight" in second) is not tied
    # Other programs read the configuration before the weights: the precision is in each part of it.
    case.model.save(tmp_path / "half", torch.bfloat16)
    half = PolicyModel.load(tmp_path / "half", torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert '"float32"' not in (tmp_path / "half" / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_saved_network_has_the_logits_of_the_first_in_plain_transformers(model_type: str, tmp_path: Path) -> None:
    case = make_case(tmp_path / "first", model_type)
    case.model.save(tmp_path / "second", torch.float32)
    ids, images = piece(case.model, 20, (LARGE, SMALL))
    expected = plain_logits(plain(case), ids, images)
    assert torch.equal(plain_logits(plain(replace(case, folder=tmp_path / "second")), ids, images), expected)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_saved_mixture_has_its_experts_as_servers_read_them(
    model_type: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    """SGLang takes the halves for gate and up, of Qwen3-VL's the transpose (its `qwen3_5.py` and `qwen3_vl_moe.py`)."""
    model = cases[model_type].model
    model.save(tmp_path, torch.float32)
    saved = load_file(tmp_path / "model.safetensors")
    for number, layer in enumerate(model.architecture.decoder(model.backbone).layers):
        name = f"model.language_model.layers.{number}.mlp.experts"
        gate_up, down = saved[f"{name}.gate_up_proj"], saved[f"{name}.down_proj"]
        if model_type == "qwen3_vl_moe":
            gate_up, down = gate_up.transpose(-1, -2), down.transpose(-1, -2)
        gate_EIH, up_EIH = gate_up.chunk(2, dim=-2)
        hidden_EH = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        inner_EI = torch.nn.functional.silu(gate_EIH @ hidden_EH[..., None]) * (up_EIH @ hidden_EH[..., None])
        expected_EH = (down @ inner_EI)[..., 0]
        one_each = torch.arange(4)[:, None]
        got_EH = layer.mlp.experts(hidden_EH, one_each, torch.ones(4, 1))
        torch.testing.assert_close(got_EH, expected_EH, rtol=1e-5, atol=1e-5)


def test_a_network_from_its_configuration_has_the_same_parameters(case: Case) -> None:
    fresh = PolicyModel.from_config(type(case.model.config).from_pretrained(case.folder))
    assert [(n, p.shape) for n, p in fresh.named_parameters()] == [
        (n, p.shape) for n, p in case.model.named_parameters()
    ]


def test_a_text_network_has_no_image_token_and_refuses_images(cases: dict[str, Case]) -> None:
    image = patches(cases["qwen3_vl"].model, SMALL, seed=0)
    for name in TEXT_TYPES:
        model = cases[name].model
        assert (model.image_token_id, model.merge_size) == (-1, 1)
        with pytest.raises(AssertionError, match="0 in the stream, 24 in grids"):
            full_logprobs(model, [5, 6, 7], [image], SamplingParams())
        vision = VisionBatch.build([[image]], "cpu")
        ids_BT = torch.zeros(1, 3, dtype=torch.long)
        with pytest.raises(AssertionError, match=f"a {name} network takes no images, got 1"):
            model(ids_BT, torch.zeros(3, 1, 3, dtype=torch.long), None, ids_BT == 0, vision)


def test_a_filler_row_runs_every_block(case: Case) -> None:
    model = PolicyModel.load(case.folder)
    batch = collate([filler_row(model, with_image=model.architecture.vision)], model.image_token_id, "cpu")
    everywhere = replace(batch.packed, before_N=torch.tensor([0, 1]), targets_N=torch.tensor([1, 2]))
    model.token_scores(everywhere, SamplingDistribution())[0].square().sum().backward()
    for block in model.blocks:
        assert any(p.grad is not None and p.grad.norm() > 0 for p in block.parameters())


def test_padding_on_the_right_changes_no_log_prob_of_a_text_network(cases: dict[str, Case]) -> None:
    for name in TEXT_TYPES:
        model = cases[name].model
        ids = torch.randint(20, 300, (2, 12), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(12).expand(3, 2, 12).clone()
        real = torch.ones_like(ids, dtype=torch.bool)
        real[1, 7:] = False
        positions[:, 1, 7:] = 0
        with torch.no_grad():
            both = model(ids, positions, None, real)
            short = model(ids[1:, :7], positions[:, 1:, :7], None, real[1:, :7])
        torch.testing.assert_close(both[12:], short)


@pytest.mark.parametrize("window", [1, 3, 4])
def test_windows_are_those_of_transformers(window: int) -> None:
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

    grids = [(1, 6, 10), (1, 2, 2), (3, 8, 4), (1, 16, 12)]
    grid_thw = torch.tensor(grids)
    got = tower_inputs(grids, merge=2, window=window, device="cpu")
    order, bounds = get_vision_window_index(grid_thw, spatial_merge_size=2, window_size=28 * window, patch_size=14)
    assert torch.equal(got["window_index"], order)
    assert torch.equal(got["cu_window_seqlens"], bounds)
    assert torch.equal(got["cu_seqlens"], get_vision_cu_seqlens(grid_thw))
    assert torch.equal(got["position_ids"], get_vision_position_ids(grid_thw, 2))


def test_an_unknown_architecture_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"--model: must be one of qwen3_vl, qwen3_vl_moe, .*llama, got gpt2; give a"):
        PolicyModel.load(tmp_path)


def test_a_mixture_has_the_routes_of_its_configuration_and_others_have_none(cases: dict[str, Case]) -> None:
    assert ModelFacts.load(cases["qwen3_vl_moe"].folder).routes == RouteShape(num_layers=3, num_experts=4, top_k=2)
    for name, case in cases.items():
        assert (ModelFacts.load(case.folder).routes is not None) == name.endswith("moe")


@pytest.mark.parametrize(
    "change", [{"num_experts_per_tok": 0}, {"num_experts_per_tok": 5}, {"num_local_experts": 40_000}]
)
def test_experts_that_no_mixture_has_are_an_error_of_the_model(
    change: dict[str, int], cases: dict[str, Case], tmp_path: Path
) -> None:
    config = json.loads((cases["qwen3_vl_moe"].folder / "config.json").read_text())
    config["text_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"--model: must be a model folder or hub id, .*num_experts"):
        ModelFacts.load(tmp_path)


def test_a_sliding_window_is_a_user_error() -> None:
    from transformers import Qwen2Config

    architecture_of(Qwen2Config(num_hidden_layers=2))
    config = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(UserError, match="must attend to all earlier tokens in every layer, got sliding_attention"):
        PolicyModel.from_config(config)


STATE_TYPES = tuple(name for name in MODEL_TYPES if ARCHITECTURES[name].states)


@pytest.mark.parametrize("model_type", STATE_TYPES)
def test_a_saved_network_with_states_is_one_for_servers_and_for_plain_transformers(
    cases: dict[str, Case], model_type: str, tmp_path: Path
) -> None:
    case = cases[model_type]
    case.model.save(tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    # SGLang reads both, and Transformers writes neither.
    assert written["text_config"]["full_attention_interval"] == 4
    assert written["vision_config"]["deepstack_visual_indexes"] == []
    ids, images = piece(case.model, 20, (SMALL,))
    network = case.model.architecture.read(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(plain_logits(network, ids, images), plain_logits(plain(case), ids, images))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("linear_conv_kernel_dim", 3, "must have linear_conv_kernel_dim 4, got 3"),
        ("linear_num_value_heads", 3, "must have linear_num_value_heads that are a multiple of .*, got 3 and 2"),
        ("linear_num_key_heads", 0, "must have linear_num_value_heads that are a multiple of .*, got 4 and 0"),
        ("layer_types", ["linear_attention"] * 4, "must have full_attention in every n-th layer_types"),
        ("layer_types", ["full_attention", *["linear_attention"] * 3], "must have full_attention in every n-th"),
    ],
)
def test_other_states_than_the_familys_are_a_user_error(
    cases: dict[str, Case], field: str, value: Any, rule: str, tmp_path: Path
) -> None:
    config = json.loads((cases["qwen3_5"].folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=f"--model: {rule}"):
        ModelFacts.load(tmp_path)


def test_a_folder_without_weights_is_a_user_error(cases: dict[str, Case], tmp_path: Path) -> None:
    cases["llama"].model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--model: must be a model folder"):
        PolicyModel.load(tmp_path)


def test_weights_of_other_shapes_than_the_config_names_are_an_error_of_the_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "qwen3")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    with pytest.raises(UserError, match="--model: must hold weights of the shapes in its config"):
        PolicyModel.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("text_config", [1]),
        ("image_token_id", None),
        ("image_token_id", -1),
        ("architectures", 3),
        ("model_type", ["qwen3_vl"]),
        ("vision_config", {"spatial_merge_size": 0}),
    ],
)
def test_a_config_of_other_types_is_one_error_of_the_model(part: str, value: Any, tmp_path: Path) -> None:
    config = json.loads((STARTER_PATH / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, part: value}))
    with pytest.raises(UserError, match=r"--model: must be a .*, got .*; (give a folder|take the files)"):
        ModelFacts.load(tmp_path)
