"""The loop of supervised training: one step, from its batch to its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agents.model.cpu import compute
from trainer.metrics.clock import StepClock
from trainer.metrics.console import Display
from trainer.sft.session import SftSession
from trainer.sft.setup import SftContext
from trainer.types import TrainingSample


async def run_sft(context: SftContext, display: Display) -> dict[str, Any]:
    """Run a prepared run from its first evaluation to its summary, which it returns.

    Ctrl-C or SIGTERM finishes the step and ends the run, with everything so far on disk.

    Example::

        summary = asyncio.run(run_sft(prepare(config, load_data(config)), Display()))
        summary["loss_first"], summary["loss_last"]     # 2.31, 0.04
    """
    session = SftSession(context, display)

    async def whole_run() -> None:
        await session.evaluate_before()
        # The next batch is read while this one is learnt.
        for step in session.steps():
            await session.complete(update(context, session, await session.batch(step)))
        await session.evaluate_after()

    return await session.run(whole_run)


async def update(context: SftContext, session: SftSession, samples: Sequence[TrainingSample]) -> None:
    """Update the weights from a batch of conversations, evaluate where that is due, and finish the step."""
    clock = StepClock()
    # From here an interrupt waits: a run stops between two steps.
    await session.begin_update()
    stats = await clock.time("train_s", compute(context.learner.step, [samples]))
    await session.finish_step(samples, stats, await session.evaluate_in_step(), clock)
