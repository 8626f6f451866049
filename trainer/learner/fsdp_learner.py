"""The learner: holds one sharded copy of the policy with its optimizer, and trains it on samples.

FSDP2 (`fully_shard`) runs over every process of the default group. One process with gloo on a CPU runs the same code.
Each rank passes its share of the step's samples to `step`; all ranks get the same statistics back.

Legend: N model tokens of a micro-batch or sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from agents.engines.weight_servers import Adapter
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.types import ProcessedImage, SamplingParams
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.data.packing import collate, filler_row, pack_rows
from trainer.learner.collectives import ensure_process_group, reduce_over_ranks
from trainer.learner.dcp_state import StateWriter, restore, trained_state
from trainer.learner.lora import add_lora, disabled, is_adapter, merged_weights, packed_adapter, plain_name
from trainer.learner.offload import OffloadedState
from trainer.learner.routing_stats import RoutingSums
from trainer.learner.sharding import (
    freeze_vision,
    keep_gathered,
    reshard,
    shard,
    trainable_parameters,
)
from trainer.learner.step_learner import OnMicroBatch, SampleLogprobs, StepLearner
from trainer.learner.step_sums import StepSums
from trainer.learner.weights_io import empty_model, load_weights
from trainer.types import MicroBatch, Row, TrainingSample


class FSDPLearner(StepLearner[MicroBatch]):
    """Owns the training weights, and changes them.

    Example::

        learner = FSDPLearner(PolicyModel.load(path), SamplingParams(), num_steps=20)
        stats = learner.step([samples])            # one optimizer update
        engine.load_weights(learner.weights(), version=1)
    """

    def __init__(
        self,
        model: PolicyModel,
        sampling: SamplingParams,
        num_steps: int,
        optim: OptimConfig = OptimConfig(),
        algorithm: AlgorithmConfig = AlgorithmConfig(),
        config: LearnerConfig = LearnerConfig(),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        path: Path | str = "",
        seed: int = 0,
    ) -> None:
        """Shard the network; fill it from the checkpoint at `path` if its parameters are on the meta device.

        Raises:
            UserError: the checkpoint does not fit the network, or the network lacks what should be trained.
        """
        super().__init__(sampling, num_steps, optim, algorithm, config, torch.device(device), dtype)
        assert path or not algorithm.kl_coef or config.lora_rank, "a reference network is read from a checkpoint"
        ensure_process_group(self.device)
        self._keeps_gathered = config.reshard == "never"
        if config.freeze_vision:
            freeze_vision(model, dtype)
        if config.lora_rank:
            add_lora(model, config, seed)
        self.model = self._sharded(model, path, seed)
        self._reference = self._build_reference(path)
        # After sharding, so that its state is sharded as the parameters are.
        self.optimizer = torch.optim.AdamW(
            trainable_parameters(self.model),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        if config.offload == "optimizer":
            self._state = OffloadedState(self.optimizer)
        else:
            self._state = None
        self._writer = StateWriter()

    def _sharded(self, model: PolicyModel, path: Path | str, seed: int) -> PolicyModel:
        """Shard a network in place over all ranks, with its weights, and return it."""
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        on_host = self.config.offload == "all"
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        if not is_empty and not on_host:
            model = model.to(self.device)
        shard(model.train(), self.config, mesh, self.dtype)
        if is_empty:
            load_weights(model, path, self.device, torch.device("cpu") if on_host else self.device, seed)
        return model

    def _build_reference(self, path: Path | str) -> PolicyModel | None:
        """Return the reference network of the KL penalty; with LoRA it is the policy with its adapters switched off."""
        if not self.algorithm.kl_coef or self.config.lora_rank:
            return None
        # It is never trained, so it needs no more precision than it computes in.
        model = empty_model(path, self.dtype)
        model.requires_grad_(False)
        return self._sharded(model, path, 0).eval()

    def _forward(
        self,
        runs: Iterable[list[list[Row]]],
        any_images: bool,
        on_micro_batch: OnMicroBatch[MicroBatch],
        is_reference: bool = False,
    ) -> None:
        network = self.model
        adapters = contextlib.nullcontext()
        if is_reference and self._reference:
            network = self._reference
        elif is_reference:  # without its adapters, the policy is its own reference
            adapters = disabled(self.model)
        with torch.no_grad(), adapters:
            for bins in runs:
                for batch in self._batches(bins, any_images):
                    packed = batch.packed
                    if is_reference:  # it has written no token, so no route is its own
                        packed = replace(packed, routes_TLK=None)
                    on_micro_batch(batch, *network.token_scores(packed, self.sampling.distribution))
        reshard(network)

    def _update(
        self,
        samples: Sequence[TrainingSample],
        any_images: bool,
        sums: StepSums,
        old: SampleLogprobs | None,
        reference: SampleLogprobs | None,
    ) -> None:
        # An earlier update that failed halfway may have left gradients.
        self.optimizer.zero_grad(set_to_none=True)
        keep_gathered(self.model, False)

        def loss_of(batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
            return self._objective(batch, logprobs_N, entropy_N, sums, old, reference)

        measured, trained = self._split_rows(samples)
        self._forward([self._bins(measured)], any_images, loss_of)
        bins = self._bins(trained)
        for number, batch in enumerate(self._batches(bins, any_images), 1):
            keep_gathered(self.model, self._keeps_gathered and number < len(bins))
            loss = loss_of(batch, *self.model.token_scores(batch.packed, self.sampling.distribution))
            # FSDP averages gradients over ranks, but the token weights already hold the global denominator: undo it.
            (loss * dist.get_world_size()).backward()
        if bins:
            self._step_optimizer(sums)

    def _routing_stats(self, samples: Sequence[TrainingSample], any_images: bool) -> Mapping[str, float]:
        """Compute the first micro-batch of these samples with free choice, and compare it with the engine's routes.

        It runs uncompiled: another form of each block would take longer to compile than it saves.
        """
        sums = RoutingSums(self.model.routing, self.device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in self._batches(self._bins(self._rows(samples))[:1], any_images):
                free = replace(batch.packed, routes_TLK=None)
                logprobs_N, _ = self.model.token_scores(free, self.sampling.distribution, keeps_chosen=True)
                chosen_TLK = self.model.routing.chosen()
                if batch.packed.routes_TLK is not None:  # another rank may have all that are known
                    sums.add(batch.packed.routes_TLK, chosen_TLK, logprobs_N, batch.rollout_logprobs_N)
        reshard(self.model)
        return sums.stats(reduce_over_ranks(sums.sums, dist.ReduceOp.SUM, self.device))

    def _rows(self, samples: Sequence[TrainingSample]) -> list[Row]:
        """Return rows that hold a prompt once for the samples which share it."""
        return pack_rows(samples, self.config.max_tokens_per_microbatch)

    def _collate(self, rows: list[Row], any_images: bool) -> MicroBatch:
        """Pack rows. If any rank has images in this step, each micro-batch gets one: the tower communicates too."""
        if not rows or (any_images and not any(row.images for row in rows)):
            rows = [*rows, filler_row(self.model, with_image=any_images)]
        return collate(rows, self.model.image_token_id, self.device, self.dtype)

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _step_optimizer(self, sums: StepSums) -> None:
        """Clip the gradient and step, where loss and gradient are finite and the gradient is not 0."""
        clipped = torch.nn.utils.clip_grad_norm_(trainable_parameters(self.model), self.optim.max_grad_norm)
        norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)
        if sums.add_update(norm, self._is_finite(sums)):
            with self._optimizer_on_device():
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _optimizer_on_device(self) -> AbstractContextManager[None]:
        """Hold the optimizer's state on the device within the context."""
        if self._state:
            return self._state.on_device()
        return contextlib.nullcontext()

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob, at temperature 1, of each id of a stream but the first; every rank must call it.

        The network runs uncompiled: to compile the forms that only single streams take costs more than they do.
        """
        with self.lock, torch.compiler.set_stance("force_eager"):
            scores = stream_logprobs(self.model, ids, images, self.device, self.dtype)
            reshard(self.model)
            return scores

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the configuration and the weights, in `dtype`, into a model folder; every rank must call it."""
        weights = self.weights(dtype, "cpu")
        if dist.get_rank() == 0:
            self.model.save(folder, dtype, weights)
        # Nobody may read the folder before rank 0 has written it.
        dist.barrier()

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy this rank's shards of trained weights and optimizer state, and write them in the background.

        Every rank must call it, after `is_checkpoint_written` returned True on every rank for the checkpoint before.
        """
        with self.lock:
            reshard(self.model)
            with self._optimizer_on_device():
                self._writer.begin(trained_state(self.model, self.optimizer, self.steps_done), folder)

    def is_checkpoint_written(self, wait: bool) -> bool:
        """Return whether the checkpoint is on disk; raises `CheckpointFailed` if a rank could not write."""
        return self._writer.is_written(wait)

    def restore(self, folder: Path, with_optimizer: bool = True) -> None:
        """Continue from a checkpoint that any number of ranks wrote with `begin_checkpoint`; every rank must call it.

        Learning rate, betas and weight decay stay those of this learner. Raises `UserError` for another network.
        """
        with self.lock:
            reshard(self.model)
            with self._optimizer_on_device():
                self.steps_done = restore(folder, self.model, self.optimizer if with_optimizer else None)

    def weights(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the full weights by name, adapters merged: on rank 0 alone, but every rank must call it.

        Weights are gathered one by one, cast to `dtype` and moved to `device` if these are given. Otherwise, with one
        rank, they are the learner's own tensors and change with its next step.
        """
        with self.lock:
            reshard(self.model)
            kept: dict[str, Tensor] = {}
            for name, weight in merged_weights(self.model, _whole):
                if dist.get_rank() == 0:
                    # Every rank gathers, since each holds a part; to keep all would fill every GPU.
                    kept[name] = weight.to(device or weight.device, dtype or weight.dtype)
            return kept

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights in `dtype`, adapters merged, by their names in a checkpoint, one at a time.

        Every rank must take all: each is gathered from the shards of all ranks.
        """
        with self.lock:
            reshard(self.model)

            def whole(weight: Tensor) -> Tensor:
                # Cast before they are gathered, shards are half as large; an adapter is merged in float32.
                return _whole(weight if self.config.lora_rank else weight.detach().to(self.dtype))

            for name, weight in merged_weights(self.model, whole):
                own_name = name.removeprefix("backbone.")
                saved = self.model.as_saved(own_name, weight.to(self.device, self.dtype))
                yield self.model.architecture.saved_name(own_name), saved

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of what `stream` yields, in its order."""
        every = {n: p.shape for n, p in self.model.named_parameters() if not is_adapter(n)}
        named = {plain_name(n).removeprefix("backbone."): torch.empty(s, device="meta") for n, s in every.items()}
        shapes = {name: tuple(self.model.as_saved(name, weight).shape) for name, weight in named.items()}
        return [(self.model.architecture.saved_name(name), shape) for name, shape in shapes.items()]

    def adapter(self) -> Adapter:
        """Return the low-rank updates alone, in the learner's dtype; every rank must call it."""
        with self.lock:
            reshard(self.model)
            return packed_adapter(self.model, self.dtype, _whole)


def _whole(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach()
    return parameter.detach()
