"""The training loop: one GRPO step, from its rollouts to its checkpoint, on one page.

Each stage has a folder of its own: `rollouts` (live or recorded), `algorithms`, `data`, `learner`, `weight_sync`.
`session` (`trainer.rollouts.session`) records, logs, checkpoints, resumes and stops.
"""

from __future__ import annotations

from typing import Any

from agents.model.cpu import compute
from agents.rollout.groups import StepRollout
from trainer.algorithms.advantages import Advantages, compute_advantages
from trainer.data.packing import build_minibatches
from trainer.metrics.clock import StepClock
from trainer.metrics.console import Display
from trainer.rollouts.protocol import Rollouts
from trainer.rollouts.session import TrainingSession
from trainer.setup.run_context import RunContext


async def run_training(
    context: RunContext, rollouts: Rollouts, display: Display
) -> tuple[TrainingSession, dict[str, Any]]:
    """Run a prepared run from its first evaluation to its summary; return its session, and the summary.

    Ctrl-C or SIGTERM ends it early, with everything so far on disk.

    Example::

        context = prepare(config)
        session, summary = asyncio.run(run_training(context, LiveRollouts(context), Display()))
        session.log.rows[-1]["reward"], summary["accuracy_after"]["with_tool"]      # 0.406, 0.641
    """
    # It opens recorder, log and trackers, so nothing of the run can happen unrecorded.
    session = TrainingSession(context, rollouts, display)

    async def whole_run() -> None:
        await rollouts.start(session.state.step, session.state.rollout, session.on_episode)
        try:
            await session.evaluate_before()
            await train(context, rollouts, session)
        finally:
            # Also after an error: what was begun is in the recording, marked as unfinished.
            session.record_unfinished(await rollouts.drain())
        await session.evaluate_after()

    return session, await session.run(whole_run)


async def train(context: RunContext, rollouts: Rollouts, session: TrainingSession) -> None:
    """Take every step that is left: collect groups of episodes, then learn from them."""
    config = context.config
    for step in session.steps():
        clock = StepClock()
        rollout = await clock.time("rollout_s", rollouts.collect(config.rollout.problems_per_step))
        advantages = compute_advantages(rollout.groups, config.algorithm)
        session.record_rollout(rollout, advantages)
        if config.trains:
            await session.complete(update(context, session, step, rollout, advantages, clock))
        else:
            await session.finish_step(rollout, clock)
        # With the new weights, which the engine has by now.
        await session.evaluate_in_step()


async def update(
    context: RunContext,
    session: TrainingSession,
    step: int,
    rollout: StepRollout,
    advantages: Advantages,
    clock: StepClock,
) -> None:
    """Update the weights from a step's rollout, hand them to the engine, and finish the step."""
    config = context.config
    # From here an interrupt waits, so a run always stops between two steps.
    await session.begin_update()
    minibatches = build_minibatches(
        rollout.groups,
        advantages,
        config.optim.minibatches,
        context.facts,
        config.algorithm,
        config.env.max_new_tokens,
    )
    # Servers on the learner's GPUs free their memory first.
    await context.weight_sync.begin_training()
    stats = await clock.time("train_s", compute(context.learner.step, minibatches))
    # Before the push: they belong to the weights that played.
    session.record_logprobs(rollout, stats)
    push = await context.weight_sync.push(version=step)
    await session.finish_step(rollout, clock, minibatches, stats, push)
