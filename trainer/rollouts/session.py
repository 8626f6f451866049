"""A reinforcement run between its stages: records episodes, counts how they ended, evaluates, logs and checkpoints."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any

import numpy as np

from agents.cli.text import counted
from agents.recording.recorder import rewind_recording
from agents.recording.schema import TRAIN
from agents.rollout.groups import StepRollout, derive_seed
from agents.types import EndReason, Trajectory, TrajectoryGroup
from envs.checking.error_location import located_line
from trainer.algorithms.advantages import Advantages
from trainer.checkpoint.model_card import ending_of, write_card
from trainer.checkpoint.run_dir import BEST, EPISODES, MODEL
from trainer.checkpoint.session import NOT_FINITE, RunSession
from trainer.config.run import CheckpointConfig
from trainer.evaluation.best_model import BEFORE, BestModel, resume_best
from trainer.evaluation.curve import (
    Curve,
    Ways,
    curve_summary,
    evaluation_metrics,
    figure_of,
    title,
    trained,
    values,
    why_stop,
)
from trainer.evaluation.results import Figure
from trainer.metrics.clock import StepClock
from trainer.metrics.console import Display
from trainer.metrics.curves import draw_rewards
from trainer.metrics.log import rollout_metrics
from trainer.rollouts.protocol import Rollouts
from trainer.rollouts.run_card import run_card
from trainer.rollouts.run_state import LoopState, kept_random_state, read_loop_state, seed_random
from trainer.setup.problems import check_command
from trainer.setup.run_context import RunContext
from trainer.types import RunFault, StepStats, TrainingSample
from trainer.weight_sync.transports import WeightPush

logger = logging.getLogger(__name__)

KL = "rollout_train_kl"
REWARD_CURVE = "reward_curve.png"
MAX_REWARDS_SHOWN = 4


class InvalidStreams(RunFault):
    """More episodes broke the token stream than a run may have; the message holds the first one's rule and tokens."""


class LostSteps(RunFault):
    """Nothing was learnt in several steps in a row, because of a fault; the message holds its cause."""


