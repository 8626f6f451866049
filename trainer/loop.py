"""The training loop: prepared parts in, better weights, metrics, recordings and a summary out."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from agents.recording import Recorder
from agents.rollout import derive_seed, rollout_groups
from agents.types import Trajectory, TrajectoryGroup
from envs.data import epoch_order
from envs.runner import last_line
from envs.types import Sample
from trainer.advantages import group_advantages
from trainer.batching import training_samples
from trainer.display import Display
from trainer.evaluate import Evaluation, evaluate
from trainer.metrics import MetricsLog, draw_curve, rollout_metrics
from trainer.setup import RunParts, check_command

#: The two ways a policy is evaluated, and their names in tables and summary.
WITH_TOOL, WITHOUT_TOOL = "with_tool", "without_tool"
MAX_FAULTS_SHOWN = 10


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
        self.group_fates: Counter[str] = Counter()
        self.started = time.perf_counter()

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; on Ctrl-C stop after what is saved. Returns the summary, which is also on disk."""
        interrupted = False
        try:
            self.before = await self._evaluate("evaluate before")
            self.display.begin("train", self.config.steps)
            for step in range(1, self.config.steps + 1):
                await self._step(step)
                self.display.advance()
            self.after = await self._evaluate("evaluate after")
        except asyncio.CancelledError:
            interrupted = True
            self.display.say("interrupted: saving what there is")
        finally:
            summary = self._finish(interrupted)
        return summary

    async def _step(self, step: int) -> None:
        """Roll out, train, sync, log."""
        config, parts = self.config, self.parts
        rollout_started = time.perf_counter()
        groups = await rollout_groups(
            parts.episode(parts.spec.max_turns, config.rollout.temperature),
            self._problems(step),
            parts.build_env,
            parts.env_args(parts.spec.max_turns),
            config.rollout.group_size,
            derive_seed(config.seed, "train", step),
            on_episode=self._report_fault,
            resample=config.rollout.resample,
        )
        train_started = time.perf_counter()
        model = parts.engine.model
        samples = training_samples(groups, model.image_token_id, model.merge_size, config.optim.scale_by_std)
        stats = await asyncio.to_thread(parts.learner.step, samples)
        parts.engine.load_weights(parts.learner.weights(), version=step)
        done = time.perf_counter()
        metrics = rollout_metrics(groups, parts.spec.max_turns)
        metrics["rollout_s"] = train_started - rollout_started
        metrics["train_s"] = done - train_started
        metrics["tokens_per_s"] = sum(t.num_model_tokens for g in groups for t in g.trajectories) / (
            done - rollout_started
        )
        row = self.log.write(step, metrics, stats)
        self._record(groups, step)
        self.display.step(row, config.steps)
        if all(group.is_dropped for group in groups):
            self.display.say(f"nothing to learn from: no group has two valid episodes; see {check_command(config)}")

    def _problems(self, step: int) -> list[Sample]:
        """Return the step's problems: a seeded order of all, epoch after epoch."""
        count, samples = self.config.rollout.problems_per_step, self.parts.train_samples
        chosen: list[Sample] = []
        order: list[int] = []
        for position in range((step - 1) * count, step * count):
            epoch, place = divmod(position, len(samples))
            if not order or place == 0:  # shuffled once a step, and again where an epoch ends in it
                order = epoch_order(len(samples), self.config.seed, epoch)
            chosen.append(samples[order[place]])
        return chosen

    def _report_fault(self, trajectory: Trajectory) -> None:
        """Say what broke an episode, the first time that it happens; the recording has every traceback in full."""
        if trajectory.end_reason.is_valid or trajectory.error is None:
            return
        line = last_line(trajectory.error)
        if line not in self.faults and len(self.faults) < MAX_FAULTS_SHOWN:
            self.faults.add(line)
            self.display.say(f"{trajectory.end_reason.value} in {trajectory.sample_id}: {line:.300}")

    def _record(self, groups: list[TrajectoryGroup], step: int) -> None:
        self.ends.update(t.end_reason.value for g in groups for t in (*g.discarded, *g.trajectories))
        self.group_fates.update(fate for g in groups for fate in g.fates)
        if self.recorder is None:
            return
        for group in groups:
            for t in group.discarded:
                self.recorder.write(t, step, "discarded")
            advantages = iter(group_advantages([t.reward for t in group.valid], self.config.optim.scale_by_std))
            for t in group.trajectories:
                self.recorder.write(t, step, "train", float(next(advantages)) if t.end_reason.is_valid else None)

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
            )
            self.display.say(f"{name}: {results[key].accuracy:.3f} {key.replace('_', ' ')}")
        return results

    def _on_evaluated(self, trajectory: Trajectory) -> None:
        self.display.advance()
        self._report_fault(trajectory)

    def _finish(self, interrupted: bool) -> dict[str, Any]:
        """Write weights, curve and summary; close all files."""
        folder, rows = self.parts.folder, self.log.rows
        self.parts.save_model(folder / "model")
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
            "num_overlong": self.parts.num_overlong,
            "reward_first": rows[0]["reward"] if rows else None,
            "reward_last": rows[-1]["reward"] if rows else None,
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        before, after = (e[WITH_TOOL].accuracy if e else None for e in (self.before, self.after))
        title = f"{self.config.env.env}, seed {self.config.seed}"
        draw_curve(rows, before, after, folder / "reward_curve.png", title)
        self.log.close()
        if self.recorder:
            self.recorder.close()
        return summary


def peak_memory_gib() -> float:
    """Return this process's largest resident size so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
