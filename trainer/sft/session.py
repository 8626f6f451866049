"""A supervised run between its stages: reads batches, evaluates, logs and checkpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from agents.model.cpu import compute
from envs.datasets.samples import epoch_order
from trainer.checkpoint.checkpointer import Checkpoint
from trainer.checkpoint.model_card import ModelCard, ending_of, write_card
from trainer.checkpoint.run_dir import MODEL
from trainer.checkpoint.session import RunSession
from trainer.config.sft import SftConfig
from trainer.metrics.clock import StepClock
from trainer.metrics.console import Display
from trainer.setup.run_context import save_model
from trainer.sft.data import ConversationSet
from trainer.sft.setup import SftContext
from trainer.types import StepStats, TrainingSample

logger = logging.getLogger(__name__)

STATE = "progress.json"
EVAL_LOSS = "eval_loss"
#: Why an update is skipped.
LIKELIHOOD_NOT_FINITE = "loss or gradient was not finite; give a smaller --lr"


@dataclass(frozen=True)
class SftState:
    """Where a run stands after `step`; which conversations come next follows from that.

    `metrics_bytes` is the length of the metrics by then, `seconds` the time spent so far, `loss_before` the loss on
    held-out conversations before the first step, where there are any.
    """

    step: int = 0
    metrics_bytes: int = 0
    seconds: float = 0.0
    loss_before: float | None = None

    @property
    def num_rows(self) -> int:
        """The rows of the metrics file: one for each step."""
        return self.step

    @classmethod
    def read(cls, checkpoint: Checkpoint | None) -> SftState:
        """Return what a checkpoint holds; without one, the start of a run."""
        if checkpoint:
            return cls(**json.loads(checkpoint.read(STATE)))
        return cls()

    def files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint."""
        return {STATE: json.dumps(asdict(self)).encode()}


