"""Train: `python -m trainer.run --env geo3k --max-turns 3`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agents.recording.run_files import CONFIG
from envs.config.cli import exit_code, parse
from envs.errors import UserError
from trainer.checkpoint.run_dir import is_disk_fault
from trainer.config.run import RunConfig
from trainer.config.sources import FIXED, SOURCES, STAGES, check_resumable, read_config, with_whole_paths
from trainer.metrics.console import quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.rollouts.protocol import Rollouts
    from trainer.setup.run_context import RunContext


def run(argv: Sequence[str] | None) -> int:
    """Parse, check, train, report."""
    description = "Train a policy by reinforcement in an environment."
    config = with_whole_paths(parse(RunConfig, argv, "python -m trainer.run", description, SOURCES))
    if config.checkpoint.resume:
        check_resumable(config, read_config(config.checkpoint.resume / CONFIG), (*FIXED, STAGES))
        if not config.trains:
            fix = "begin a new run: nothing was trained, so there is nothing to resume"
            raise UserError("--resume", "must be a run that trains", str(config.checkpoint.resume), fix)
    # Imported late, so that --help and a mistyped flag answer at once.
    from rich.console import Console

    from trainer.metrics.trackers import check_trackers
    from trainer.preflight.quick import QuickChecks

    check_trackers(config.log.tracker)
    quiet_libraries()
    console = Console(highlight=False)
    console.print(f"loading model and {'problems' if config.plays else 'recording'} ...")
    doctor = QuickChecks(config, lambda text: console.print(text, soft_wrap=True, markup=False))
    doctor.check_config()
    context, rollouts = prepared(config, console.print)
    try:
        doctor.check_context(context)
        return train(context, rollouts, console)
    finally:
        context.close()


def prepared(config: RunConfig, say: Callable[[str], None]) -> tuple[RunContext, Rollouts]:
    """Check everything and build the context of a run, and its rollouts. Raises `UserError` where a check fails."""
    if config.plays:
        from trainer.rollouts.live import LiveRollouts, prepare

        context = prepare(config, say)
        return context, LiveRollouts(context)
    from trainer.rollouts.recorded import RecordedRollouts, prepare_replay

    context = prepare_replay(config, say)
    return context, RecordedRollouts(context)


def train(context: RunContext, rollouts: Rollouts, console: Console) -> int:
    """Run the loop over a prepared run and print how it went."""
    from agents.rollout.garbage_collection import tune_garbage_collection
    from trainer.evaluation.tables import print_training_summary
    from trainer.learner.protocol import LearnerLost
    from trainer.loop import run_training
    from trainer.metrics.console import Display

    config = context.config
    *notes, last = context.notes()
    for note in (*notes, f"{last}; run folder {context.folder}"):
        console.print(note, soft_wrap=True, markup=False)
    tune_garbage_collection()
    with Display(console) as display:
        try:
            session, summary = asyncio.run(run_training(context, rollouts, display))
        except (LearnerLost, OSError) as error:
            if not (isinstance(error, LearnerLost) or is_disk_fault(error)):
                raise
            again = f"; resume with: python -m trainer.run --resume {context.folder}" if config.trains else ""
            print(f"error: {error}{again}", file=sys.stderr)
            return 1
    print_training_summary(console, session.before, session.after, session.ends)
    ends = summary["end_reasons"]
    if ends.get("token_budget", 0) > sum(ends.values()) / 2:
        budget = f"--max-new-tokens {config.env.max_new_tokens}"
        console.print(f"most episodes used up {budget}, which includes what the environment says: raise it")
    if summary["groups"]:
        outcomes = ", ".join(f"{count} {fate}" for fate, count in summary["groups"].items())
        console.print(f"groups that broken episodes left fewer than two valid ones: {outcomes}")
    largest = f", largest rollout_train_kl {summary['max_rollout_train_kl'] or 0.0:.1e}" if config.trains else ""
    console.print(f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_gib']:.2f} GiB{largest}")
    for note in context.closing_notes(session.log.rows):
        console.print(note, soft_wrap=True, markup=False)
    console.print(f"everything is in {context.folder}", soft_wrap=True)
    return 130 if summary["interrupted"] else 0


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(None))


if __name__ == "__main__":
    sys.exit(main())
