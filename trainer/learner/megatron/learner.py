"""The learner over Megatron-core: one rank of it. The step, the loss and the statistics are those of every backend.

Each rank takes the samples of its data-parallel share; the ranks of a model-parallel group take the same. Log-probs are
known on the last pipeline stage, and the same on all its tensor- and context-parallel ranks: one of them, the reporter,
adds them to the statistics.

Legend: N model tokens of a micro-batch or sample, T tokens of a stream.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from numpy.typing import NDArray
from torch import Tensor

from agents.engines.weight_servers import Adapter
from agents.model.mrope import mrope_positions
from agents.types import ProcessedImage, SamplingDistribution, SamplingParams
from envs.errors import UserError
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LayoutConfig, LearnerConfig, OptimConfig
from trainer.data.packing import filler_row
from trainer.learner.collectives import ensure_process_group
from trainer.learner.layout import Layout
from trainer.learner.megatron.adapters import disabled
from trainer.learner.megatron.kernels import load_kernels
from trainer.learner.megatron.network import MegatronNetwork, check_rope, start_parallel
from trainer.learner.megatron.optimizer import MegatronOptimizer
from trainer.learner.megatron.state import MegatronState
from trainer.learner.megatron.thd import ThdBatch, padding_multiple, single_rows, thd_batch
from trainer.learner.sharding import freeze_vision
from trainer.learner.step_learner import OnMicroBatch, SampleLogprobs, StepLearner
from trainer.learner.step_sums import StepSums
from trainer.learner.weights_io import empty_model
from trainer.types import Row, StepStats, TrainingSample

#: Every rank holds the whole network.
MEGATRON = LayoutConfig(backend="megatron")


class MegatronLearner(StepLearner[ThdBatch]):
    """One rank's part of the training weights.

    Example::

        learner = MegatronLearner(path, SamplingParams(), 20, backend=LayoutConfig(backend="megatron", tp=2))
        stats = learner.step([samples])             # one optimizer update
        engine.load_weights(learner.weights(), version=1)
    """

    def __init__(
        self,
        path: Path | str,
        sampling: SamplingParams,
        num_steps: int,
        optim: OptimConfig = OptimConfig(),
        algorithm: AlgorithmConfig = AlgorithmConfig(),
        config: LearnerConfig = LearnerConfig(),
        backend: LayoutConfig = MEGATRON,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        changed: Any = None,
    ) -> None:
        """Load the network from a Hugging Face folder; `changed` may change the settings of Megatron-Bridge's provider.

        Raises:
            UserError: the network lacks what should be trained.
        """
        super().__init__(sampling, num_steps, optim, algorithm, config, torch.device(device), dtype)
        if self.device.type == "cuda":
            load_kernels()
        ensure_process_group(self.device)
        if self.device.type == "cuda" and self.device.index is not None:  # without an index: the current one
            torch.cuda.set_device(self.device)
        self.layout = Layout.of(backend)
        #: The network of Transformers on the meta device, for its configuration and names: it takes no memory.
        self.model = empty_model(path, dtype)
        if config.freeze_vision:  # the provider freezes the network itself; this refuses one without a tower
            freeze_vision(self.model)
        check_rope(self.model.config)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        if self.model.architecture.vision and vocabulary % self.layout.tensor:
            rule = f"must divide the vocabulary of {vocabulary} ids of a network that takes images"
            raise UserError("--tp", rule, self.layout.tensor, "give a divisor of it")
        start_parallel(self.layout, seed)
        self.network = MegatronNetwork(path, config, self.layout, dtype, changed=changed)
        self.layout = replace(self.layout, sequence=self.network.sequence)
        self._reference: MegatronNetwork | None = None
        if algorithm.kl_coef and not config.lora_rank:
            self._reference = MegatronNetwork(path, config, self.layout, dtype, is_trained=False, changed=changed)
        self.optimizer = MegatronOptimizer(self.network.chunks, optim, dtype)
        self._state = MegatronState(self.network, self.optimizer)

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def _is_reporter(self) -> bool:
        """Whether this rank adds its micro-batches to the statistics."""
        groups = self.network.groups
        ranks = (groups.get_tensor_model_parallel_rank(), groups.get_context_parallel_rank())
        return self.network.is_last_stage and ranks == (0, 0)

    @property
    def _first_reporter(self) -> int:
        return self.layout.first_of_last_stage(dist.get_world_size())

    def _rows(self, samples: Sequence[TrainingSample]) -> list[Row]:
        return single_rows(samples, padding_multiple(self.layout))

    def _collate(self, rows: list[Row], any_images: bool) -> ThdBatch:
        # Every rank must run as many micro-batches as the others.
        rows = rows or [filler_row(self.model, with_image=False)]
        return self._thd(rows)

    def _thd(self, rows: Sequence[Row]) -> ThdBatch:
        network = self.network
        return thd_batch(rows, padding_multiple(self.layout), network.context, self.device, network.sequence_part)

    def _bins(self, rows: Sequence[Row]) -> list[list[Row]]:
        # Without TransformerEngine, attention takes one stream at a time.
        if self.network.is_packed:
            return super()._bins(rows)
        most = int(self._max_over_ranks([float(len(rows))])[0])
        return [[row] for row in rows] + [[] for _ in range(most - len(rows))]

    def _forward(
        self,
        runs: Iterable[list[list[Row]]],
        any_images: bool,
        on_micro_batch: OnMicroBatch[ThdBatch],
        is_reference: bool = False,
    ) -> None:
        network = self.network
        adapters = contextlib.nullcontext()
        if is_reference and self._reference:
            network = self._reference
        elif is_reference:  # without its adapters, the policy is its own reference
            adapters = disabled(network.chunks)
        with torch.no_grad(), adapters:
            for bins in runs:
                network.run(
                    self._batches(bins, any_images),
                    len(bins),
                    self.sampling.distribution,
                    seen=on_micro_batch,
                    # The reference has written no token, so no route is its own.
                    replays_routes=not is_reference,
                )

    def _update(
        self,
        samples: Sequence[TrainingSample],
        any_images: bool,
        sums: StepSums,
        old: SampleLogprobs | None,
        reference: SampleLogprobs | None,
    ) -> None:
        self.network.zero_gradients()  # an earlier update that failed halfway may have left some
        self.optimizer.zero_grad()
        distribution = self.sampling.distribution

        def loss_of(batch: ThdBatch, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
            return self._objective(batch, logprobs_N, entropy_N, sums, old, reference)

        measured, trained = (self._bins(rows) for rows in self._split_rows(samples))
        self._forward([measured], any_images, loss_of)
        if trained:
            self.network.run(self._batches(trained, any_images), len(trained), distribution, loss_of=loss_of)
            norm = self.optimizer.norm()
            if sums.add_update(norm, self._is_finite(sums)):
                self.optimizer.step()

    def _stats(self, sums: StepSums, lr: float) -> StepStats:
        stats: StepStats | None = None
        if self._is_reporter:
            stats = sums.stats(lr, self.network.groups.get_data_parallel_group())
        shared = [replace(stats, logprobs={}) if stats else None]
        # Ranks of earlier stages have seen no log-prob.
        dist.broadcast_object_list(shared, src=self._first_reporter, device=self.device)
        assert shared[0] is not None, "the first reporter has the statistics"
        return replace(shared[0], logprobs=stats.logprobs if stats else {})

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob, at temperature 1, of each id of a stream but the first; every rank must call it."""
        values_N = torch.zeros(max(0, len(ids) - 1), device=self.device)
        if not len(values_N):
            return values_N.cpu().numpy()
        batch = self._thd(self._rows([self._every_token(ids, images)]))

        def on_micro_batch(_: ThdBatch, logprobs_N: Tensor, __: Tensor) -> None:
            values_N.copy_(logprobs_N)

        with self.lock, torch.no_grad():
            self.network.run(iter([batch]), 1, SamplingDistribution(), seen=on_micro_batch)
            # Only ranks of the last stage know log-probs.
            dist.broadcast(values_N, src=self._first_reporter)
        return values_N.cpu().numpy()

    def _every_token(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> TrainingSample:
        """Return a stream as a sample whose every token but the first is the model's."""
        ids_T = np.asarray(ids, dtype=np.int64)
        written_T = np.arange(len(ids_T)) > 0
        grids = [image.grid_thw for image in images]
        return TrainingSample(
            ids_T=ids_T,
            mask_T=written_T,
            turns_T=written_T.astype(np.int64),
            logprobs_T=np.zeros(len(ids_T), dtype=np.float32),
            positions_3T=mrope_positions(ids_T, grids, self.model.image_token_id, self.model.merge_size),
            images=tuple(images),
            prefix_length=1,
            num_prefix_images=0,
            advantage=0.0,
            weight=0.0,
        )

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights in `dtype`, adapters merged, by their names in a checkpoint, one at a time.

        Every rank must take all: each weight is gathered from the ranks that hold its parts.
        """
        with self.lock:
            for name, weight in self.network.export():
                yield name, self.model.as_saved(name, weight.detach().to(self.device, self.dtype))

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of what `stream` yields, in its order; every rank must call it."""
        return self._shapes

    @cached_property
    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(weight.shape)) for name, weight in self.stream()]

    def weights(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the full weights by parameter name, adapters merged: on rank 0 alone, but every rank must call it.

        Raises:
            UserError: a checkpoint of this network has other names than the network in memory.
        """
        if self.model.architecture.saved_prefixes:
            rule = "needs servers for a network saved under other names"
            got = self.model.config.model_type
            raise UserError("--backend megatron", rule, got, "give --engine sglang")
        kept: dict[str, Tensor] = {}
        for name, weight in self.stream():
            if dist.get_rank() == 0:
                weight = self.model.as_in_memory(name, weight)
                kept[f"backbone.{name}"] = weight.to(device or weight.device, dtype or weight.dtype)
        return kept

    def adapter(self) -> Adapter:
        """Return the low-rank updates alone: every rank must call it."""
        raise UserError(
            "--sync",
            "cannot send adapters alone with --backend megatron",
            "lora",
            "leave --sync out: weights are merged",
        )

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the configuration and the weights, in `dtype`, into a model folder; every rank must call it."""
        is_writer = dist.get_rank() == 0
        # Every rank takes the stream to its end: the writer cannot gather weights without the others.
        # Copies: Megatron keeps weights as parts of large buffers, and safetensors refuses parts.
        weights = {name: weight.to("cpu", dtype, copy=True) for name, weight in self.stream() if is_writer}
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(weights, folder)
            self.model.save_settings(folder, dtype)
        dist.barrier()

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy this rank's part of the state, and write it in the background; every rank must call it."""
        with self.lock:
            self._state.begin(folder, self.steps_done)

    def is_checkpoint_written(self, wait: bool) -> bool:
        """Return whether the checkpoint is on disk; raises `CheckpointFailed` if a rank could not write."""
        return self._state.is_written(wait)

    def restore(self, folder: Path, with_optimizer: bool = True) -> None:
        """Continue from a checkpoint that any layout wrote with `begin_checkpoint`; every rank must call it."""
        with self.lock:
            self.steps_done = self._state.restore(folder, with_optimizer)
