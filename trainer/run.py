"""Train: `python -m trainer.run --env geo3k --max-turns 3`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envs.cli import exit_code, parse
from trainer.config import RunConfig
from trainer.folder import CONFIG, is_disk_fault
from trainer.layers import LAYERS, check_resumable, read_config, with_whole_paths

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.setup import RunParts


def run(argv: Sequence[str] | None) -> int:
    """Parse, check, train, report."""
    description = "Train a policy by reinforcement in an environment."
    config = with_whole_paths(parse(RunConfig, argv, "python -m trainer.run", description, LAYERS))
    if config.checkpoint.resume:
        check_resumable(config, read_config(config.checkpoint.resume / CONFIG))
    # Imported late, so that --help and a mistyped flag answer at once.
    from rich.console import Console

    from trainer.diagnosis.start import StartChecks
    from trainer.setup import prepare
    from trainer.trackers import check_trackers

    check_trackers(config.log.tracker)
    quiet_libraries()
    console = Console(highlight=False)
    console.print("loading model and problems ...")
    doctor = StartChecks(config, lambda text: console.print(text, soft_wrap=True, markup=False))
    doctor.before()
    parts = prepare(config, console.print)
    try:
        doctor.after(parts)
        return train(parts, console)
    finally:
        parts.close()


def train(parts: RunParts, console: Console) -> int:
    """Run the loop over prepared parts and say how it went."""
    from agents.heap import settle_heap
    from trainer.display import Display
    from trainer.loop import TrainingLoop
    from trainer.trainer import LearnerLost

    config = parts.config
    if parts.num_overlong:
        console.print(
            f"left out {parts.num_overlong} problems whose prompt is over {config.data.max_prompt_tokens} tokens"
        )
    if parts.eval_samples is None and config.data.eval_size:
        console.print("no held-out evaluation: give --eval-data")
    console.print(f"{len(parts.train_samples)} training problems; run folder {parts.folder}", soft_wrap=True)
    settle_heap()
    with Display(console) as display:
        try:
            loop = TrainingLoop(parts, display)
            summary = asyncio.run(loop.run())
        except (LearnerLost, OSError) as error:
            if not (isinstance(error, LearnerLost) or is_disk_fault(error)):
                raise
            print(f"error: {error}; go on with: python -m trainer.run --resume {parts.folder}", file=sys.stderr)
            return 1
    display.summary(loop.before, loop.after, loop.ends)
    ends = summary["end_reasons"]
    if ends.get("token_budget", 0) > sum(ends.values()) / 2:
        budget = f"--max-new-tokens {config.env.max_new_tokens}"
        console.print(f"most episodes used up {budget}, in which what the environment says counts too: raise it")
    if summary["groups"]:
        fates = ", ".join(f"{count} {fate}" for fate, count in summary["groups"].items())
        console.print(f"groups that broken episodes left fewer than two valid ones: {fates}")
    console.print(
        f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_gib']:.2f} GiB, "
        f"largest rollout_train_kl {summary['max_rollout_train_kl'] or 0.0:.1e}"
    )
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
