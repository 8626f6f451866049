"""The training loop: prepared parts in, better weights, metrics, recordings and a summary out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, fields
from typing import Any

from agents.recording import Recorder
from agents.rollout import Problem, RolloutManager, RolloutOptions, StepRollout, derive_seed
from agents.types import EndReason, Trajectory
from envs.data import epoch_order
from envs.runner import last_line
from trainer.batching import split_evenly, training_samples, trajectory_advantages
from trainer.display import Display
from trainer.evaluate import Evaluation, evaluate
from trainer.metrics import MetricsLog, draw_curve, rollout_metrics
from trainer.setup import RunParts, check_command
from trainer.trainer import LearnerLost
from trainer.types import TrainingSample

#: The two ways a policy is evaluated, and their names in tables and summary.
WITH_TOOL, WITHOUT_TOOL = "with_tool", "without_tool"
MAX_FAULTS_SHOWN = 10


class InvalidStreams(RuntimeError):
    """More episodes broke the token stream than a run may have; the message holds the first one's rule and tokens."""


class TrainingLoop:
    """Runs a prepared run from its first evaluation to its summary.

    Example::

        summary = asyncio.run(TrainingLoop(prepare(config), Display()).run())
        summary["accuracy_after"]["with_tool"]
    """

    def __init__(self, parts: RunParts, display: Display) -> None:
        self.parts, self.config, self.display = parts, parts.config, display
        dumped = {**parts.config.model_dump(mode="json"), "registry_entry": parts.spec.model_dump(mode="json")}
        (parts.folder / "config.json").write_text(json.dumps(dumped, indent=1) + "\n", encoding="utf-8")
        self.log = MetricsLog(parts.folder, dumped, parts.config.log.tensorboard)
        self.recorder = Recorder(parts.folder / "episodes", parts.config.env.env) if parts.config.log.record else None
        self.before: dict[str, Evaluation] = {}
        self.after: dict[str, Evaluation] = {}
        self.ends: Counter[str] = Counter()
        self.faults: set[str] = set()
        self.num_events = 0
        self.group_fates: Counter[str] = Counter()
        self.unused_groups: Counter[str] = Counter()
        self._order: tuple[int, list[int]] = (-1, [])  # an epoch, and the order of its problems
        self.started = time.perf_counter()

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; on Ctrl-C or SIGTERM save and stop. Returns the summary, which is also on disk."""
        interrupted, is_lost, parts = False, False, self.parts
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # elsewhere than in the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await parts.sync.start()
            self.before = await self._evaluate("evaluate before")
            await self._train()
            self.after = await self._evaluate("evaluate after")
        except asyncio.CancelledError:
            interrupted = True
            self.display.say("interrupted: saving what there is")
        except LearnerLost:
            is_lost = True
            raise
        finally:
            try:
                summary = self._finish(interrupted, has_weights=not is_lost)
            finally:
                try:
                    await parts.engine.close()
                finally:
                    parts.close()
        return summary

    async def _train(self) -> None:
        """Take all steps; what is still being played then, or when a step fails, is recorded as aborted."""
        config, parts = self.config, self.parts
        names = {field.name for field in fields(RolloutOptions)}
        manager = RolloutManager(
            parts.episode(parts.spec.max_turns, config.rollout.temperature),
            parts.build_env,
            parts.env_args(parts.spec.max_turns),
            self._problem,
            RolloutOptions(**config.rollout.model_dump(include=names)),
            on_episode=self._report_fault,
        )
        self.display.begin("train", config.steps)
        step = 0
        try:
            for step in range(1, config.steps + 1):
                await self._step(manager, step)
                self.display.advance()
        finally:
            self._record(StepRollout((), aborted=await manager.close()), step)

    async def _step(self, manager: RolloutManager, step: int) -> None:
        """Roll out, train, sync, log."""
        config, parts = self.config, self.parts
        started = time.perf_counter()
        rollout = await manager.collect(config.rollout.problems_per_step)
        played = time.perf_counter()
        self._record(rollout, step)
        self._check_streams(rollout)
        version = parts.engine.weight_version
        minibatches = self._minibatches(rollout)
        train_started = time.perf_counter()
        stats = await asyncio.to_thread(parts.learner.step, minibatches)
        train_s = time.perf_counter() - train_started
        sync_s, probe = await parts.sync.push(version=step)
        metrics = rollout_metrics(rollout, parts.spec.max_turns, version, played - started)
        metrics |= {"rollout_s": played - started, "train_s": train_s, "sync_s": sync_s}
        # Streams whole, though a prompt that several share is read once.
        metrics["train_tokens_per_s"] = sum(len(s.ids_T) for samples in minibatches for s in samples) / train_s
        if probe:
            metrics |= {f"probe_{name}": value for name, value in asdict(probe).items() if value is not None}
        if parts.renderer.images:
            metrics |= {f"images/{name}": value for name, value in asdict(parts.renderer.images.stats()).items()}
        num_tokens = sum(t.num_model_tokens for t in rollout.played)
        metrics["tokens_per_s"] = num_tokens / (time.perf_counter() - started)
        row = self.log.write(step, metrics, stats)
        self.display.step(row, config.steps)
        self._report_servers()
        if rollout.shortfall:
            self.display.say(rollout.shortfall)
        elif all(group.is_dropped for group in rollout.groups):
            self.display.say(f"nothing to learn from: no group has two valid episodes; see {check_command(config)}")

    def _minibatches(self, rollout: StepRollout) -> list[list[TrainingSample]]:
        """Return the samples of each update of a pass over the step's groups."""
        facts, config, count = self.parts.facts, self.config, self.config.optim.minibatches
        advantages = split_evenly(trajectory_advantages(rollout.groups, config.algorithm), count)
        return [
            training_samples(*part, facts.image_token_id, facts.merge_size, config.algorithm, config.env.max_new_tokens)
            for part in zip(split_evenly(rollout.groups, count), advantages, strict=True)
        ]

    def _problem(self, number: int) -> Problem:
        """Return the problem of a number: a seeded order of all, epoch after epoch.

        Its seed is that of the step which takes it when every step takes as many as it is to train on.
        """
        samples = self.parts.train_samples
        epoch, place = divmod(number, len(samples))
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(len(samples), self.config.seed, epoch)
        step, index = divmod(number, self.config.rollout.problems_per_step)
        return Problem(samples[self._order[1][place]], derive_seed(self.config.seed, "train", step + 1), index)

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

    def _report_fault(self, trajectory: Trajectory) -> None:
        """Say what broke an episode, the first time that it happens; the recording has every traceback in full."""
        if trajectory.end_reason.is_valid or trajectory.error is None:
            return
        line = last_line(trajectory.error)
        if line not in self.faults and len(self.faults) < MAX_FAULTS_SHOWN:
            self.faults.add(line)
            self.display.say(f"{trajectory.end_reason.value} in {trajectory.sample_id}: {line:.300}")

    def _report_servers(self) -> None:
        """Say what has happened to servers since the last time: lost, back, turns given up."""
        events = self.parts.sync.carrier.events
        for event in events[self.num_events :]:
            self.display.say(event)
        self.num_events = len(events)

    def _record(self, rollout: StepRollout, step: int) -> None:
        self.ends.update(t.end_reason.value for t in rollout.played)
        self.group_fates.update(fate for group in rollout.groups for fate in group.fates)
        self.unused_groups.update({fate: len(groups) for fate, groups in rollout.unused.items() if groups})
        if self.recorder is None:
            return
        advantages = trajectory_advantages(rollout.groups, self.config.algorithm)
        for group, own in zip(rollout.groups, advantages, strict=True):
            for t in group.discarded:
                self.recorder.write(t, step, "discarded")
            for t, advantage in zip(group.trajectories, own, strict=True):
                self.recorder.write(t, step, "train", advantage)
        for fate, groups in rollout.unused.items():
            for t in (t for group in groups for t in (*group.discarded, *group.trajectories)):
                self.recorder.write(t, step, fate)

    async def _evaluate(self, name: str) -> dict[str, Evaluation]:
        """Return accuracy on the held-out problems: over all turns and, where there are tools, without them in one."""
        source = self.parts.eval_samples
        if source is None:
            return {}
        samples = [source[index] for index in range(len(source))]
        ways = [(WITH_TOOL, self.parts.spec.max_turns, True), (WITHOUT_TOOL, 1, False)]
        ways = ways if self.parts.has_tools else ways[:1]
        self.display.begin(name, len(ways) * len(samples))
        seed = derive_seed(self.config.seed, "evaluate")
        results = {}
        for key, turns, tools in ways:
            results[key] = await evaluate(
                self.parts.episode(turns, self.config.rollout.eval_temperature, tools),
                samples,
                self.parts.build_env,
                self.parts.env_args(turns),
                seed,
                on_episode=self._on_evaluated,
                right_reward=self.parts.spec.reward_max_val,
                max_concurrent=self.config.rollout.max_concurrent,
            )
            self.display.say(f"{name}: {results[key].accuracy:.3f} {key.replace('_', ' ')}")
        return results

    def _on_evaluated(self, trajectory: Trajectory) -> None:
        self.display.advance()
        self._report_fault(trajectory)

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
            "accuracy_before": {name: e.accuracy for name, e in self.before.items()},
            "accuracy_after": {name: e.accuracy for name, e in self.after.items()},
            "evaluation_before": {name: asdict(e) for name, e in self.before.items()},
            "evaluation_after": {name: asdict(e) for name, e in self.after.items()},
            "max_rollout_train_kl": max((row["rollout_train_kl"] for row in rows), default=None),
            "end_reasons": dict(self.ends),
            "groups": dict(self.group_fates),
            "unused_groups": dict(self.unused_groups),
            "num_overlong": self.parts.num_overlong,
            "reward_first": rows[0]["reward"] if rows else None,
            "reward_last": rows[-1]["reward"] if rows else None,
        }
        try:
            (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            before, after = (e[WITH_TOOL].accuracy if e else None for e in (self.before, self.after))
            title = f"{self.config.env.env}, seed {self.config.seed}"
            draw_curve(rows, before, after, folder / "reward_curve.png", title)
        finally:
            self.log.close()
            if self.recorder:
                self.recorder.close()
        if has_weights:
            self.parts.save_model(folder / "model")
        return summary


def peak_memory_gib() -> float:
    """Return this process's largest resident size so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