class SftSession(RunSession[SftState]):
    """See `trainer.sft.loop.run_sft` for how it is used."""

    def __init__(self, context: SftContext, display: Display) -> None:
        """Open the run's files where its checkpoint left them."""
        self.context, self.config = context, context.config
        self.train = context.data.train
        self._held_out = context.data.evaluation
        config = context.config
        state = SftState.read(context.checkpoint)
        settings = config.model_dump(mode="json")
        super().__init__(
            context.folder, context.learner, state, context.num_steps, settings, config.log, config.checkpoint, display
        )
        self.loss_before = state.loss_before
        self.loss_after = None
        # One thread reads all conversations: neither renderer nor image store is made for several.
        self._reader = ThreadPoolExecutor(1)
        self._coming = self._read(self.train, step_places(config, len(self.train), state.step + 1))
        self._resumed_at = state.step
        self._begun = time.perf_counter()

    def _read(self, conversations: ConversationSet, places: Sequence[int]) -> Future[list[TrainingSample]]:
        return self._reader.submit(conversations.samples, places)

    async def batch(self, step: int) -> list[TrainingSample]:
        """Return the samples of a step, and begin to read those of the next while the learner is busy."""
        samples = await asyncio.wrap_future(self._coming)
        self._coming = self._read(self.train, step_places(self.config, len(self.train), step + 1))
        return samples

    async def evaluate_before(self) -> None:
        """Evaluate the model that the run starts from; a resumed run has done so."""
        # A resumed run knows it from its checkpoint.
        if not self.state.step:
            self.loss_before = await self._evaluate("evaluate before")
            self.state = self.state_now()
            self._tell(self.loss_before)
        self._begun = time.perf_counter()

    async def evaluate_after(self) -> None:
        """Evaluate the model that the run ends with."""
        self.loss_after = await self._evaluate("evaluate after")
        self._tell(self.loss_after)

    def _tell(self, loss: float | None) -> None:
        if loss is not None:
            self.callbacks.on_evaluation(self.step, {EVAL_LOSS: loss})

    async def evaluate_in_step(self) -> dict[str, float]:
        """Return the held-out loss as a metric of this step, where one is due."""
        every = self.config.eval_every
        if not every or self.step % every or self.step == self.num_steps:
            return {}
        loss = await self._evaluate(f"evaluate step {self.step}")
        if loss is None:
            return {}
        return {EVAL_LOSS: loss}

    async def _evaluate(self, name: str) -> float | None:
        """Return the mean negative log-likelihood of the held-out assistant's tokens, in nats; None without any."""
        held_out = self._held_out
        nats = 0.0
        tokens = 0
        if held_out is None:
            return None
        for start in range(0, len(held_out), self.config.batch_size):
            # Half an evaluation says nothing; the run ends with what it has.
            if self.is_interrupted:
                return None
            # In batches as large as those of training, which fit into memory.
            places = range(start, min(start + self.config.batch_size, len(held_out)))
            samples = await asyncio.wrap_future(self._read(held_out, places))
            found_nats, found_tokens = await self.complete(compute(self.context.learner.sum_logprobs, samples))
            nats = nats + found_nats
            tokens = tokens + found_tokens
        # Weighted by tokens: batches differ in length.
        loss = -nats / max(1, tokens)
        logger.info(f"{name}: loss {loss:.4f}, perplexity {math.exp(min(loss, 99)):.3f}, {tokens} tokens")
        return loss

    async def finish_step(
        self, samples: Sequence[TrainingSample], stats: StepStats, evaluated: Mapping[str, float], clock: StepClock
    ) -> None:
        """Log and print the step; begin a checkpoint where one is due."""
        size = len(self.train)
        train_s = clock.seconds["train_s"]
        metrics = {
            **step_metrics(stats),
            "epoch": num_taken(self.config, size, self.step) / size,
            "train_s": train_s,
            "train_tokens_per_s": sum(len(s.ids_T) for s in samples) / train_s,
            **evaluated,
        }
        try:
            metrics |= self.callbacks.on_step_end(self.step, {"step": self.step, **metrics})
            self._tell(evaluated.get(EVAL_LOSS))
        finally:
            row = self.log.write(self.step, metrics)
            await self.end_step()
        # Of this process alone: another machine may have taken the steps before.
        num_done = self.step - self._resumed_at
        left_s = (time.perf_counter() - self._begun) / num_done * (self.num_steps - self.step)
        logger.info(
            f"step {self.step:>3}/{self.num_steps}  loss {row['loss']:.4f}  lr {row['lr']:.1e}  "
            f"grad {row['grad_norm']:.2f}  {row['num_tokens']:.0f} tokens learnt  "
            f"{row['train_tokens_per_s']:.0f} tokens/s  train {row['train_s']:.1f}s  ETA {left_s:.0f}s"
        )

        if stats.num_skipped:
            logger.warning(f"step {self.step} made no update: {LIKELIHOOD_NOT_FINITE}")

    def state_now(self) -> SftState:
        """Return where the run stands now, with all files on disk up to here."""
        return SftState(self.step, self.log.size(), self.seconds, self.loss_before)

    def summary(self) -> Mapping[str, Any]:
        """Return what was learned from, and the losses."""
        rows = self.log.rows
        left_out = self.train.left_out
        return {
            "seed": self.config.seed,
            "num_conversations": len(self.train),
            "num_tokens": self.train.num_tokens,
            "num_tokens_taught": self.train.num_taught,
            "num_left_out": left_out.count,
            "left_out": dict(left_out.by_rule),
            "loss_first": rows[0]["loss"] if rows else None,
            "loss_last": rows[-1]["loss"] if rows else None,
            "eval_loss_before": self.loss_before,
            "eval_loss_after": self.loss_after,
        }

    def save_model(self) -> None:
        """Write the weights as a Hugging Face folder, with its card."""
        save_model(self.context.learner, self.context.data.renderer, self.folder / MODEL)
        write_card(self.card(), self.folder / MODEL)

    def card(self) -> ModelCard:
        """Return what the model card says."""
        config = self.config
        rows = self.log.rows
        return ModelCard(
            name=self.folder.name,
            task=f"supervised fine-tuning on {len(self.train)} conversations",
            tags=("supervised-fine-tuning",),
            base_model=config.model.model,
            data=tuple(filter(None, (config.data.data or config.env, config.data.eval_data))),
            step=len(rows),
            ending=ending_of(len(rows), self.num_steps, self.stopped_by, self.is_interrupted),
            tables=(),
            sees_images=self.context.data.renderer.images is not None,
        )

    async def close(self) -> None:
        """Stop reading."""
        self._reader.shutdown(cancel_futures=True)


def num_taken(config: SftConfig, size: int, step: int) -> int:
    """Return how many conversations were taken after a step, of `size` that there are: the last batch may be short."""
    if config.steps:
        return step * config.batch_size
    # Whole epochs: every conversation is taken equally often.
    return min(step * config.batch_size, config.epochs * size)


def step_places(config: SftConfig, size: int, step: int) -> list[int]:
    """Return which of `size` conversations a step takes: a seeded order of all, epoch after epoch; none after the last.

    Example: of 10 conversations with a batch of 4, step 3 takes the last two of the first epoch and two of the second.
    """
    # Numbered without end, so that a step depends on nothing but its number.
    numbers = range((step - 1) * config.batch_size, num_taken(config, size, step))
    # A batch may begin in one epoch and end in the next.
    orders = {epoch: epoch_order(size, config.seed, epoch) for epoch in {number // size for number in numbers}}
    return [orders[number // size][number % size] for number in numbers]


def step_metrics(stats: StepStats) -> dict[str, float]:
    """Return the numbers of a step, without those that compare with a rollout: there was none."""
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "entropy": stats.entropy,
        "num_tokens": stats.num_tokens,
        "num_skipped": stats.num_skipped,
    }
