"""Evaluate a policy: `python -m trainer.evaluate --env geo3k --model starter --samples 4 --eval-temperature 1`.

It plays an environment's problems with a model. It prints accuracies with intervals and writes them to
`evaluation.json`, with a line for each problem in `results.jsonl` and a recording of every episode.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agents.cli.text import path_text
from agents.types import Trajectory
from envs.config.cli import exit_code, parse
from envs.config.settings import with_absolute_paths
from envs.console import Console
from trainer.checkpoint.run_dir import new_folder
from trainer.config.evaluation import SOURCES, EvaluateConfig
from trainer.config.inputs import check_sources
from trainer.metrics.console import Display, open_console

if TYPE_CHECKING:
    from trainer.evaluation.evaluator import Evaluator


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, check them, play the problems and print the report."""
    description = "Measure how good a policy is in an environment."
    config = with_absolute_paths(parse(EvaluateConfig, argv, "python -m trainer.evaluate", description, SOURCES))
    config.env.resolve()
    # Results are never mixed: an existing folder is an error before anything loads.
    new_folder(config.measurement.out, config.measurement.name, can_resume=False)
    check_sources(config.model.model, config.data.data)
    # Imported late: this imports torch, which takes seconds.
    from agents.engines.weight_servers import EngineDown

    try:
        evaluator = evaluate(config, open_console())
    except EngineDown as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if evaluator.report.is_interrupted:
        return 130
    if evaluator.report.has_scores:
        return 0
    # One cause stands for all: broken environments mostly fail in one way.
    cause = evaluator.causes.most_common(1)[0][0]
    print(f"error: no episode could be scored: {cause}", file=sys.stderr)
    return 1


def evaluate(
    config: EvaluateConfig, console: Console, on_episode: Callable[[Trajectory], None] = lambda trajectory: None
) -> Evaluator:
    """Check a configuration, play its problems, print the report, and return what holds it.

    Calls `on_episode(trajectory)` when an episode ends.

    Raises:
        UserError: a setting is wrong.
        EngineDown: the servers failed; what was played before is reported.
    """
    # Imported late, so that --help and a mistyped flag answer at once.
    from agents.rollout.garbage_collection import tune_garbage_collection
    from trainer.evaluation.evaluator import Evaluator, prepare
    from trainer.evaluation.tables import print_report

    console.print("loading model and problems ...")
    context = prepare(config)
    if context.num_overlong:
        console.print(
            f"left out {context.num_overlong} of {context.num_overlong + len(context.samples)} problems whose prompt "
            f"is over {config.data.max_prompt_tokens} tokens"
        )
    tune_garbage_collection()
    display = Display(console)
    evaluator = Evaluator(context, display, on_episode)
    try:
        with display:
            asyncio.run(evaluator.run())
    finally:
        print_report(console, evaluator.report)
        folder = path_text(context.folder)
        console.print(f"{evaluator.report.seconds:.0f} s; everything is in {folder}", soft_wrap=True)
    return evaluator


if __name__ == "__main__":
    sys.exit(exit_code(run))
