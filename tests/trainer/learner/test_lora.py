"""Claims about adapters: nothing changes before the first step, only they are trained, and merged weights are them."""

from __future__ import annotations

import base64
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agents.model.policy import PolicyModel
from agents.types import SamplingParams
from envs.errors import UserError
from tests.builders import fresh_model
from tests.by_architecture import all_but_two_slow
from tests.processes import run_ranks
from tests.tiny_models import MODEL_TYPES, write_tiny_model
from tests.trainer.networks import assert_same_tensors, logits, parameters, shard
from trainer.config.learner import LearnerConfig
from trainer.learner.collectives import ensure_process_group
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.lora import add_lora, disabled, is_adapter, merged_weights, packed_adapter, plain_name
from trainer.learner.sharding import trainable_parameters
from trainer.learner.weights_io import empty_model, load_weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for model_type in MODEL_TYPES:
        write_tiny_model(folder / model_type, model_type)
    return {path.name: path for path in folder.iterdir()}


SMALL = LearnerConfig(lora_rank=4, lora_alpha=8.0)


def trained(path: Path, options: LearnerConfig = SMALL) -> PolicyModel:
    """Return a network whose adapters are no longer zero."""
    model = fresh_model(path)
    add_lora(model, options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_adapters_change_nothing_before_the_first_step(checkpoints: dict[str, Path], model_type: str) -> None:
    base = fresh_model(checkpoints[model_type])
    model = fresh_model(checkpoints[model_type])
    add_lora(model, LearnerConfig(lora_rank=4))
    assert torch.equal(logits(model), logits(base))
    assert_same_tensors(dict(merged_weights(model)), parameters(base))
    assert list(dict(merged_weights(model))) == list(parameters(base))
    assert_same_tensors(dict(merged_weights(base)), parameters(base))  # and a network without any is itself


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_merged_weights_compute_what_the_adapters_compute(
    checkpoints: dict[str, Path], model_type: str, tmp_path: Path
) -> None:
    base, model = fresh_model(checkpoints[model_type]), trained(checkpoints[model_type])
    merged = dict(merged_weights(model))
    with torch.no_grad():
        before = logits(base)
        for name, parameter in base.named_parameters():
            parameter.copy_(merged[name])
        expected = logits(model)
        assert (expected - before).abs().max() > 0.1
        assert torch.allclose(logits(base), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        model.save(tmp_path / "saved", torch.float32, merged)  # under ordinary names
        assert_same_tensors(parameters(PolicyModel.load(tmp_path / "saved")), parameters(base))


def test_a_merged_weight_is_the_formula_by_hand(checkpoints: dict[str, Path]) -> None:
    model = trained(checkpoints["qwen3"], LearnerConfig(lora_rank=4, lora_alpha=6.0, lora_targets=("v_proj",)))
    tensors, merged = dict(model.named_parameters()), dict(merged_weights(model))
    layer = "backbone.model.layers.1.self_attn.v_proj"
    a_RH, b_OR = tensors[f"{layer}.lora_A.default.weight"], tensors[f"{layer}.lora_B.default.weight"]
    assert a_RH.shape == (4, 64) and b_OR.shape == (32, 4)
    by_hand = tensors[f"{layer}.base_layer.weight"].double() + 1.5 * (b_OR.double() @ a_RH.double())
    assert torch.allclose(merged[f"{layer}.weight"].double(), by_hand, rtol=0, atol=1e-6)
    changed = {name for name, tensor in merged.items() if tensor is not tensors.get(name) and "v_proj" in name}
    assert len(changed) == 3


def test_a_server_gets_the_scale_of_the_adapters_and_their_values(checkpoints: dict[str, Path]) -> None:
    model = trained(checkpoints["qwen3"], LearnerConfig(lora_rank=4, lora_alpha=6.0, lora_targets=("v_proj",)))
    packed = packed_adapter(model, torch.float32)
    assert packed.config["r"] == 4 and packed.config["lora_alpha"] == 6.0  # peft scales by alpha / r
    sent, own = pickle.loads(base64.b64decode(packed.tensors)), dict(model.named_parameters())
    for layer in packed.layers:
        for side in "AB":
            name = f"{layer}.lora_{side}"
            assert torch.equal(sent[f"base_model.model.{name}.weight"], own[f"backbone.{name}.default.weight"])


def test_the_first_adapters_are_those_of_the_seed(checkpoints: dict[str, Path]) -> None:
    def first(seed: int) -> dict[str, Tensor]:
        made = FSDPLearner(fresh_model(checkpoints["qwen3"]), SamplingParams(), 1, config=SMALL, seed=seed)
        from_disk = FSDPLearner(
            empty_model(checkpoints["qwen3"]), SamplingParams(), 1, config=SMALL, seed=seed, path=checkpoints["qwen3"]
        )
        adapters = {name: whole(p) for name, p in made.model.named_parameters() if ".lora_A." in name}
        assert_same_tensors(adapters, {n: whole(p) for n, p in from_disk.model.named_parameters() if n in adapters})
        return adapters

    one, same, other = first(3), first(3), first(4)
    assert_same_tensors(one, same)
    assert not any(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_only_adapters_are_trained_and_all_of_them(checkpoints: dict[str, Path], model_type: str) -> None:
    model = trained(checkpoints[model_type])
    logits(model).log_softmax(-1)[:, 7].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name), name
        assert (parameter.grad is not None and bool(parameter.grad.any())) == is_adapter(name), name
    assert all(parameter.dtype == torch.float32 for parameter in trainable_parameters(model))
    assert len(trainable_parameters(model)) == sum(is_adapter(name) for name, _ in model.named_parameters())


def adapted(model: PolicyModel) -> set[str]:
    """Return the names of the layers with an adapter, layers of one kind once."""
    names = (plain_name(name).split(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name)
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name in names}


ATTENTION = {f"backbone.model.language_model.layers.self_attn.{side}_proj" for side in "qkvo"}
STATES = {
    f"backbone.model.language_model.layers.linear_attn.{name}"
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
}
MLP = {f"backbone.model.language_model.layers.mlp.{side}_proj" for side in ("gate", "up", "down")}
QUERY, DOWN = {name for name in ATTENTION if "q_proj" in name}, {name for name in MLP if "down_proj" in name}


@pytest.mark.parametrize(
    ("model_type", "options", "expected"),
    [
        ("qwen3_vl", LearnerConfig(lora_rank=4), ATTENTION | MLP),
        ("qwen3_vl", LearnerConfig(lora_rank=4, lora_targets=("self_attn.q_proj", "down_proj")), QUERY | DOWN),
        ("qwen3_5", LearnerConfig(lora_rank=4), ATTENTION | MLP | STATES),
        ("qwen3_vl_moe", LearnerConfig(lora_rank=4), ATTENTION),  # fused experts and router are not linear layers
    ],
)
def test_targets_are_linear_layers_of_the_decoder(
    checkpoints: dict[str, Path], model_type: str, options: LearnerConfig, expected: set[str]
) -> None:
    model = fresh_model(checkpoints[model_type])
    add_lora(model, options)
    assert adapted(model) == expected


def test_a_target_that_is_no_linear_layer_is_a_user_error(checkpoints: dict[str, Path]) -> None:
    model = fresh_model(checkpoints["qwen3_vl"])
    before = list(dict(model.named_parameters()))
    with pytest.raises(UserError, match=r"must end a linear layer's name, got q_prj; did you mean 'q_proj'\?"):
        add_lora(model, LearnerConfig(lora_rank=4, lora_targets=("v_proj", "q_prj")))
    with pytest.raises(UserError, match="got lm_head"):
        add_lora(model, LearnerConfig(lora_rank=4, lora_targets=("lm_head",)))
    with pytest.raises(UserError, match="got linear_fc1"):
        add_lora(model, LearnerConfig(lora_rank=4, lora_targets=("linear_fc1",)))
    assert list(dict(model.named_parameters())) == before


def test_without_peft_the_way_to_get_it_is_named(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"needs the package peft, .*pip install 'trueturn\[lora\]'"):
        add_lora(fresh_model(checkpoints["qwen3"]), LearnerConfig(lora_rank=4))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_disabled_adapters_leave_the_base_model(checkpoints: dict[str, Path], model_type: str) -> None:
    model = trained(checkpoints[model_type])
    with_adapters = logits(model)
    with pytest.raises(KeyError), disabled(model):
        assert torch.equal(logits(model), logits(fresh_model(checkpoints[model_type])))
        assert len(trainable_parameters(model)) > 0
        raise KeyError
    assert torch.equal(logits(model), with_adapters)


def adam_steps(model: PolicyModel, num_steps: int, reference_first: bool = False) -> list[float]:
    """Return the losses of some steps on one stream."""
    model.train()
    if reference_first:
        with torch.no_grad(), disabled(model):
            logits(model)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        loss = -logits(model).log_softmax(-1)[:, 7].mean()
        loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def frozen_bf16(path: Path, compute: torch.dtype) -> PolicyModel:
    """Return a sharded network with a frozen bfloat16 base and float32 adapters, loaded from the meta device."""
    ensure_process_group(torch.device("cpu"))
    model = empty_model(path, torch.bfloat16)
    add_lora(model, LearnerConfig(lora_rank=4))
    shard(model, compute)
    load_weights(model, path, "cpu")
    return model


@pytest.mark.parametrize("reference_first", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", all_but_two_slow())
def test_fsdp_trains_float32_adapters_of_a_frozen_bfloat16_base(
    checkpoints: dict[str, Path], model_type: str, compute: torch.dtype, reference_first: bool
) -> None:
    model = frozen_bf16(checkpoints[model_type], compute)
    before = {name: whole(p) for name, p in model.named_parameters()}
    losses = adam_steps(model, 4, reference_first)
    assert losses[-1] < losses[0] - 0.1
    model.reshard()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)
        assert torch.equal(whole(parameter), before[name]) != is_adapter(name), name
    if compute == torch.float32:  # the same as unsharded, with the base rounded to bfloat16
        plain = fresh_model(checkpoints[model_type])
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(parameter.bfloat16())
        add_lora(plain, LearnerConfig(lora_rank=4))
        assert losses == pytest.approx(adam_steps(plain, 4), rel=1e-5)
        merged = dict(merged_weights(model, whole))
        expected = dict(merged_weights(plain))
        assert all(torch.allclose(merged[name].float(), expected[name], atol=1e-4) for name in expected)


def rank_main(rank: int, path: Path, out: Path) -> None:
    losses = {dtype: adam_steps(frozen_bf16(path, dtype), 3, True) for dtype in (torch.float32, torch.bfloat16)}
    if rank == 0:
        torch.save(losses, out / "losses.pt")


@pytest.mark.slow
def test_two_ranks_train_adapters_as_one_does(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(rank_main, 2, tmp_path / "store", checkpoints["qwen3_vl"], tmp_path)
    for dtype, losses in torch.load(tmp_path / "losses.pt").items():
        one = adam_steps(frozen_bf16(checkpoints["qwen3_vl"], dtype), 3, True)
        assert losses == pytest.approx(one, rel=1e-6), dtype
