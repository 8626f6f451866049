"""The loop of supervised training: prepared parts in; a better model, metrics, checkpoints and a summary out."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents.appended import rewind
from envs.data import epoch_order
from trainer.checkpoint import Checkpoint, Checkpoints
from trainer.display import Display
from trainer.folder import CHECKPOINTS, METRICS, MODEL
from trainer.loop import peak_memory_gib
from trainer.metrics import MetricsLog
from trainer.parts import save_model
from trainer.supervised.config import SftConfig
from trainer.supervised.setup import SftParts
from trainer.trainer import LearnerLost
from trainer.types import StepStats, TrainingSample

PROGRESS = "progress.json"


@dataclass(frozen=True)
class SftProgress:
    """Where a run stands after `step`; which conversations come next follows from that.

    `metrics_bytes` is the length of the metrics by then, `seconds` the time spent so far, `loss_before` the loss on
    held-out conversations before the first step, where there are any.
    """

    step: int = 0
    metrics_bytes: int = 0
    seconds: float = 0.0
    loss_before: float | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint | None) -> SftProgress:
        """Return what a checkpoint holds; without one, the start of a run."""
        return cls(**json.loads(checkpoint.read(PROGRESS))) if checkpoint else cls()

    def files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint."""
        return {PROGRESS: json.dumps(asdict(self)).encode()}


