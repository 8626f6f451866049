"""One optimizer step that shows its gradients, on one rank or on several processes, and streams to take it on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from agents.model.policy import PolicyModel
from agents.types import ProcessedImage, RouteShape, SamplingParams, TrajectoryGroup
from tests.builders import fresh_model, group, trajectory
from tests.processes import run_ranks
from tests.tiny_models import write_tiny_model
from trainer.algorithms.advantages import compute_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.data.packing import training_samples
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.types import StepStats, TrainingSample


@dataclass(frozen=True, eq=False)
class Update:
    """One optimizer update: the weights that it started from, and its full gradients as they were before clipping."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


class OpenLearner(FSDPLearner):
    """A learner that keeps what its updates did."""

    updates: list[Update]

    def _step_optimizer(self, sums: Any) -> None:
        gradients = {name: whole(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        weights = {name: whole(p) for name, p in self.model.named_parameters()}
        self.updates = [*getattr(self, "updates", []), Update(weights, gradients)]
        super()._step_optimizer(sums)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, gathered from all ranks where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def samples_of(
    groups: Sequence[TrajectoryGroup],
    image_token_id: int = 99_999,
    merge_size: int = 2,
    algorithm: AlgorithmConfig = AlgorithmConfig(),
) -> list[TrainingSample]:
    """Return the samples of one update on all groups."""
    advantages = compute_advantages(groups, algorithm)
    return training_samples(groups, advantages, image_token_id, merge_size, algorithm, max_new_tokens=100)


@dataclass(frozen=True, eq=False)
class Stepped:
    """What is left after one step; `gradients` are those of its last update."""

    stats: StepStats
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def take_step(
    checkpoint: Path,
    samples: Sequence[TrainingSample],
    params: SamplingParams,
    optim: OptimConfig = OptimConfig(),
    max_tokens: int = 100_000,
    algorithm: AlgorithmConfig = AlgorithmConfig(),
    config: LearnerConfig = LearnerConfig(),
    num_minibatches: int = 1,
) -> Stepped:
    """Load the checkpoint afresh and take one step on this rank's samples, every n-th of them in one minibatch."""
    config = config.model_copy(update={"max_tokens_per_microbatch": max_tokens})
    learner = OpenLearner(fresh_model(checkpoint), params, 1, optim, algorithm, config, path=checkpoint)
    stats = learner.step([samples[number::num_minibatches] for number in range(num_minibatches)])
    weights = {name: w.clone() for name, w in learner.weights().items()}
    return Stepped(stats, learner.updates[-1].gradients, weights)


def rank_main(rank: int, checkpoint: Path | None, shares: Mapping[str, Any], out: Path) -> None:
    """Take one step per named split of the samples as one of several ranks; rank 0 writes what is left of each.

    A split may name a checkpoint of its own.
    """
    for name, share in shares.items():
        stepped = take_step(share.get("checkpoint", checkpoint), share["samples"][rank], **share["step"])
        if rank == 0:
            torch.save(stepped, out / f"{name}.pt")


def random_image(model: PolicyModel, grid: tuple[int, int, int], seed: int) -> ProcessedImage:
    """Return an image of random patches."""
    vision = model.config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.random.default_rng(seed).normal(size=(grid[1] * grid[2], values)).astype(np.float32)
    return ProcessedImage(f"{grid} {seed}", pixels, grid, grid[1] * grid[2] // model.merge_size**2)


def random_groups(model: PolicyModel, seed: int = 0) -> list[TrajectoryGroup]:
    """Return four groups of three streams of one to three turns, whose rollout log-probs are near -6 nats, or -8.

    Where the network takes images, the prompts of all groups but the first show one or two, and so do some of the
    later observations. One image is shown by two groups, some streams have one turn alone, one group no advantage.
    """
    rng = np.random.default_rng(seed)
    grids = [[], [(1, 4, 6)], [(1, 20, 18), (1, 4, 6)], [(1, 8, 4)]]

    def text(count: int) -> list[int]:
        return rng.integers(20, 300, count).tolist()

    def show(grid: tuple[int, int, int], number: int) -> tuple[list[int], list[ProcessedImage]]:
        if not model.architecture.vision:
            return [], []
        image = random_image(model, grid, number)
        return [model.image_token_id] * image.num_tokens, [image]

    groups = []
    for number, prompt_grids in enumerate(grids):
        prompt: list[int] = text(5 + 3 * number)
        shown: list[ProcessedImage] = []
        for grid in prompt_grids:
            placeholders, images = show(grid, 0)
            prompt, shown = prompt + placeholders + text(3), shown + images
        streams = []
        for copy in range(3):
            ids, mask, images = list(prompt), [0] * len(prompt), list(shown)
            for turn in range(1 + (number + copy) % 3):
                if turn:
                    placeholders, seen = show((1, 4, 4 + 2 * copy), turn) if (number + turn) % 2 else ([], [])
                    said = [*text(2), *placeholders, *text(1 + copy)]
                    ids, mask, images = ids + said, mask + [0] * len(said), images + seen
                written = text(2 + int(rng.integers(6)))
                ids, mask = ids + written, mask + [1] * len(written)
            reward = float(copy == number)  # so the last group has no advantage
            # Good streams were less likely then than they are now: their corrections are larger, and losses do not
            # cancel.
            logprobs = np.where(mask, rng.normal(-6 - 2 * reward, 1, len(ids)), 0).tolist()
            streams.append(trajectory(ids, mask, logprobs, images, reward))
        groups.append(group(*streams))
    return groups


def random_samples(model: PolicyModel, seed: int = 0) -> list[TrainingSample]:
    """Return the samples of one update on `random_groups`."""
    return samples_of(random_groups(model, seed), model.image_token_id, model.merge_size)


def routed(samples: Sequence[TrainingSample], shape: RouteShape) -> list[TrainingSample]:
    """Give samples random routes: one for each prompt, then one for each token of a sample but the last that it wrote.

    The samples of the last prompt have none, and choose freely.
    """
    rng = np.random.default_rng(0)

    def draw(num_tokens: int) -> NDArray[np.uint8]:
        every_RLE = rng.permuted(np.tile(np.arange(shape.num_experts), (num_tokens, shape.num_layers, 1)), axis=-1)
        return every_RLE[..., : shape.top_k].astype(np.uint8)

    prompts: dict[object, NDArray[np.uint8]] = {}
    given = []
    for sample in samples:
        prompt_RLK = prompts.setdefault(sample.prompt_key, draw(sample.prefix_length))
        own_RLK = draw(int(np.flatnonzero(sample.mask_T)[-1]) - sample.prefix_length)
        is_last = sample.prompt_key == samples[-1].prompt_key
        given.append(sample if is_last else replace(sample, routes_RLK=np.concatenate([prompt_RLK, own_RLK])))
    return given


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint of one architecture and streams for it."""

    checkpoint: Path
    samples: list[TrainingSample]
    params: SamplingParams

    @classmethod
    def write(cls, folder: Path, model_type: str) -> Case:
        """Write the checkpoint and draw the streams."""
        write_tiny_model(folder, model_type)
        model = fresh_model(folder)
        suppressed = (model.image_token_id, model.config.video_token_id) if model.architecture.vision else (3,)
        samples = random_samples(model)
        if model.routing.shape:
            samples = routed(samples, model.routing.shape)
        return cls(folder, samples, SamplingParams(0.9, suppressed_ids=suppressed))


@dataclass(frozen=True)
class Variant:
    """Another way to take the same step: the samples rearranged, cut otherwise, on a network that lies otherwise."""

    max_tokens: int = 100_000
    rearranged: Callable[[list[TrainingSample]], list[TrainingSample]] = list
    config: LearnerConfig = LearnerConfig()


def shuffled(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Return the samples in an order in which no group stays together."""
    return [samples[index] for index in np.random.default_rng(1).permutation(len(samples))]


def apart(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Return samples none of which begins with the prompt of another: how far a prompt goes is told differently.

    Every prompt ends with three tokens of text at least, so no image is cut.
    """
    return [replace(sample, prefix_length=sample.prefix_length - k % 3) for k, sample in enumerate(samples)]


#: By the kind of what differs and what it is.
VARIANTS: Mapping[tuple[str, str], Variant] = {
    ("packing", "every stream alone"): Variant(max_tokens=1),
    ("packing", "some together"): Variant(max_tokens=150),
    ("packing", "prompts apart"): Variant(rearranged=apart),
    ("order", "backwards"): Variant(rearranged=lambda samples: samples[::-1]),
    ("order", "shuffled, some together"): Variant(max_tokens=150, rearranged=shuffled),
    ("recompute", "half"): Variant(config=LearnerConfig(recompute=0.5)),
    ("recompute", "all, some together"): Variant(max_tokens=150, config=LearnerConfig(recompute=1.0)),
    ("reshard", "always"): Variant(max_tokens=150, config=LearnerConfig(reshard="always")),
    ("reshard", "never"): Variant(max_tokens=150, config=LearnerConfig(reshard="never")),
    ("offload", "optimizer"): Variant(config=LearnerConfig(offload="optimizer")),
    ("offload", "all"): Variant(max_tokens=150, config=LearnerConfig(offload="all")),
}


def take_variant(case: Case, variant: Variant, **step: Any) -> Stepped:
    """Take the step of a case in another way."""
    samples = variant.rearranged(case.samples)
    return take_step(
        case.checkpoint, samples, case.params, max_tokens=variant.max_tokens, config=variant.config, **step
    )


def split(samples: Sequence[TrainingSample], num_ranks: int) -> list[Sequence[TrainingSample]]:
    """Return uneven shares for 1, 2 or 4 ranks, of 4 ranks one has nothing and one a single sample."""
    bounds = {1: [0, 12], 2: [0, 7, 12], 4: [0, 5, 6, 6, 12]}[num_ranks]
    return [samples[start:end] for start, end in itertools.pairwise(bounds)]


def steps_on_ranks(
    cases: Mapping[str, Case], num_ranks: int, out: Path, config: LearnerConfig = LearnerConfig()
) -> dict[str, Stepped]:
    """Take the step of every case on as many processes, which are started once."""
    shares = {
        name: {
            "checkpoint": case.checkpoint,
            "samples": split(case.samples, num_ranks),
            "step": {"params": case.params, "max_tokens": 150, "config": config},
        }
        for name, case in cases.items()
    }
    run_ranks(rank_main, num_ranks, out / f"store{num_ranks}", None, shares, out)
    return {name: torch.load(out / f"{name}.pt", weights_only=False) for name in cases}


def relative(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference over the norm, of all tensors together."""
    assert got.keys() == expected.keys()
    difference = sum(float((got[name] - expected[name]).double().square().sum()) for name in expected)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in expected.values())) ** 0.5


@dataclass(frozen=True)
class Difference:
    """How far a step is from another, in relative terms: loss, all gradients together, and the gradient furthest off.

    Gradients of one tensor are compared by the norm of their difference over their norm.
    """

    loss: float
    gradient: float
    worst_gradient: float

    @classmethod
    def between(cls, got: Stepped, expected: Stepped) -> Difference:
        """Compare two steps."""
        loss = abs(got.stats.loss - expected.stats.loss) / abs(expected.stats.loss)
        parts = (relative({"": got.gradients[name]}, {"": tensor}) for name, tensor in expected.gradients.items())
        return cls(loss, relative(got.gradients, expected.gradients), max(parts))


def adapters_and_merged(case: Case) -> tuple[Stepped, Stepped]:
    """Return the step of a network with adapters, and that of the merged network, its gradients by the chain rule.

    W + s B A has dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T.
    """
    config = LearnerConfig(lora_rank=4, lora_alpha=6.0)
    learner = OpenLearner(fresh_model(case.checkpoint), case.params, 1, config=config)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if ".lora_B." in name:
                value = 0.3 * torch.randn(parameter.shape, generator=rng)
                parameter.to_local().copy_(value)  # type: ignore[operator]
    merged = {name: weight.clone() for name, weight in learner.weights().items()}
    adapted = learner.step([case.samples])
    (update,) = learner.updates
    model = fresh_model(case.checkpoint)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(merged[name])
    plain = OpenLearner(model, case.params, 1)
    stats = plain.step([case.samples])
    dense = plain.updates[0].gradients
    expected = {}
    for name in update.gradients:
        layer, _, side = name.removesuffix(".default.weight").rpartition(".")
        a_RH, b_OR = (update.weights[f"{layer}.lora_{letter}.default.weight"] for letter in "AB")
        full_OH = 1.5 * dense[f"{layer}.weight"]
        expected[name] = b_OR.T @ full_OH if side == "lora_A" else full_OH @ a_RH.T
    return Stepped(adapted, update.gradients, {}), Stepped(stats, expected, {})
