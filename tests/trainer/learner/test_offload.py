"""Claims about keeping the optimizer's state on the host: it comes back as it left, and training does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.builders import fresh_model
from tests.trainer.networks import logits, parameters, shard
from trainer.learner.collectives import ensure_process_group
from trainer.learner.offload import OffloadedState


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [local(state[name]) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def train(path: Path, sharded: bool, offload: bool, foreach: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return weights and moments after four steps."""
    model = fresh_model(path)
    if sharded:
        ensure_process_group(torch.device("cpu"))
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    offloaded = OffloadedState(optimizer)
    for _ in range(4):
        (-logits(model).log_softmax(-1)[:, 7].mean()).backward()
        if offload:
            with offloaded.on_device():
                optimizer.step()
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moments(optimizer))
        else:
            optimizer.step()
        optimizer.zero_grad()
    offloaded.to_device()
    return parameters(model), [tensor.clone() for tensor in moments(optimizer)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_trajectory_of_adam_is_the_same(checkpoint: Path, sharded: bool, foreach: bool) -> None:
    expected_weights, expected_moments = train(checkpoint, sharded, False, foreach)
    weights, kept = train(checkpoint, sharded, True, foreach)
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert len(kept) == len(expected_moments) > 50
    assert all(torch.equal(got, expected) for got, expected in zip(kept, expected_moments, strict=True))


def test_the_state_survives_bit_for_bit_in_the_same_tensors() -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([weight])
    offloaded = OffloadedState(optimizer)
    offloaded.to_host()  # before the first step there is none
    offloaded.to_device()
    weight.grad = torch.randn(5, 3)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[weight].items()}
    tensors = dict(optimizer.state[weight])
    offloaded.to_host()
    assert [tensors[name].untyped_storage().nbytes() for name in ("exp_avg", "exp_avg_sq", "step")] == [0, 0, 4]
    with pytest.raises(AssertionError, match="on the host already"):
        offloaded.to_host()
    offloaded.to_device()
    offloaded.to_device()
    for name, value in optimizer.state[weight].items():
        assert value is tensors[name] and torch.equal(value, before[name])


def test_a_step_that_fails_leaves_the_state_on_the_host() -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([weight])
    offloaded = OffloadedState(optimizer)
    weight.grad = torch.randn(5, 3)
    optimizer.step()
    kept = optimizer.state[weight]["exp_avg"].clone()
    with pytest.raises(ZeroDivisionError), offloaded.on_device():
        raise ZeroDivisionError
    assert optimizer.state[weight]["exp_avg"].untyped_storage().nbytes() == 0
    offloaded.to_device()
    assert torch.equal(optimizer.state[weight]["exp_avg"], kept)
