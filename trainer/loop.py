"""The training loop: prepared parts in, better weights, metrics, recordings and a summary out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from agents.appended import rewind
from agents.recording.recorder import rewind_recording
from agents.recording.schema import TRAIN
from agents.rollout import ManagerState, StepRollout, derive_seed
from agents.types import EndReason, Trajectory
from trainer.batching import split_evenly, training_samples, trajectory_advantages
from trainer.checkpoint import Checkpoints
from trainer.config import CheckpointConfig
from trainer.display import Display
from trainer.evaluation import WITH_TOOL
from trainer.figures import Evaluation
from trainer.folder import CHECKPOINTS, EPISODES, METRICS, MODEL
from trainer.interrupt import cancel_on_sigterm
from trainer.metrics import MetricsLog, draw_curve, rollout_metrics
from trainer.parts import Parts
from trainer.progress import Progress, read_progress, seed_random
from trainer.setup import check_command
from trainer.sides import Rollouts, RolloutSide
from trainer.trainer import LearnerLost
from trainer.types import StepStats, TrainingSample

KL = "rollout_train_kl"


class InvalidStreams(RuntimeError):
    """More episodes broke the token stream than a run may have; the message holds the first one's rule and tokens."""


class TrainingLoop:
    """Runs a prepared run from its first evaluation to its summary.

    Example::

        parts = prepare(config)
        summary = asyncio.run(TrainingLoop(parts, Playing(parts), Display()).run())
        summary["accuracy_after"]["with_tool"]
    """

    def __init__(self, parts: Parts, side: RolloutSide, display: Display) -> None:
        self.parts, self.side, self.config, self.display = parts, side, parts.config, display
        self.trains = parts.config.trains
        self.progress = self._take_up()
        log = parts.config.log
        self.log = MetricsLog(
            parts.folder, _described(parts), log.tracker, log.project, self.progress.step, report=display.say
        )
        self.recorder = parts.recorder()
        kept = parts.config.checkpoint if self.trains else CheckpointConfig(save_every=0)
        self.checkpoints = Checkpoints(parts.folder / CHECKPOINTS, parts.learner, kept, display.say)
        self.before: dict[str, Evaluation] = dict(self.progress.before)
        self.after: dict[str, Evaluation] = {}
        self.ends = Counter(self.progress.ends)
        self.faults = set(self.progress.faults)
        self.group_fates = Counter(self.progress.group_fates)
        self.unused_groups = Counter(self.progress.unused_groups)
        self.step, self.recorded_s = self.progress.step, 0.0  # the one at hand; spent on recording until the last one
        self.started = time.perf_counter() - self.progress.seconds

    def _take_up(self) -> Progress:
        """Return where the run stands: at its start, or at a checkpoint, its files taken back to that."""
        checkpoint, folder = self.parts.checkpoint, self.parts.folder
        seed_random(derive_seed(self.config.seed, "generators"))
        progress = read_progress(checkpoint) if checkpoint else Progress()
        rewind(folder / METRICS, progress.metrics_bytes)
        for name in rewind_recording(folder / EPISODES, progress.recorded_bytes):
            self.display.say(f"{folder / EPISODES / name} is shorter than it was: some of earlier steps is gone")
        return progress

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; on Ctrl-C or SIGTERM save and stop. Returns the summary, which is also on disk."""
        interrupted, is_lost, start = False, False, self.progress.step
        cancel_on_sigterm()
        try:
            await self.side.start(start)
            if not start:
                self.before = await self.side.evaluate("before", self.display, self._on_evaluated)
                self.recorded_s = self.recorder.seconds if self.recorder else 0.0
                self.progress = self._boundary(0, ManagerState())
            await self._train()
            self.after = await self.side.evaluate("after", self.display, self._on_evaluated)
        except asyncio.CancelledError:
            interrupted = True
            self.display.say("interrupted: saving what there is")
        except LearnerLost:
            is_lost = True
            raise
        finally:
            try:
                summary = self._finish(interrupted, has_weights=self.trains and not is_lost)
            finally:
                try:
                    await self.side.close()
                finally:
                    self.parts.close()
        return summary

    async def _train(self) -> None:
        """Take all steps; what is still being played then, or when a step fails, is recorded as aborted."""
        rollouts = self.side.rollouts(self._on_played, self.progress.rollout)
        first = step = self.progress.step
        self.display.begin("train" if self.trains else "play", self.config.steps - first)
        try:
            for step in range(first + 1, self.config.steps + 1):
                await self._step(rollouts, step)
                self.display.advance()
        finally:
            self._take(StepRollout((), aborted=await rollouts.close()), step)

    async def _step(self, rollouts: Rollouts, step: int) -> None:
        """Roll out, then learn. Who interrupts the learning waits for its end, so that the run stands between steps."""
        self.step = step
        started = time.perf_counter()
        rollout = await rollouts.collect(self.config.rollout.problems_per_step)
        rollout_s = time.perf_counter() - started
        self._take(rollout, step)
        self._check_streams(rollout)
        learning = asyncio.ensure_future(self._learn(rollout, step, rollout_s))
        try:
            await asyncio.shield(learning)
        except asyncio.CancelledError:
            while not learning.done():  # however often it is asked to stop
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(learning)
            learning.result()
            raise
        finally:
            if learning.done() and not learning.cancelled() and learning.exception() is None:
                self._keep(step, rollouts.state())

    async def _learn(self, rollout: StepRollout, step: int, rollout_s: float) -> None:
        """Train and sync, where anything is trained; log."""
        config, images, started = self.config, self.parts.renderer.images, time.perf_counter()
        version = self.side.weight_version
        stats, trained = await self._train_on(rollout, step) if self.trains else (None, {})
        metrics = rollout_metrics(rollout, self.parts.spec.max_turns, version, rollout_s)
        metrics |= {"rollout_s": rollout_s, **trained}
        if self.recorder:  # most of it within rollout_s
            metrics["record_s"] = self.recorder.seconds - self.recorded_s
            self.recorded_s = self.recorder.seconds
        if images:
            metrics |= {f"images/{name}": value for name, value in asdict(images.stats()).items()}
        num_tokens = sum(t.num_model_tokens for t in rollout.played)
        metrics["tokens_per_s"] = num_tokens / (rollout_s + time.perf_counter() - started)
        row = self.log.write(step, metrics, stats)
        self.display.step(row, config.steps)
        self.display.events(self.side.events)
        if rollout.shortfall:
            self.display.say(rollout.shortfall)
        elif all(group.is_dropped for group in rollout.groups):
            see = check_command(config.env, config.data)
            self.display.say(f"nothing to learn from: no group has two valid episodes; see {see}")

    async def _train_on(self, rollout: StepRollout, step: int) -> tuple[StepStats, dict[str, float]]:
        """Train and sync; return what the learner saw, and how long it took."""
        self.checkpoints.leave()
        minibatches = self._minibatches(rollout)
        started = time.perf_counter()
        stats = await asyncio.to_thread(self.parts.learner.step, minibatches)
        train_s = time.perf_counter() - started
        self._record_scores(rollout, stats, step)
        sync_s, probe = await self.side.push(version=step)
        # Streams whole, though a prompt that several share is read once.
        num_tokens = sum(len(sample.ids_T) for samples in minibatches for sample in samples)
        metrics = {"train_s": train_s, "sync_s": sync_s, "train_tokens_per_s": num_tokens / train_s}
        if probe:
            metrics |= {f"probe_{name}": value for name, value in asdict(probe).items() if value is not None}
        return stats, metrics

    def _boundary(self, step: int, rollout: ManagerState) -> Progress:
        """Return where the run stands after a step, its files on disk up to there."""
        return Progress(
            step=step,
            metrics_bytes=self.log.size(),
            recorded_bytes=self.recorder.sizes() if self.recorder else self.progress.recorded_bytes,
            seconds=time.perf_counter() - self.started,
            before=self.before,
            ends=dict(self.ends),
            faults=tuple(sorted(self.faults)),
            group_fates=dict(self.group_fates),
            unused_groups=dict(self.unused_groups),
            rollout=rollout,
        )

    def _keep(self, step: int, rollout: ManagerState) -> None:
        """Note where the run stands after a step."""
        self.progress = self._boundary(step, rollout)
        self.checkpoints.arrive(step, self.progress.files, is_last=step == self.config.steps)

    def _minibatches(self, rollout: StepRollout) -> list[list[TrainingSample]]:
        """Return the samples of each update of a pass over the step's groups."""
        facts, config, count = self.parts.facts, self.config, self.config.optim.minibatches
        advantages = split_evenly(trajectory_advantages(rollout.groups, config.algorithm), count)
        return [
            training_samples(*part, facts.image_token_id, facts.merge_size, config.algorithm, config.env.max_new_tokens)
            for part in zip(split_evenly(rollout.groups, count), advantages, strict=True)
        ]

    def _check_streams(self, rollout: StepRollout) -> None:
        """Raise where too many episodes broke the token stream: engine, template or our own code is wrong then."""
        broken = [t for t in rollout.played if t.end_reason is EndReason.INVALID_STREAM]
        most = self.config.rollout.max_invalid_frac
        if len(broken) > most * len(rollout.played):
            first = broken[0]
            raise InvalidStreams(
                f"{len(broken)} of {len(rollout.played)} episodes broke the token stream, over --max-invalid-frac "
                f"{most:g}; episode {first.sample_index} of {first.sample_id}: {first.error}"
            )

    def _on_played(self, trajectory: Trajectory) -> None:
        """Record an episode as it ends, and say what broke it, the first time that it happens."""
        if self.recorder:
            self.recorder.write(trajectory, self.step)
        self.display.fault(trajectory, self.faults)

    def _take(self, rollout: StepRollout, step: int) -> None:
        """Count what a step has ended, and record what becomes of it."""
        self.ends.update(t.end_reason.value for t in rollout.played)
        self.group_fates.update(fate for group in rollout.groups for fate in group.fates)
        self.unused_groups.update({fate: len(groups) for fate, groups in rollout.unused.items() if groups})
        if self.recorder is None:
            return
        advantages = trajectory_advantages(rollout.groups, self.config.algorithm)
        for group, own in zip(rollout.groups, advantages, strict=True):
            for t in group.discarded:
                self.recorder.take(t, step, "discarded")
            for t, advantage in zip(group.trajectories, own, strict=True):
                self.recorder.take(t, step, TRAIN, advantage)
        for fate, groups in rollout.unused.items():
            for t in (t for group in groups for t in (*group.discarded, *group.trajectories)):
                self.recorder.take(t, step, fate)

    def _record_scores(self, rollout: StepRollout, stats: StepStats, step: int) -> None:
        if self.recorder is None:
            return
        for t in (t for group in rollout.groups for t in group.trajectories if t.key in stats.logprobs):
            self.recorder.score(t, step, stats.logprobs[t.key])

    def _on_evaluated(self, phase: str, way: str, trajectory: Trajectory) -> None:
        self.display.advance()
        if self.recorder:
            self.recorder.write(trajectory, self.step, phase, way)
        self.display.fault(trajectory, self.faults)

    def _finish(self, interrupted: bool, has_weights: bool) -> dict[str, Any]:
        """Write summary and curve, close all files, write the weights: last, for nothing else is lost if that fails."""
        folder, rows = self.parts.folder, self.log.rows
        summary = {
            "env": self.config.env.env,
            "seed": self.config.seed,
            "steps_done": len(rows),
            "interrupted": interrupted,
            "seconds": round(time.perf_counter() - self.started, 1),
            "peak_memory_gib": round(peak_memory_gib(), 3),
            "accuracy_before": {name: e.accuracy.value for name, e in self.before.items()},
            "accuracy_after": {name: e.accuracy.value for name, e in self.after.items()},
            "interval_before": {name: [e.accuracy.low, e.accuracy.high] for name, e in self.before.items()},
            "interval_after": {name: [e.accuracy.low, e.accuracy.high] for name, e in self.after.items()},
            "evaluation_before": {name: asdict(e) for name, e in self.before.items()},
            "evaluation_after": {name: asdict(e) for name, e in self.after.items()},
            "max_rollout_train_kl": max((row[KL] for row in rows if KL in row), default=None),
            "end_reasons": dict(self.ends),
            "groups": dict(self.group_fates),
            "unused_groups": dict(self.unused_groups),
            "reward_first": rows[0]["reward"] if rows else None,
            "reward_last": rows[-1]["reward"] if rows else None,
            **self.side.summary(rows),
        }
        try:
            if has_weights:
                self.checkpoints.close()
            summary["checkpoints_failed"] = self.checkpoints.num_failed
            (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            before, after = (e[WITH_TOOL].accuracy.value if e else None for e in (self.before, self.after))
            title = f"{self.config.env.env}, seed {self.config.seed}"
            draw_curve(rows, before, after, folder / "reward_curve.png", title)
        finally:
            self.log.close()
            if self.recorder:
                self.recorder.close()
        if has_weights:
            self.parts.save_model(folder / MODEL)
        return summary


def _described(parts: Parts) -> dict[str, Any]:
    return {**parts.config.model_dump(mode="json"), "registry_entry": parts.spec.model_dump(mode="json")}


def peak_memory_gib() -> float:
    """Return this process's largest resident size so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
