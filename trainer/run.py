"""Train: `python -m trainer.run --env geo3k --max-turns 3`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from envs.cli import exit_code, parse
from envs.errors import UserError
from trainer.config import RunConfig
from trainer.folder import CONFIG, is_disk_fault
from trainer.layers import FIXED, LAYERS, SIDES, check_resumable, read_config, with_whole_paths

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.parts import Parts
    from trainer.sides import RolloutSide


def run(argv: Sequence[str] | None) -> int:
    """Parse, check, train, report."""
    description = "Train a policy by reinforcement in an environment."
    config = with_whole_paths(parse(RunConfig, argv, "python -m trainer.run", description, LAYERS))
    if config.checkpoint.resume:
        check_resumable(config, read_config(config.checkpoint.resume / CONFIG), (*FIXED, SIDES))
        if not config.trains:
            fix = "begin a new run: as nothing was trained, there is nothing to go on from"
            raise UserError("--resume", "must be a run that trains", str(config.checkpoint.resume), fix)
    # Imported late, so that --help and a mistyped flag answer at once.
    from rich.console import Console

    from trainer.diagnosis.start import StartChecks
    from trainer.trackers import check_trackers

    check_trackers(config.log.tracker)
    quiet_libraries()
    console = Console(highlight=False)
    console.print(f"loading model and {'problems' if config.plays else 'recording'} ...")
    doctor = StartChecks(config, lambda text: console.print(text, soft_wrap=True, markup=False))
    doctor.before()
    parts, side = prepared(config, console.print)
    try:
        doctor.after(parts)
        return train(parts, side, console)
    finally:
        parts.close()


def prepared(config: RunConfig, say: Callable[[str], None]) -> tuple[Parts, RolloutSide]:
    """Check everything and build the parts of a run, and its rollout side. Raises `UserError` for what is wrong."""
    if config.plays:
        from trainer.setup import prepare
        from trainer.sides import Playing

        parts = prepare(config, say)
        return parts, Playing(parts)
    from trainer.replaying import Replaying, prepare_replay

    parts = prepare_replay(config, say)
    return parts, Replaying(parts)


def train(parts: Parts, side: RolloutSide, console: Console) -> int:
    """Run the loop over prepared parts and say how it went."""
    from agents.heap import settle_heap
    from trainer.display import Display
    from trainer.loop import TrainingLoop
    from trainer.trainer import LearnerLost

    config = parts.config
    *notes, last = parts.notes()
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(f"{last}; run folder {parts.folder}", soft_wrap=True)
    settle_heap()
    with Display(console) as display:
        try:
            loop = TrainingLoop(parts, side, display)
            summary = asyncio.run(loop.run())
        except (LearnerLost, OSError) as error:
            if not (isinstance(error, LearnerLost) or is_disk_fault(error)):
                raise
            again = f"; go on with: python -m trainer.run --resume {parts.folder}" if config.trains else ""
            print(f"error: {error}{again}", file=sys.stderr)
            return 1
    display.summary(loop.before, loop.after, loop.ends)
    ends = summary["end_reasons"]
    if ends.get("token_budget", 0) > sum(ends.values()) / 2:
        budget = f"--max-new-tokens {config.env.max_new_tokens}"
        console.print(f"most episodes used up {budget}, in which what the environment says counts too: raise it")
    if summary["groups"]:
        fates = ", ".join(f"{count} {fate}" for fate, count in summary["groups"].items())
        console.print(f"groups that broken episodes left fewer than two valid ones: {fates}")
    largest = f", largest rollout_train_kl {summary['max_rollout_train_kl'] or 0.0:.1e}" if config.trains else ""
    console.print(f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_gib']:.2f} GiB{largest}")
    for note in parts.closing_notes(loop.log.rows):
        console.print(note, soft_wrap=True, markup=False)
    console.print(f"everything is in {parts.folder}", soft_wrap=True)
    return 130 if summary["interrupted"] else 0


def quiet_libraries() -> None:
    """Keep progress bars and warnings of libraries out of the run's own display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(None))


if __name__ == "__main__":
    sys.exit(main())