class SftLoop:
    """Runs a prepared run to its summary.

    Example::

        summary = SftLoop(prepare(config, load_material(config), print), Display()).run()
        summary["loss_first"], summary["loss_last"]
    """

    def __init__(self, parts: SftParts, display: Display) -> None:
        self.parts, self.config, self.display = parts, parts.config, display
        self.train, self.evaluation = parts.material.train, parts.material.evaluation
        self.progress = SftProgress.read(parts.checkpoint)
        rewind(parts.folder / METRICS, self.progress.metrics_bytes)
        log, described = self.config.log, self.config.model_dump(mode="json")
        self.log = MetricsLog(parts.folder, described, log.tracker, log.project, self.progress.step, report=display.say)
        self.checkpoints = Checkpoints(parts.folder / CHECKPOINTS, parts.learner, self.config.checkpoint, display.say)
        self.loss_after: float | None = None
        self.is_stopping = False
        self.started = time.perf_counter() - self.progress.seconds
        # All conversations are read by this one thread: neither renderer nor image store is made for several.
        self._reader = ThreadPoolExecutor(1)

    def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; on Ctrl-C or SIGTERM finish the step at hand. Returns the summary."""
        is_lost = False
        try:
            with self._signals():
                if not self.progress.step:
                    self.progress = self._boundary(0, self._evaluate("evaluate before"))
                self._train()
                if not self.is_stopping:
                    self.loss_after = self._evaluate("evaluate after")
        except LearnerLost:
            is_lost = True
            raise
        finally:
            self._reader.shutdown(cancel_futures=True)
            try:
                summary = self._finish(has_weights=not is_lost)
            finally:
                self.parts.cleanup.close()
        return summary

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Note the first Ctrl-C or SIGTERM and let the step end; a second one ends the command."""
        before: dict[int, Any] = {}

        def stop(number: int, _: object) -> None:
            self.is_stopping = True
            signal.signal(number, before[number])
            self.display.say("interrupted: finishing the step, then saving what there is")

        with contextlib.suppress(ValueError):  # elsewhere than in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.getsignal(number)
                signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _train(self) -> None:
        first, last = self.progress.step + 1, self.parts.num_steps
        self.display.begin("train", last - first + 1)
        started, coming = time.perf_counter(), self._read(first)
        for step in range(first, last + 1):
            if self.is_stopping:
                return
            samples = coming.result()
            coming = self._read(step + 1)  # while the learner is busy
            row = self._step(step, samples)
            self._say_step(row, left_s=(time.perf_counter() - started) / (step - first + 1) * (last - step))
            self.display.advance()

    def _read(self, step: int) -> Future[list[TrainingSample]]:
        places = step_places(self.config, len(self.train), step)
        return self._reader.submit(self.train.samples, places)

    def _step(self, step: int, samples: Sequence[TrainingSample]) -> Mapping[str, float]:
        """Train, log, keep; return the row of metrics."""
        started = time.perf_counter()
        self.checkpoints.leave()
        stats = self.parts.learner.step([samples])
        train_s = time.perf_counter() - started
        metrics = {
            **step_metrics(stats),
            "epoch": num_taken(self.config, len(self.train), step) / len(self.train),
            "train_s": train_s,
            "train_tokens_per_s": sum(len(s.ids_T) for s in samples) / train_s,
        }
        every = self.config.eval_every
        if every and step % every == 0 and step < self.parts.num_steps:
            loss = self._evaluate(f"evaluate step {step}")
            metrics |= {} if loss is None else {"eval_loss": loss}
        row = self.log.write(step, metrics)
        self.progress = self._boundary(step, self.progress.loss_before)
        self.checkpoints.arrive(step, self.progress.files, is_last=step == self.parts.num_steps)
        return row

    def _say_step(self, row: Mapping[str, float], left_s: float) -> None:
        self.display.say(
            f"step {row['step']:>3.0f}/{self.parts.num_steps}  loss {row['loss']:.4f}  lr {row['lr']:.1e}  "
            f"grad {row['grad_norm']:.2f}  {row['num_tokens']:.0f} tokens learnt  "
            f"{row['train_tokens_per_s']:.0f} tokens/s  train {row['train_s']:.1f}s  ETA {left_s:.0f}s"
        )

    def _boundary(self, step: int, loss_before: float | None) -> SftProgress:
        return SftProgress(step, self.log.size(), time.perf_counter() - self.started, loss_before)

    def _evaluate(self, name: str) -> float | None:
        """Return the mean negative log-likelihood of the held-out assistant's tokens, in nats; None without any."""
        held_out, nats, tokens = self.evaluation, 0.0, 0
        if held_out is None:
            return None
        for start in range(0, len(held_out), self.config.batch_size):
            if self.is_stopping:
                return None
            places = range(start, min(start + self.config.batch_size, len(held_out)))
            samples = self._reader.submit(held_out.samples, places).result()
            found_nats, found_tokens = self.parts.learner.likelihood(samples)
            nats, tokens = nats + found_nats, tokens + found_tokens
        loss = -nats / max(1, tokens)
        self.display.say(f"{name}: loss {loss:.4f}, perplexity {math.exp(min(loss, 99)):.3f}, {tokens} tokens")
        return loss

    def _finish(self, has_weights: bool) -> dict[str, Any]:
        """Write summary and curve, close all files, write the weights: last, for nothing else is lost if that fails."""
        folder, rows = self.parts.folder, self.log.rows
        left_out = self.train.left_out
        summary = {
            "seed": self.config.seed,
            "steps_done": len(rows),
            "interrupted": self.is_stopping,
            "seconds": round(time.perf_counter() - self.started, 1),
            "peak_memory_gib": round(peak_memory_gib(), 3),
            "num_conversations": len(self.train),
            "num_tokens": self.train.num_tokens,
            "num_tokens_taught": self.train.num_taught,
            "num_left_out": left_out.count,
            "left_out": dict(left_out.by_rule),
            "loss_first": rows[0]["loss"] if rows else None,
            "loss_last": rows[-1]["loss"] if rows else None,
            "eval_loss_before": self.progress.loss_before,
            "eval_loss_after": self.loss_after,
        }
        try:
            (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            draw_losses(rows, self.progress.loss_before, self.loss_after, folder / "loss_curve.png")
        finally:
            self.log.close()
        if has_weights:
            self.checkpoints.close()
            save_model(self.parts.learner, self.parts.material.renderer, folder / MODEL)
        return summary


def num_taken(config: SftConfig, size: int, step: int) -> int:
    """Return how many conversations were taken after a step, of `size` that there are: the last batch may be short."""
    return step * config.batch_size if config.steps else min(step * config.batch_size, config.epochs * size)


def step_places(config: SftConfig, size: int, step: int) -> list[int]:
    """Return which of `size` conversations a step takes: a seeded order of all, epoch after epoch; none after the last.

    Example: of 10 conversations with a batch of 4, step 3 takes the last two of the first epoch and two of the second.
    """
    numbers = range((step - 1) * config.batch_size, num_taken(config, size, step))
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


def draw_losses(rows: Sequence[Mapping[str, float]], before: float | None, after: float | None, path: Path) -> None:
    """Draw the loss over the steps, with that on held-out conversations where it is known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label="training loss")
    held_out = [(0.0, before), *((row["step"], row.get("eval_loss")) for row in rows), (float(len(rows)), after)]
    known = [(step, loss) for step, loss in held_out if loss is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "o--", color="C2", label="held-out loss")
    axes.set(xlabel="step", ylabel="nats per token of the assistant")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
