"""Our learner as the benchmark of a training step runs it: a short form of its options, and a function that steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from agents.model.policy import PolicyModel
from agents.types import SamplingParams
from benchmarks.learner_workload import RECIPE, Recipe
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.types import StepStats, TrainingSample


@dataclass(frozen=True)
class Options:
    """How our learner runs.

    Example: `16384:recompute:compile:profile` packs 16,384 tokens, makes all blocks' activations again, compiles, and
    asks for a breakdown. `recompute0.5` is for half of the blocks, `lora32` trains adapters of that rank, `offload`
    keeps the optimizer's state in the CPU's memory between steps and `offloadall` everything, `always` and `never` say
    when to reshard, and `unshared` takes samples whose prompts all differ.
    """

    max_tokens: int = 16384
    recompute: float = 0.0
    compile: bool = False
    lora: int = 0
    offload: str = "none"
    reshard: str = "auto"
    unshared: bool = False
    profile: bool = False

    @classmethod
    def parse(cls, text: str) -> Options:
        """Read the short form. Raises ValueError for a word that is none of these."""
        first, *words = text.split(":")
        options = cls(max_tokens=int(first))
        for word in words:
            if word in ("compile", "unshared", "profile"):
                options = replace(options, **{word: True})
            elif word.startswith("recompute"):
                options = replace(options, recompute=float(word.removeprefix("recompute") or 1))
            elif word.startswith("lora"):
                options = replace(options, lora=int(word.removeprefix("lora")))
            elif word in ("always", "never"):
                options = replace(options, reshard=word)
            elif word in ("offload", "offloadall"):
                options = replace(options, offload="all" if word == "offloadall" else "optimizer")
            else:
                raise ValueError(f"'{word}' in '{text}' is no option of a step")
        return options


def fresh_model(config: Any, device: str, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """Return our network with, in float32, the same seeded weights that `plain_network` has."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return PolicyModel.from_config(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(torch.float32)


def our_step(
    model: PolicyModel, samples: Sequence[TrainingSample], options: Options, device: str, recipe: Recipe = RECIPE
) -> Callable[[], StepStats]:
    """Return a function that takes one optimizer step of our learner, with one update."""
    learner = our_learner(model, options, device, recipe)
    return lambda: learner.step([samples])


def our_learner(model: PolicyModel, options: Options, device: str, recipe: Recipe = RECIPE) -> FSDPLearner:
    """Return our learner with these options."""
    return FSDPLearner(
        model.to("cpu") if options.offload == "all" else model,
        SamplingParams(),
        num_steps=100,
        optim=OptimConfig(
            lr=recipe.lr,
            warmup_steps=0,
            beta1=recipe.beta1,
            beta2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm,
        ),
        algorithm=AlgorithmConfig(clip_low=recipe.clip_low, clip_high=recipe.clip_high),
        config=LearnerConfig(
            max_tokens_per_microbatch=options.max_tokens,
            recompute=options.recompute,
            reshard=options.reshard,  # type: ignore[arg-type]
            offload=options.offload,  # type: ignore[arg-type]
            compile="on" if options.compile else "off",
            lora_rank=options.lora,
        ),
        device=device,
        dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32,
    )
