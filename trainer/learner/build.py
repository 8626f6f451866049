"""Builds the learner of a run: of the backend that its settings name."""

from __future__ import annotations

from pathlib import Path

import torch

from agents.model.kernel_cache import keep_kernels
from agents.types import SamplingParams
from trainer.config.learner import LearnerPlan
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.protocol import RankLearner
from trainer.learner.weights_io import empty_model


def build_learner(config: LearnerPlan, path: Path | str, sampling: SamplingParams, device: torch.device) -> RankLearner:
    """Return the learner of a run; every rank calls it.

    Raises:
        UserError: the checkpoint does not fit the network, or the network lacks what should be trained.
    """
    keep_kernels()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    # Imported late: Megatron is installed on few machines.
    if config.cluster.backend == "megatron":
        from trainer.learner.megatron.learner import MegatronLearner

        return MegatronLearner(
            path,
            sampling,
            config.steps,
            config.optim,
            config.algorithm,
            config.learner,
            config.cluster,
            device,
            dtype,
            config.seed,
        )
    # Weights that are never trained need no more precision than the network computes in; adapters are float32 anyway.
    if config.learner.lora_rank or not config.steps:
        kept = dtype
    else:
        kept = torch.float32
    return FSDPLearner(
        empty_model(path, kept),
        sampling,
        config.steps,
        config.optim,
        config.algorithm,
        config.learner,
        device,
        dtype,
        path,
        config.seed,
    )
