"""Train: `python -m trainer.run --env geo3k --max-turns 3`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.cli.text import path_text
from agents.recording.run_files import CONFIG, METRICS
from envs.config.cli import exit_code, parse
from envs.console import Console
from envs.errors import UserError
from trainer.checkpoint.run_dir import new_folder
from trainer.config.inputs import check_sources
from trainer.config.run import FIRST_SETTINGS, RunConfig
from trainer.config.sources import FIXED, SOURCES, STAGES, check_resumable, read_config, with_whole_paths
from trainer.metrics.clock import process_age_s
from trainer.metrics.console import Display, open_console

if TYPE_CHECKING:
    from trainer.rollouts.protocol import Rollouts
    from trainer.rollouts.session import TrainingSession
    from trainer.setup.run_context import RunContext


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and train; return the exit code."""
    description = "Train a policy by reinforcement in an environment."
    # Paths are made whole here, while the working folder is still that of the command.
    config = with_whole_paths(parse(RunConfig, argv, "python -m trainer.run", description, SOURCES, FIRST_SETTINGS))
    check_settings(config)
    # Imported late, so that --help and a wrong setting answer at once.
    from trainer.checkpoint.session import RunFailed

    try:
        if train(config, open_console(), process_age_s()).is_interrupted:
            return 130
        return 0
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder, and whether the user ended it early."""

    folder: Path
    is_interrupted: bool


def check_settings(config: RunConfig) -> None:
    """Check what can be checked without torch, whose import takes seconds.

    Raises:
        UserError: environment, tracker, callback or new folder cannot be used; a run to resume has other settings or
            did not train.
    """
    from trainer.callbacks import check_callbacks
    from trainer.metrics.trackers import check_trackers

    if config.checkpoint.resume:
        check_resumable(config, read_config(config.checkpoint.resume / CONFIG), (*FIXED, STAGES))
        if not config.trains:
            fix = "begin a new run: nothing was trained, so there is nothing to resume"
            raise UserError("--resume", "must be a run that trains", str(config.checkpoint.resume), fix)
    else:
        # Only asked whether it could be made: a refused run leaves nothing behind.
        new_folder(config.log.out, config.log.name)
    if config.plays:
        config.env.resolve()
        check_sources(config.model.model, config.data.data, config.data.eval_data)
    else:
        check_sources(config.model.model)
    check_trackers(config.log.tracker)
    # Last, since making a callback runs code of the user.
    check_callbacks(config.log.callback)


def train(config: RunConfig, console: Console, age_s: float = 0.0) -> FinishedRun:
    """Check a configuration, train by it, and print how that goes. The command is already `age_s` old.

    Raises:
        UserError: a setting is wrong, or the doctor found a fault.
        RunFailed: learner, servers, disk, weights or token streams failed.
    """
    from agents.rollout.garbage_collection import tune_garbage_collection
    from trainer.preflight.quick import QuickChecks
    from trainer.rollouts.live import LiveRollouts, prepare
    from trainer.rollouts.recorded import RecordedRollouts, prepare_replay
    from trainer.setup.start import Start

    console.print(f"loading model and {'problems' if config.plays else 'recording'} ...")
    # Before anything is loaded: a run that does not fit is refused in seconds.
    doctor = QuickChecks(config)
    start = Start(console, age_s)
    context = None
    try:
        with start.watched():
            with start.clock.stage("the first checks"):
                doctor.check_config()
            if config.plays:
                context = prepare(config, start)
                rollouts = LiveRollouts(context)
            else:
                context = prepare_replay(config, start)
                rollouts = RecordedRollouts(context)
            with start.clock.stage("the doctor"):
                doctor.check_context(context)
            # After all that lives as long as the run was made.
            tune_garbage_collection()
    # Ctrl-C too: servers must not outlive the command.
    except BaseException:
        if context:
            context.abandon()
        raise
    try:
        return run_prepared(context, rollouts, console)
    finally:
        context.close()


def run_prepared(context: RunContext, rollouts: Rollouts, console: Console) -> FinishedRun:
    """Run the loop over a prepared run and print how it went."""
    from trainer.checkpoint.run_dir import BEST
    from trainer.checkpoint.session import check_finite, resume_hint, run_to_end
    from trainer.evaluation.curve import title
    from trainer.evaluation.tables import print_training_summary

    config = context.config
    *notes, last = context.notes()
    for note in (*notes, f"{last}; run folder {path_text(context.folder)}"):
        console.print(note, soft_wrap=True)
    with Display(console) as display:
        session, summary = run_to_end(run_loop(context, rollouts, display), "trainer.run", context.folder)
    print_training_summary(console, session.before, session.after, session.ends, context.spec.success_rule)
    if best := session.best:
        where = f"after step {best.step}, in {path_text(context.folder / BEST)}"
        console.print(f"best held-out {title(best.figure)}: {best.value:.3f} {where}", soft_wrap=True)
    if config.trains and summary["steps_done"] and not summary["num_updates"]:
        console.print(f"the weights did not change: no step made an update; see num_skipped and reward in {METRICS}")
    ends = summary["end_reasons"]
    # A common mistake: tool output counts as well, and rewards then stay flat without an error.
    if ends.get("token_budget", 0) > sum(ends.values()) / 2:
        budget = f"--max-new-tokens {config.env.max_new_tokens}"
        console.print(f"most episodes used up {budget}, which includes what the environment says: raise it")
    if summary["groups"]:
        outcomes = ", ".join(f"{count} {fate}" for fate, count in summary["groups"].items())
        console.print(f"groups that broken episodes left fewer than two valid ones: {outcomes}")
    if config.trains:
        largest = f", largest rollout_train_kl {summary['max_rollout_train_kl'] or 0.0:.1e}"
    else:
        largest = ""
    console.print(f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_gib']:.2f} GiB{largest}")
    for note in context.closing_notes(session.log.rows):
        console.print(note, soft_wrap=True)
    console.print(f"everything is in {path_text(context.folder)}", soft_wrap=True)
    # After everything is said and saved: the exit code alone tells of it.
    check_finite(summary)
    if session.is_interrupted:
        console.print(resume_hint("trainer.run", context.folder), soft_wrap=True)
    return FinishedRun(context.folder, session.is_interrupted)


async def run_loop(context: RunContext, rollouts: Rollouts, display: Display) -> tuple[TrainingSession, dict[str, Any]]:
    """Run the training loop to its end, then end the engine and its servers."""
    from trainer.loop import run_training

    try:
        return await run_training(context, rollouts, display)
    finally:
        await rollouts.close()


if __name__ == "__main__":
    sys.exit(exit_code(run))
