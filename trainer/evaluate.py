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
from agents.endpoints.demonstrations import Demonstrations
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
    local_model = "starter" if config.endpoints.endpoint else config.model.model
    check_sources(local_model, config.data.data)
    # Imported late: this imports torch, which takes seconds.
    from agents.engines.weight_servers import EngineDown

    try:
        evaluators = evaluate(config, open_console())
    except EngineDown as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if any(evaluator.report.is_interrupted for evaluator in evaluators):
        return 130
    unscored = [evaluator for evaluator in evaluators if not evaluator.report.has_scores]
    for evaluator in unscored:
        # One cause stands for all: broken environments mostly fail in one way.
        cause = evaluator.causes.most_common(1)[0][0]
        print(f"error: no episode could be scored: {cause}", file=sys.stderr)
    return int(bool(unscored))


def evaluate(
    config: EvaluateConfig, console: Console, on_episode: Callable[[Trajectory], None] = lambda trajectory: None
) -> list[Evaluator]:
    """Check a configuration, play its problems, print the report, and return what holds it, for each model.

    Calls `on_episode(trajectory)` when an episode ends.

    Raises:
        UserError: a setting is wrong.
        EngineDown: the servers failed; what was played before is reported.
    """
    # Imported late, so that --help and a mistyped flag answer at once.
    from agents.rollout.garbage_collection import tune_garbage_collection
    from trainer.evaluation.endpoints import prepare_endpoints
    from trainer.evaluation.evaluator import Evaluator, prepare, run_all
    from trainer.evaluation.tables import print_endpoints, print_report

    console.print("loading model and problems ...")
    spec = config.env.resolve()
    demonstrations = Demonstrations(config.endpoints.save_demonstrations, spec, spec.args().tool_format)
    if config.endpoints.endpoint:
        contexts = prepare_endpoints(config)
    else:
        contexts = [prepare(config)]
    num_overlong = contexts[0].num_overlong
    if num_overlong:
        console.print(
            f"left out {num_overlong} of {num_overlong + len(contexts[0].samples)} problems whose prompt "
            f"is over {config.data.max_prompt_tokens} tokens"
        )
    tune_garbage_collection()
    display = Display(console)

    def on_end(trajectory: Trajectory) -> None:
        demonstrations.add(trajectory)
        on_episode(trajectory)

    evaluators = [Evaluator(context, display, on_end) for context in contexts]
    try:
        with display:
            asyncio.run(run_all(evaluators, display))
    finally:
        reports = [evaluator.report for evaluator in evaluators]
        for report, context in zip(reports, contexts, strict=True):
            print_report(console, report)
            ended = f"{report.seconds:.0f} s; everything is in {path_text(context.folder)}{context.note}"
            console.print(ended, soft_wrap=True)
        if config.endpoints.endpoint:
            print_endpoints(console, reports)
    return evaluators


if __name__ == "__main__":
    sys.exit(exit_code(run))
