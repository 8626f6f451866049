"""Claims about reading a checkpoint shard by shard: it gives what reading all of it gives, and reads no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from agents.model.architectures import ARCHITECTURES
from agents.model.policy import PolicyModel
from agents.types import SamplingParams
from envs.errors import UserError
from tests.processes import run_ranks
from tests.tiny_models import MODEL_TYPES, write_tiny_model
from tests.trainer.networks import assert_same_tensors, logits, parameters, shard
from trainer.config.learner import LearnerConfig
from trainer.learner import weights_io as loading
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.lora import add_lora, is_adapter, plain_name
from trainer.learner.sharding import freeze_vision, trainable_parameters
from trainer.learner.weights_io import empty_model, load_weights
from trainer.preflight.checks.weights import check_same, rows_of_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every architecture as its real checkpoints tie it, and two of them the other way."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for model_type in MODEL_TYPES:
        write_tiny_model(folder / model_type, model_type)
    write_tiny_model(folder / "qwen3_vl untied", "qwen3_vl", tied=False)
    write_tiny_model(folder / "qwen2_5_vl tied", "qwen2_5_vl", tied=True)
    # Transformers has written the other one, with the matrices of its experts the other way round.
    hub = folder / "qwen3_vl_moe as on the hub"
    PolicyModel.load(folder / "qwen3_vl_moe").save(hub, torch.float32)
    for path in folder.iterdir():
        (path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "do_sample": True}))
    return {path.name: path for path in sorted(folder.iterdir())}


NAMES = (*MODEL_TYPES, "qwen3_vl untied", "qwen2_5_vl tied", "qwen3_vl_moe as on the hub")


def in_shards(path: Path, folder: Path) -> Path:
    """Write the same checkpoint again, in several files."""
    shutil.copytree(path, folder)
    (folder / "model.safetensors").unlink()
    network: Any = PolicyModel.load(path).backbone
    network.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_model_filled_is_a_loaded_model(checkpoints: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model, expected = empty_model(checkpoints[name], dtype), PolicyModel.load(checkpoints[name], dtype)
    assert all(p.is_meta and p.dtype == dtype for p in model.parameters())
    load_weights(model, checkpoints[name], "cpu")
    assert_same_tensors(parameters(model), parameters(expected))
    assert_same_tensors(dict(model.named_buffers()), dict(expected.named_buffers()))
    with torch.no_grad():
        assert torch.equal(logits(model), logits(expected))
    got, wanted = (m.backbone.generation_config.to_dict() for m in (model, expected))  # type: ignore[union-attr,operator]
    assert got == wanted and wanted["temperature"] == 0.25
    assert model.config.to_dict() == expected.config.to_dict()
    parts = [
        (m.config, e.config) for m, e in zip(model.modules(), expected.modules(), strict=True) if "config" in m.__dict__
    ]
    assert all(got._attn_implementation == wanted._attn_implementation for got, wanted in parts)  # type: ignore[union-attr]
    assert not model.training and all(p.requires_grad for p in model.parameters())


def test_both_ways_in_which_experts_lie_are_the_same_network(checkpoints: dict[str, Path]) -> None:
    names = ("qwen3_vl_moe", "qwen3_vl_moe as on the hub")
    one, other = (safetensors.torch.load_file(checkpoints[name] / "model.safetensors") for name in names)
    turned = {name for name, tensor in one.items() if tensor.shape != other[name].shape}
    assert len(turned) == 6 and all(torch.equal(one[name], other[name].mT) for name in turned)
    models = [empty_model(checkpoints[name]) for name in names]
    for model, name in zip(models, names, strict=True):
        load_weights(model, checkpoints[name], "cpu")
    assert_same_tensors(*map(parameters, models))


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_5_vl tied"])
def test_a_learner_sends_the_tensors_of_the_checkpoint_that_it_writes(
    checkpoints: dict[str, Path], model_type: str, tmp_path: Path
) -> None:
    learner = FSDPLearner(PolicyModel.load(checkpoints[model_type]), SamplingParams(), num_steps=1)
    learner.save(tmp_path, torch.float32)
    sent = dict(learner.stream())
    assert [(name, tuple(tensor.shape)) for name, tensor in sent.items()] == learner.shapes()
    assert_same_tensors(sent, safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert all(tensor.is_contiguous() for tensor in sent.values())
    compared = check_same(learner.weights(), rows_of_checkpoint(tmp_path, learner.model), "the learner", "the folder")
    assert compared.status == "ok", compared


def test_making_an_empty_model_draws_no_random_numbers(checkpoints: dict[str, Path]) -> None:
    before = torch.get_rng_state()
    empty_model(checkpoints["qwen3_vl"])
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_tied_weights_stay_one_parameter(checkpoints: dict[str, Path], name: str) -> None:
    model = empty_model(checkpoints[name])
    load_weights(model, checkpoints[name], "cpu")
    network: Any = model.backbone
    embedding = model.architecture.decoder(network).embed_tokens.weight
    assert (network.lm_head.weight is embedding) == model.config.tie_word_embeddings


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_several_files_are_read_as_one(checkpoints: dict[str, Path], name: str, tmp_path: Path) -> None:
    model = empty_model(checkpoints[name])
    load_weights(model, in_shards(checkpoints[name], tmp_path / "many"), "cpu")
    assert_same_tensors(parameters(model), parameters(PolicyModel.load(checkpoints[name])))


def test_a_tied_weight_is_found_under_either_name(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["qwen3"], tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    safetensors.torch.save_file(tensors, file)
    model = empty_model(tmp_path / "copy")
    load_weights(model, tmp_path / "copy", "cpu")
    assert_same_tensors(parameters(model), parameters(PolicyModel.load(checkpoints["qwen3"])))


def test_a_checkpoint_may_have_the_names_of_the_network(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    architecture = ARCHITECTURES["qwen2_5_vl"]
    expected = parameters(PolicyModel.load(checkpoints["qwen2_5_vl"]))
    names = {architecture.saved_name(name): name for name in (n.removeprefix("backbone.") for n in expected)}
    tensors = safetensors.torch.load_file(file)
    assert tensors.keys() == names.keys() and not any(name in tensors for name in names.values() if "model." in name)
    safetensors.torch.save_file({names[name]: tensor for name, tensor in tensors.items()}, file)
    model = empty_model(tmp_path / "copy")
    load_weights(model, tmp_path / "copy", "cpu")
    assert_same_tensors(parameters(model), expected)
    rows = rows_of_checkpoint(tmp_path / "copy", model)
    assert check_same(expected, rows, "the learner", "the folder").status == "ok"


def test_experts_may_lie_in_one_tensor_or_in_one_each(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    network = PolicyModel.load(checkpoints["qwen3_5_moe"])
    network.save(tmp_path / "one", torch.float32)
    one = safetensors.torch.load_file(tmp_path / "one/model.safetensors")
    each = safetensors.torch.load_file(checkpoints["qwen3_5_moe"] / "model.safetensors")
    assert {f"backbone.{name}" for name in one} == parameters(network).keys()
    assert len(each) - len(one) == 4 * (4 * 3 - 2)  # of four layers with four experts
    for folder in (tmp_path / "one", checkpoints["qwen3_5_moe"]):
        model = empty_model(folder)
        load_weights(model, folder, "cpu")
        assert_same_tensors(parameters(model), parameters(network))
        rows = rows_of_checkpoint(folder, model)
        assert check_same(parameters(network), rows, "the learner", "the folder").status == "ok"


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("kind", ["down_proj", "gate_proj", "up_proj"])
def test_an_expert_that_is_not_whole_is_named(
    checkpoints: dict[str, Path], kind: str, number: int, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["qwen3_5_moe"], tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    tensors = safetensors.torch.load_file(file)
    key = f"model.language_model.layers.1.mlp.experts.{number}.{kind}.weight"
    whole = tensors.pop(key)
    for left in ({}, {key: whole[:-1].clone()}, {key: whole[0, 0].clone()}):
        safetensors.torch.save_file({**tensors, **left}, file, {"format": "pt"})
        with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.\w+ of shape \(4, .*, got (shape|none)"):
            load_weights(empty_model(tmp_path / "copy"), tmp_path / "copy", "cpu")


def test_frozen_parameters_keep_a_dtype_of_their_own(checkpoints: dict[str, Path]) -> None:
    model = empty_model(checkpoints["qwen3_vl"])
    freeze_vision(model, torch.bfloat16)
    load_weights(model, checkpoints["qwen3_vl"], "cpu")
    expected = parameters(PolicyModel.load(checkpoints["qwen3_vl"]))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != (".visual." in name)
        assert torch.equal(parameter, expected[name].bfloat16() if ".visual." in name else expected[name])
    assert len(trainable_parameters(model)) == sum(".visual." not in name for name in expected)
    with pytest.raises(UserError, match="needs a network that takes images, got llama"):
        freeze_vision(empty_model(checkpoints["llama"]))


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_vl"])
def test_a_missing_tensor_or_another_shape_is_named(checkpoints: dict[str, Path], name: str, tmp_path: Path) -> None:
    shutil.copytree(checkpoints[name], tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    tensors = safetensors.torch.load_file(file)
    key = next(key for key in tensors if key.endswith("layers.1.self_attn.k_proj.weight"))
    whole = tensors.pop(key)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        UserError, match=rf"layers\.1\.self_attn\.k_proj\.weight of shape \(32, 64\), got none in {tmp_path}"
    ):
        load_weights(empty_model(tmp_path / "copy"), tmp_path / "copy", "cpu")
    safetensors.torch.save_file({**tensors, key: whole[:16].clone()}, file, {"format": "pt"})
    rule = rf"k_proj\.weight of shape \(32, 64\), got shape \(16, 64\) in {tmp_path}"
    with pytest.raises(UserError, match=rule):
        load_weights(empty_model(tmp_path / "copy"), tmp_path / "copy", "cpu")


def test_what_is_no_checkpoint_is_a_user_error(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a model folder or hub id"):
        empty_model(tmp_path)
    shutil.copytree(checkpoints["qwen3"], tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"whole safetensors files, got .*model\.safetensors"):
        load_weights(empty_model(tmp_path / "copy"), tmp_path / "copy", "cpu")
    file.unlink()
    with pytest.raises(UserError, match=r"must hold model\.safetensors"):
        load_weights(empty_model(tmp_path / "copy"), tmp_path / "copy", "cpu")


class CountingFile:
    """A safetensors file that counts the bytes read from it."""

    read = 0

    def __init__(self, file: Any) -> None:
        self.file = file

    def keys(self) -> Any:
        return self.file.keys()

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self.file.get_slice(name))


class CountingSlice:
    def __init__(self, part: Any) -> None:
        self.part = part

    def get_shape(self) -> Any:
        return self.part.get_shape()

    def get_dtype(self) -> Any:
        return self.part.get_dtype()

    def __getitem__(self, rows: slice) -> Tensor:
        tensor = self.part[rows]
        CountingFile.read += tensor.nbytes
        return tensor


def load_sharded(path: Path, adapters: bool, policy: OffloadPolicy) -> PolicyModel:
    model = empty_model(path)
    if adapters:
        add_lora(model, LearnerConfig(lora_rank=3))
    shard(model, offload=policy)
    load_weights(model, path, "cpu", seed=5)
    return model


def rank_main(rank: int, checkpoints: dict[str, Path], out: Path) -> None:
    real = loading.safe_open
    loading.safe_open = lambda *args, **options: CountingFile(real(*args, **options))  # type: ignore[assignment]
    results: dict[str, Any] = {}
    for name, path in checkpoints.items():
        CountingFile.read = 0
        model = load_sharded(path, False, OffloadPolicy())
        own = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
        results[name] = {
            "weights": parameters(model),
            "logits": logits(model).detach(),
            "own": own,
            "read": CountingFile.read,
        }
    adapters = load_sharded(checkpoints["qwen3_vl"], True, OffloadPolicy())
    offloaded = load_sharded(checkpoints["qwen3_vl"], False, CPUOffloadPolicy(pin_memory=False))
    results["adapters"], results["offloaded"] = parameters(adapters), parameters(offloaded)
    torch.save(results, out / f"{rank}.pt")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank has after loading; the decoder's 3 is no divisor of most sizes, and more than some."""
    out = tmp_path_factory.mktemp("ranks")
    many = {"several files": in_shards(checkpoints["qwen3_vl"], out / "many")}
    run_ranks(rank_main, request.param, out / "store", {**checkpoints, **many}, out)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


