"""The same training step with padded rows, through Transformers' own forward pass.

In: a network as Transformers builds it, and training samples. Out: a function that takes one optimizer step. Weights,
gradient sums and AdamW's moments are float32 and the network computes in bfloat16, as in our learner.

Legend: B rows, T tokens, N model tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agents.types import ProcessedImage
from benchmarks.learner_workload import Recipe, to_bfloat16
from trainer.types import TrainingSample

#: Rows of logits that stand in memory at once.
CHUNK = 4096


@dataclass(frozen=True)
class Outcome:
    """What a step reports. `grad_norm` is that before clipping; NaN where none was computed."""

    loss: float
    grad_norm: float


@dataclass(frozen=True, eq=False)
class Padded:
    """A micro-batch of whole streams, padded on the right. `before` are the places that predict the model's tokens."""

    inputs: dict[str, Tensor]
    before: tuple[Tensor, Tensor]
    targets_N: Tensor
    rollout_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


def padded_batches(samples: Sequence[TrainingSample], max_tokens: int, image_id: int, device: str) -> list[Padded]:
    """Sort by length and cut into micro-batches whose rows times the longest stay within `max_tokens`."""
    bins: list[list[TrainingSample]] = []
    for sample in sorted(samples, key=lambda s: len(s.ids_T)):
        if bins and (len(bins[-1]) + 1) * len(sample.ids_T) <= max_tokens:
            bins[-1].append(sample)
        else:
            bins.append([sample])
    return [_pad(chosen, image_id, device) for chosen in bins]


def _pad(samples: Sequence[TrainingSample], image_id: int, device: str) -> Padded:
    width = max(len(s.ids_T) for s in samples)
    ids_BT = np.zeros((len(samples), width), dtype=np.int64)
    mask_BT = np.zeros_like(ids_BT)
    for row, sample in enumerate(samples):
        ids_BT[row, : len(sample.ids_T)] = sample.ids_T
        mask_BT[row, : len(sample.ids_T)] = 1
    at = [np.flatnonzero(s.mask_T) - 1 for s in samples]

    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(array).to(device)

    counts = [len(places) for places in at]
    return Padded(
        inputs={
            "input_ids": tensor(ids_BT),
            "attention_mask": tensor(mask_BT),
            "mm_token_type_ids": tensor((ids_BT == image_id).astype(np.int64)),
            **image_inputs([image for s in samples for image in s.images], device),
        },
        before=(tensor(np.repeat(np.arange(len(samples)), counts)), tensor(np.concatenate(at))),
        targets_N=tensor(np.concatenate([s.ids_T[s.mask_T] for s in samples])),
        rollout_N=tensor(np.concatenate([s.logprobs_T[s.mask_T] for s in samples])),
        advantages_N=tensor(np.repeat([np.asarray(s.advantage, np.float32) for s in samples], counts)),
        weights_N=tensor(np.repeat([np.float32(s.weight) for s in samples], counts)),
    )


def image_inputs(images: Sequence[ProcessedImage], device: str) -> dict[str, Tensor]:
    """Return the pixels and grids of images under the names of Transformers."""
    return {
        "pixel_values": torch.from_numpy(np.concatenate([image.pixels_PD for image in images])).to(device),
        "image_grid_thw": torch.tensor([image.grid_thw for image in images], device=device),
    }


def padded_logprobs(network: Any, batch: Padded) -> Tensor:
    """Return the log-probs (N) of the model's tokens. Logits are made for them alone, some rows at a time, and made
    again in the backward pass."""
    hidden_NH = network.model(**batch.inputs, use_cache=False).last_hidden_state[batch.before]

    def some(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
        logits_NV = functional.linear(hidden_NH, weight_VH).float()
        return logits_NV.gather(-1, targets_N[:, None])[:, 0] - logits_NV.logsumexp(-1)

    pieces = zip(hidden_NH.split(CHUNK), batch.targets_N.split(CHUNK), strict=True)
    weight_VH = network.lm_head.weight
    return torch.cat([checkpoint(some, h, weight_VH, t, use_reentrant=False) for h, t in pieces])  # type: ignore[misc]


@torch.no_grad()
def score_all(network: Any, samples: Sequence[TrainingSample], device: str, max_tokens: int) -> list[np.ndarray]:
    """Return `logprobs_T` of every sample, 0 where the model did not write."""
    filled = {}
    for sample in samples:
        filled[id(sample)] = np.zeros(len(sample.ids_T), dtype=np.float32)
    order = sorted(samples, key=lambda s: len(s.ids_T))
    batches = padded_batches(samples, max_tokens, network.config.image_token_id, device)
    values = torch.cat([padded_logprobs(network, batch) for batch in batches]).float().cpu().numpy()
    begin = 0
    for sample in order:
        count = int(sample.mask_T.sum())
        filled[id(sample)][sample.mask_T] = values[begin : begin + count]
        begin += count
    return [filled[id(sample)] for sample in samples]


class MasterWeights:
    """A network of bfloat16 whose weights, gradient sums and AdamW moments are kept in float32."""

    def __init__(self, network: nn.Module, recipe: Recipe) -> None:
        self.weights: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self.masters = [p.detach().clone() for p in self.weights]
        to_bfloat16(network)
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.register_post_accumulate_grad_hook(self._adder(master))
        betas = (recipe.beta1, recipe.beta2)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=recipe.lr, betas=betas, weight_decay=recipe.weight_decay, fused=True
        )
        self.max_norm = recipe.max_grad_norm

    @staticmethod
    def _adder(master: Tensor) -> Callable[[Tensor], None]:
        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

        return add

    @torch.no_grad()
    def update(self) -> float:
        """Clip, step, and hand the new weights to the network; return the norm of the gradient."""
        norm = nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
        return float(norm)


def plain_step(
    network: Any,
    samples: Sequence[TrainingSample],
    max_tokens: int,
    recipe: Recipe,
    device: str,
    recompute: bool = True,
    bfloat16: bool = True,
) -> Callable[[bool], Outcome]:
    """Return a function that takes one step of the padded path, or with `learn` false only the forward pass of it.

    Rows are put on the device beforehand, so their collation costs nothing in each step.
    """
    network.train()
    if recompute:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    master: MasterWeights | None = None
    batches = padded_batches(samples, max_tokens, network.config.image_token_id, device)
    if bfloat16:
        master = MasterWeights(network, recipe)
        for batch in batches:
            batch.inputs["pixel_values"] = batch.inputs["pixel_values"].to(torch.bfloat16)
    optimizer = None if bfloat16 else torch.optim.AdamW(network.parameters(), lr=recipe.lr, fused=True)

    def step(learn: bool = True) -> Outcome:
        total = torch.zeros((), device=device)
        for batch in batches:
            with torch.set_grad_enabled(learn):
                logprobs_N = padded_logprobs(network, batch)
                ratio_N = (logprobs_N - batch.rollout_N).exp()
                bounded_N = ratio_N.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
                worst_N = torch.minimum(ratio_N * batch.advantages_N, bounded_N * batch.advantages_N)
                loss = -(worst_N * batch.weights_N).sum()
            total += loss.detach()
            if learn:
                loss.backward()
        norm = float("nan")
        if learn and master is not None:
            norm = master.update()
        elif learn:
            assert optimizer is not None
            norm = float(nn.utils.clip_grad_norm_(network.parameters(), recipe.max_grad_norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return Outcome(float(total), norm)

    return step
