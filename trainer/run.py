"""Train: `python -m trainer.run --env geo3k --max-turns 3`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from envs.cli import exit_code, parse
from trainer.config import RunConfig


def run(argv: Sequence[str] | None) -> int:
    """Parse, check, train, report."""
    config = parse(RunConfig, argv, "python -m trainer.run", "Train a policy by reinforcement in an environment.")
    # Imported late, so that --help and a mistyped flag answer at once.
    from rich.console import Console

    from agents.heap import settle_heap
    from trainer.display import Display
    from trainer.loop import TrainingLoop
    from trainer.metrics import wandb_is_installed, wandb_is_wanted
    from trainer.setup import prepare
    from trainer.trainer import LearnerLost

    quiet_libraries()
    console = Console(highlight=False)
    console.print("loading model and problems ...")
    parts = prepare(config)
    if parts.num_overlong:
        console.print(
            f"left out {parts.num_overlong} problems whose prompt is over {config.data.max_prompt_tokens} tokens"
        )
    if wandb_is_wanted() and not wandb_is_installed():
        console.print("WANDB_API_KEY is set but wandb is missing: pip install 'trueturn[wandb]' to log there")
    if parts.eval_samples is None and config.data.eval_size:
        console.print("no held-out evaluation: give --eval-data")
    console.print(f"{len(parts.train_samples)} training problems; run folder {parts.folder}", soft_wrap=True)
    settle_heap()
    with Display(console) as display:
        loop = TrainingLoop(parts, display)
        try:
            summary = asyncio.run(loop.run())
        except LearnerLost as error:
            print(f"error: {error}; metrics and episodes so far are in {parts.folder}", file=sys.stderr)
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
