"""Evaluate a policy: `python -m trainer.evaluate --env geo3k --model starter --samples 4 --eval-temperature 1`.

It plays an environment's problems with a model. It prints accuracies with intervals and writes them to
`evaluation.json`, with a line for each problem in `results.jsonl` and a recording of every episode.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from agents.cli.text import path_text
from envs.config.cli import exit_code, parse
from envs.config.settings import with_absolute_paths
from trainer.config.evaluation import SOURCES, EvaluateConfig
from trainer.metrics.console import Display, open_console


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, check them, play the problems and print the report."""
    description = "Measure how good a policy is in an environment."
    config = with_absolute_paths(parse(EvaluateConfig, argv, "python -m trainer.evaluate", description, SOURCES))
    # Imported late, so that --help and a mistyped flag answer at once.
    from agents.engines.sglang.servers import EngineDown
    from agents.rollout.garbage_collection import tune_garbage_collection
    from trainer.evaluation.evaluator import Evaluator, prepare
    from trainer.evaluation.tables import print_report

    console = open_console()
    console.print("loading model and problems ...")
    context = prepare(config)
    if context.num_overlong:
        console.print(
            f"left out {context.num_overlong} of {context.num_overlong + len(context.samples)} problems whose prompt "
            f"is over {config.data.max_prompt_tokens} tokens"
        )
    tune_garbage_collection()
    code = 0
    with Display(console) as display:
        evaluator = Evaluator(context, display)
        try:
            asyncio.run(evaluator.run())
        except EngineDown as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
    print_report(console, evaluator.report)
    console.print(f"{evaluator.report.seconds:.0f} s; everything is in {path_text(context.folder)}", soft_wrap=True)
    return 130 if evaluator.report.is_interrupted else code


if __name__ == "__main__":
    sys.exit(exit_code(run))