@pytest.mark.slow
def test_every_number_of_ranks_holds_the_whole_together(
    ranks: list[dict[str, Any]], checkpoints: dict[str, Path]
) -> None:
    for name in (*NAMES, "several files", "offloaded"):
        expected = PolicyModel.load(checkpoints.get(name, checkpoints["qwen3_vl"]))
        for rank in ranks:
            if name == "offloaded":
                assert_same_tensors(rank[name], parameters(expected))
            else:
                assert_same_tensors(rank[name]["weights"], parameters(expected))
                assert torch.equal(rank[name]["logits"], logits(expected).detach()), name


def test_a_rank_reads_its_own_rows_and_no_others(ranks: list[dict[str, Any]]) -> None:
    for name in (*NAMES, "several files"):
        assert all(rank[name]["read"] == rank[name]["own"] > 0 for rank in ranks), name
        whole = sum(tensor.nbytes for tensor in ranks[0][name]["weights"].values())
        assert sum(rank[name]["own"] for rank in ranks) == whole
        # Whole experts are shared, and three ranks have four of them.
        if "moe" not in name or len(ranks) == 2:
            assert max(rank[name]["own"] for rank in ranks) < whole * (1 / len(ranks) + 0.02)


def test_adapters_start_from_the_same_values_on_every_number_of_ranks(
    ranks: list[dict[str, Any]], checkpoints: dict[str, Path]
) -> None:
    model = PolicyModel.load(checkpoints["qwen3_vl"])
    base = parameters(model)
    add_lora(model, LearnerConfig(lora_rank=3), seed=5)
    for rank in ranks:
        assert_same_tensors(rank["adapters"], parameters(model))
    for name, tensor in ranks[0]["adapters"].items():
        if not is_adapter(name):
            assert torch.equal(tensor, base[plain_name(name)])
        elif ".lora_B." in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound and tensor.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert len({float(t.flatten()[0]) for n, t in ranks[0]["adapters"].items() if ".lora_A." in n}) > 10
