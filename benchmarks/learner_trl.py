"""The same training step in TRL's GRPO trainer, with its own loop, loss, accumulation and optimizer.

In: a network as Transformers builds it, and training samples that stand for what TRL would generate and score. Out:
seconds of its steps. Weights and AdamW's moments are float32, and it computes under autocast to bfloat16.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.learner_peers import Outcome, image_inputs
from benchmarks.learner_workload import Recipe, to_bfloat16
from trainer.types import TrainingSample


@dataclass(frozen=True)
class TrlOptions:
    """`batch` is `per_device_train_batch_size`; `liger` its layer kernels.

    `trim` sorts the samples by length and cuts each micro-batch to its longest: TRL by itself pads to the longest of
    the step. `halved` keeps weights and AdamW's moments in bfloat16, which no other path here does.
    """

    batch: int = 8
    liger: bool = False
    trim: bool = False
    halved: bool = False


@dataclass(frozen=True)
class TrlTiming:
    """Seconds of each step, the first ones too; loss and gradient norm of the first; tokens computed in a step."""

    seconds: tuple[float, ...]
    first: Outcome
    computed_tokens: int
    peak_gib: float


def run_trl(
    network: Any, samples: Sequence[TrainingSample], options: TrlOptions, recipe: Recipe, device: str, steps: int
) -> TrlTiming:
    """Run `GRPOTrainer.train` for some steps; what it would generate and score is put in its place."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from agents.model import STARTER_PATH

    on_gpu = device.startswith("cuda")
    image_id = network.config.image_token_id
    if options.halved:
        to_bfloat16(network)
    ordered = sorted(samples, key=lambda s: len(s.ids_T)) if options.trim else list(samples)
    parts = [ordered[i : i + options.batch] for i in range(0, len(ordered), options.batch)]
    prepared = _trl_inputs(ordered, samples, image_id, device)
    trimmed = [_trl_inputs(part, samples, image_id, device) for part in parts] if options.trim else []
    losses: list[Tensor] = []
    seconds: list[float] = []

    class Learner(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(prepared)

        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            return trimmed[self._step % len(parts)] if trimmed else super()._prepare_inputs(generation_batch)

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            losses.append(loss.detach())
            return loss

    class Clock(TrainerCallback):
        begun = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            _wait(device)
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _wait(device)
            seconds.append(time.perf_counter() - self.begun)

    group = max(2, len(samples) // len({s.images[0].digest for s in samples}))
    with tempfile.TemporaryDirectory(prefix="trueturn-") as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=len(parts),
            num_generations=group,
            max_completion_length=max(len(s.ids_T) - s.prefix_length for s in samples),
            max_steps=steps,
            loss_type="dapo",
            epsilon=recipe.clip_low,
            epsilon_high=recipe.clip_high,
            learning_rate=recipe.lr,
            adam_beta1=recipe.beta1,
            adam_beta2=recipe.beta2,
            max_grad_norm=recipe.max_grad_norm,
            lr_scheduler_type="constant",
            use_liger_kernel=options.liger,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        dataset = Dataset.from_dict({"prompt": ["-"] * max(2, len(samples) // group)})
        tokenizer = AutoTokenizer.from_pretrained(STARTER_PATH)
        callbacks: list[TrainerCallback] = [Clock()]
        trainer = Learner(network, _no_reward, args, dataset, processing_class=tokenizer, callbacks=callbacks)
        trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    first = Outcome(float(torch.stack(losses[: len(parts)]).sum()), float(norms[0]) if norms else float("nan"))
    computed = sum(max(len(s.ids_T) for s in (part if options.trim else samples)) * len(part) for part in parts)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return TrlTiming(tuple(seconds), first, computed, peak)


def _no_reward(completions: Any, **_: Any) -> list[float | None]:
    raise AssertionError("nothing is generated, so nothing is rewarded")


def _trl_inputs(
    samples: Sequence[TrainingSample], step: Sequence[TrainingSample], image_id: int, device: str
) -> dict[str, Any]:
    """Return what TRL's `_generate_and_score_completions` returns: prompts padded left, completions right."""
    prompt = max(s.prefix_length for s in samples)
    width = max(len(s.ids_T) - s.prefix_length for s in samples)
    ids = torch.zeros((len(samples), prompt + width), dtype=torch.long)
    attended, taught = torch.zeros_like(ids), torch.zeros_like(ids)
    old = torch.zeros(ids.shape, dtype=torch.float32)
    for row, sample in enumerate(samples):
        start = prompt - sample.prefix_length
        cells = slice(start, start + len(sample.ids_T))
        ids[row, cells] = torch.from_numpy(sample.ids_T)
        attended[row, cells] = 1
        taught[row, cells] = torch.from_numpy(sample.mask_T.astype(np.int64))
        old[row, cells] = torch.from_numpy(sample.logprobs_T)
    tensors = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": attended[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": attended[:, prompt:],
        "tool_mask": taught[:, prompt:],
        "old_per_token_logps": old[:, prompt:],
        "advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(sum(int(s.mask_T.sum()) for s in step)),
        "mm_token_type_ids": (ids == image_id).long(),
    }
    images = [image for s in samples for image in s.images]
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return {**moved, **image_inputs(images, device), "num_images": [len(s.images) for s in samples]}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