class TrainingSession(RunSession[LoopState]):
    """See `trainer.loop.run_training` for how it is used."""

    def __init__(self, context: RunContext, rollouts: Rollouts, display: Display) -> None:
        """Open the run's files where its checkpoint left them."""
        self.context, self.rollouts, self.config = context, rollouts, context.config
        config = context.config
        folder = context.folder
        # Before the state is read, which puts a resumed run's generators back.
        seed_random(derive_seed(config.seed, "generators"))
        if context.checkpoint:
            state = read_loop_state(context.checkpoint)
        else:
            state = LoopState()
        settings = {**config.model_dump(mode="json"), "registry_entry": context.spec.model_dump(mode="json")}
        if config.trains:
            kept = config.checkpoint
        else:
            # Nothing is trained, so there is nothing to go on from.
            kept = CheckpointConfig(save_every=0)
        super().__init__(folder, context.learner, state, config.steps, settings, config.log, kept, display)
        if state.unfinished_row:
            # The checkpoint was written before the evaluation, whose step still lacks its row.
            self.log.write(state.step, state.unfinished_row)
        # Steps after the checkpoint are taken again: their episodes would stand twice.
        for name in rewind_recording(folder / EPISODES, state.recorded_bytes):
            logger.warning(f"{folder / EPISODES / name} is shorter than it was: episodes of earlier steps are missing")
        self.stage = "train" if config.trains else "play"
        self.recorder = context.recorder()
        if self.recorder:
            self.open_files.callback(self.recorder.close)
            for note in self.recorder.notes:
                logger.warning(note)
        #: By step; the first is that of the policy at the start.
        self.evaluations: dict[int, Ways] = dict(state.evaluations)
        self.after: Ways = {}
        #: What the best step and patience go by.
        self.figure: Figure = figure_of(config.evaluation, context.spec)
        best = resume_best(folder, self.evaluations, state.step)
        # Another figure decides from now on: the next evaluation begins a new best model.
        is_kept = best is not None and best.figure == self.figure and config.evaluation.eval_every > 0
        self.best = best if is_kept else None
        self.ends = Counter(state.ends)
        self._faults = set(state.faults)
        self._group_outcomes = Counter(state.group_outcomes)
        self._unused_groups = Counter(state.unused_groups)
        self._recorded_s = 0.0  # spent on recording until the end of the last step

    @property
    def before(self) -> Ways:
        """The evaluation of the policy that the run started from; empty where there is none."""
        return self.evaluations.get(0, {})

    @property
    def curve(self) -> Curve:
        """All evaluations by step, the one at the end included."""
        return {**self.evaluations, **({self.step: self.after} if self.after else {})}

    @property
    def stop_reason(self) -> str:
        """The reason to end the run before its last step: what it has measured, or what a callback said."""
        return why_stop(self.evaluations, self.config.evaluation, self.figure) or super().stop_reason

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is left; say first how long the start took."""
        clock = self.context.start.clock
        is_first = True
        for step in super().steps():
            if is_first:
                logger.info(f"start: {clock.summary()}")
                clock.begin("the first step")
            is_first = False
            yield step

    @property
    def is_evaluated(self) -> bool:
        """Whether the policy is evaluated after the current step."""
        every = self.config.evaluation.eval_every
        return bool(every) and self.step % every == 0

    async def evaluate_before(self) -> None:
        """Evaluate the policy that the run starts from; a resumed run only what it has not finished evaluating."""
        self.display.events(self.rollouts.events)
        if self.state.step == 0:
            with self.context.start.clock.stage("the evaluation"):
                self.evaluations |= await self._evaluate("before", "evaluate before")
            self.state = self.state_now()
            self._tell(self.before)
        elif self.state.unfinished_row:
            await self.evaluate_in_step()

    async def evaluate_in_step(self) -> None:
        """Evaluate the policy after a step and end the step, where `finish_step` has left that to do."""
        if not self.is_evaluated:
            return
        clock = StepClock()
        evaluation = self._evaluate(f"eval-{self.step}", f"evaluate step {self.step}")
        # Or a run that evaluates more often would train on other problems.
        with kept_random_state():
            self.evaluations |= await clock.time("eval_s", evaluation)
        found = self.evaluations[self.step]
        self.log.add(evaluation_metrics(found) | clock.seconds)
        await self.end_step()
        self._tell(found)

    async def evaluate_after(self) -> None:
        """Evaluate the policy that the run ends with, unless its last step has done so."""
        if self.is_evaluated and self.step in self.evaluations:
            self.after = self.evaluations[self.step]
        else:
            self.after = (await self._evaluate("after", "evaluate after")).get(self.step, {})
            self._tell(self.after)

    async def _evaluate(self, phase: str, name: str) -> dict[int, Ways]:
        """Evaluate the policy; return the evaluation by its step, or nothing where there are no held-out problems."""

        def on_episode(way: str, trajectory: Trajectory) -> None:
            self.display.advance()
            if self.recorder:
                self.recorder.write(trajectory, self.step, phase, way)
            self.display.fault(trajectory, self._faults)

        found = await self.rollouts.evaluate(name, self.display, on_episode)
        if self.recorder:
            self._recorded_s = self.recorder.seconds
        if found and self.config.evaluation.eval_every:
            # In a thread, since gigabytes take long to write; not cut off by an interrupt.
            await self.complete(asyncio.to_thread(self._keep_best, found))
        if found:
            return {self.step: found}
        return {}

    def _keep_best(self, found: Ways) -> None:
        """Write the policy as the best one, if its figure is above that of all others."""
        best = self.best
        estimate = trained(found, self.figure)
        if estimate is None:
            return
        new = BestModel(self.step, next(iter(found)), self.figure, estimate.value)
        if best and (new == best or (new.step != best.step and new.value <= best.value)):
            return
        # Until a checkpoint knows the new best, a killed run needs the old one.
        is_known = best is not None and best.step <= (self.checkpoints.newest_step or 0)
        try:
            if is_known:
                aside = self.folder / BEFORE
            else:
                aside = None
            self.context.save_model(self.folder / BEST, new.files(), aside)
        except OSError as error:
            logger.warning(f"the best model so far, of step {self.step}, could not be written: {error}")
        else:
            self.best = new

    def _tell(self, found: Ways) -> None:
        if found:
            self.callbacks.on_evaluation(self.step, evaluation_metrics(found))

    def on_episode(self, trajectory: Trajectory) -> None:
        """Record an episode as it ends; print a fault the first time that it happens."""
        if self.recorder:
            self.recorder.write(trajectory, self.step)
        self.display.fault(trajectory, self._faults)

    def record_rollout(self, rollout: StepRollout, advantages: Advantages) -> None:
        """Count and record what became of a step's groups.

        Raises:
            InvalidStreams: too many episodes broke the token stream; engine, template or our own code is wrong then.
        """
        self._record_outcomes(rollout, advantages)
        broken = [t for t in rollout.played if t.end_reason is EndReason.INVALID_STREAM]
        # A few broken streams are lost; many mean that engine or template is wrong.
        most = self.config.rollout.max_invalid_frac
        if len(broken) > most * len(rollout.played):
            first = broken[0]
            raise InvalidStreams(
                f"{len(broken)} of {len(rollout.played)} episodes broke the token stream, over max_invalid_frac "
                f"{most:g}; episode {first.sample_index} of {first.sample_id}: {first.error}"
            )

    def record_unfinished(self, groups: tuple[TrajectoryGroup, ...]) -> None:
        """Count and record as aborted the groups that no step has taken."""
        self._record_outcomes(StepRollout((), aborted=groups), ())

    def _record_outcomes(self, rollout: StepRollout, advantages: Advantages) -> None:
        self.ends.update(t.end_reason.value for t in rollout.played)
        self._group_outcomes.update(outcome for group in rollout.groups for outcome in group.outcomes)
        self._unused_groups.update({reason: len(groups) for reason, groups in rollout.unused.items() if groups})
        if self.recorder is None:
            return
        for group, own in zip(rollout.groups, advantages, strict=True):
            for t in group.discarded:
                self.recorder.write_outcome(t, self.step, "discarded")
            for t, advantage in zip(group.trajectories, own, strict=True):
                self.recorder.write_outcome(t, self.step, TRAIN, advantage)
        for reason, groups in rollout.unused.items():
            for t in (t for group in groups for t in (*group.discarded, *group.trajectories)):
                self.recorder.write_outcome(t, self.step, reason)

    def record_logprobs(self, rollout: StepRollout, stats: StepStats) -> None:
        """Record the learner's log-probs of the episodes that it learned from."""
        if self.recorder is None:
            return
        for t in (t for group in rollout.groups for t in group.trajectories):
            keys = [(*t.key, stream) for stream in range(1 + len(t.later))]
            # Stream after stream; one without model tokens has no log-probs.
            own = [stats.logprobs[key] for key in keys if key in stats.logprobs]
            if own:
                self.recorder.write_scores(t, self.step, np.concatenate(own))

    async def finish_step(
        self,
        rollout: StepRollout,
        clock: StepClock,
        minibatches: Sequence[Sequence[TrainingSample]] = (),
        stats: StepStats | None = None,
        push: WeightPush | None = None,
    ) -> None:
        """Log and print the step, and end it unless an evaluation is due; begin a checkpoint where one is due."""
        spec = self.context.spec
        # Where episodes never stop, a step has played for as long as it lasted.
        if self.config.rollout.max_staleness:
            played_s = clock.total_s
        else:
            played_s = clock.seconds["rollout_s"]
        metrics = rollout_metrics(rollout, spec.max_turns, played_s, spec.parts) | clock.seconds
        if push:
            # Whole streams, though a prompt that several samples share is read once.
            num_tokens = sum(len(sample.ids_T) for samples in minibatches for sample in samples)
            metrics |= push.metrics()
            metrics["train_tokens_per_s"] = num_tokens / clock.seconds["train_s"]
            if push.probe_gap is not None:
                metrics["probe_gap"] = push.probe_gap
        if self.recorder:  # most of it within rollout_s
            metrics["record_s"] = self.recorder.seconds - self._recorded_s
            self._recorded_s = self.recorder.seconds
        metrics |= {"idle/learner_time_frac": clock.seconds["rollout_s"] / clock.total_s, **self.rollouts.idle_fracs()}
        metrics["tokens_per_s"] = sum(t.num_model_tokens for t in rollout.played) / clock.total_s
        metrics |= {"step": float(self.step), **(stats.row() if stats else {})}
        try:
            # A callback may raise to end the run: the step is logged all the same.
            metrics |= self.callbacks.on_step_end(self.step, metrics)
        finally:
            await self._log_step(metrics)
            self._warn(rollout, stats)
        self._check_lost(rollout)

    async def _log_step(self, metrics: Mapping[str, float]) -> None:
        """Log and print a step, and end it; if its evaluation is due, it can be resumed from here."""
        self.context.start.clock.end("the first step")
        if self.is_evaluated:
            num_bytes = self.log.size()
        else:
            num_bytes = 0
        self.display.step(self.log.write(self.step, metrics), self.num_steps)
        if self.is_evaluated:
            # From here a killed run takes up at the evaluation, not at the step.
            self.state = replace(self.state_now(), metrics_bytes=num_bytes, unfinished_row=metrics)
            self.checkpoints.mark_whole(self.step, self._files)
        else:
            await self.end_step()

    def _warn(self, rollout: StepRollout, stats: StepStats | None) -> None:
        """Print what was wrong with the step."""
        self.display.events(self.rollouts.events)
        if rollout.shortfall:
            logger.warning(rollout.shortfall)
        elif all(group.is_dropped for group in rollout.groups):
            see = check_command(self.config.env, self.config.data)
            is_rewards = any(t.end_reason is EndReason.REWARD_ERROR for t in rollout.played)
            if is_rewards:
                fix = "fix the reward function"
            else:
                fix = f"see {see}"
            logger.warning(f"nothing to learn from: no group has two valid episodes; {fix}")
        elif stats and not stats.num_updates:
            logger.warning(f"step {self.step} made no update: {why_no_update(rollout, stats)}")
        elif stats and stats.num_skipped:
            logger.warning(f"step {self.step} skipped {counted(stats.num_skipped, 'update')}: {NOT_FINITE}")

    def _check_lost(self, rollout: StepRollout) -> None:
        """Raise `LostSteps` if the last steps all were lost, as many as a run may lose or as it has."""
        # In a row: a lost step now and then costs little.
        lost = list(takewhile(is_lost, reversed(self.log.rows)))
        if len(lost) < min(self.config.rollout.max_lost_steps, self.num_steps):
            return
        # The most frequent one: each episode may have a text of its own.
        errors = Counter(located_line(t.error) for t in rollout.played if t.error and not t.end_reason.is_valid)
        if errors:
            cause = errors.most_common(1)[0][0]
        else:
            cause = NOT_FINITE
        if len(lost) > 1:
            which = f"{counted(len(lost), 'step')} in a row"
        else:
            which = f"step {self.step}"
        raise LostSteps(f"nothing was learnt in {which}: {cause}")

    def state_now(self) -> LoopState:
        """Return where the run stands now, with all files on disk up to here."""
        return LoopState(
            step=self.step,
            metrics_bytes=self.log.size(),
            recorded_bytes=self.recorder.sizes() if self.recorder else self.state.recorded_bytes,
            seconds=self.seconds,
            evaluations=dict(self.evaluations),
            ends=dict(self.ends),
            faults=tuple(sorted(self._faults)),
            group_outcomes=dict(self._group_outcomes),
            unused_groups=dict(self._unused_groups),
            rollout=self.rollouts.state(),
        )

    def summary(self) -> Mapping[str, Any]:
        """Return accuracies, end reasons, and the largest disagreement of engine and learner."""
        rows = self.log.rows
        return {
            "env": self.config.env.name,
            "seed": self.config.seed,
            "accuracy_before": values(self.before, "accuracy"),
            "accuracy_after": values(self.after, "accuracy"),
            "mean_reward_before": values(self.before, "mean_reward"),
            "mean_reward_after": values(self.after, "mean_reward"),
            "evaluation_before": {name: asdict(e) for name, e in self.before.items()},
            "evaluation_after": {name: asdict(e) for name, e in self.after.items()},
            "evaluations": curve_summary(self.curve),
            "best": self.best.record() if self.best else None,
            "num_updates": int(sum(row.get("num_updates", 0) for row in rows)),
            "max_rollout_train_kl": max((row[KL] for row in rows if KL in row), default=None),
            "end_reasons": dict(self.ends),
            "groups": dict(self._group_outcomes),
            "unused_groups": dict(self._unused_groups),
            "start": [asdict(stage) for stage in self.context.start.clock.stages],
            "reward_first": rows[0]["reward"] if rows else None,
            "reward_last": rows[-1]["reward"] if rows else None,
            **self.rollouts.summary(rows),
        }

    def draw(self) -> None:
        """Draw the reward over the steps."""
        estimates = {step: trained(ways, self.figure) for step, ways in self.curve.items()}
        points = {step: (found.value, found.low, found.high) for step, found in estimates.items() if found}
        name = f"{self.config.env.name}, seed {self.config.seed}"
        draw_rewards(self.log.rows, points, self.folder / REWARD_CURVE, name, f"held-out {title(self.figure)}, 95 %")

    def save_model(self) -> None:
        """Write the weights as a Hugging Face folder, where the run has trained them, and the cards of its models."""
        if not self.config.trains:
            return
        self.context.save_model(self.folder / MODEL)
        # A run that ends well needs no way back any more.
        if self.best and self.best.step <= (self.checkpoints.newest_step or 0):
            shutil.rmtree(self.folder / BEFORE, ignore_errors=True)
        rows = self.log.rows
        sees_images = self.context.renderer.images is not None
        ending = ending_of(len(rows), self.num_steps, self.stopped_by, self.is_interrupted)
        for name, step in {MODEL: len(rows), **({BEST: self.best.step} if self.best else {})}.items():
            card = run_card(self.folder.name, self.config, self.context.spec, self.curve, step, ending, sees_images)
            write_card(card, self.folder / name, self.folder / REWARD_CURVE)


def is_lost(row: Mapping[str, float]) -> bool:
    """Return whether no episode of a step could be scored, or no update of it had a finite loss and gradient."""
    is_unscored = row["episodes"] > 0 and row["valid_frac"] == 0
    return is_unscored or (row.get("num_skipped", 0) > 0 and not row["num_updates"])


def why_no_update(rollout: StepRollout, stats: StepStats) -> str:
    """Return the reason why a step has not changed the weights."""
    if stats.num_skipped:
        return NOT_FINITE
    rewards = [{t.reward for t in group.valid} for group in rollout.groups if not group.is_dropped]
    if any(len(values) > 1 for values in rewards):
        return "every advantage is 0"
    equal = sorted(Counter(value for values in rewards for value in values).items())
    shown = ", ".join(f"{reward:g} in {counted(count, 'group')}" for reward, count in equal[:MAX_REWARDS_SHOWN])
    return f"the episodes of each group have equal rewards ({shown}{', ...' * (len(equal) > MAX_REWARDS_SHOWN)})"
