"""Supervised fine-tuning: `python -m trainer.sft --data demos.jsonl`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.text import Text

from agents.cli.text import path_text
from agents.recording.run_files import CONFIG
from envs.config.cli import exit_code, parse
from envs.config.files import read_file
from envs.config.settings import validate
from envs.config.sources import Sources
from envs.registry import get_spec
from trainer.checkpoint.run_dir import new_folder
from trainer.config.inputs import check_sources
from trainer.config.other_trainers import no_counterpart, other_names
from trainer.config.rollout import API_KEY_VARIABLE
from trainer.config.run import RunConfig
from trainer.config.sft import SftConfig
from trainer.config.sources import FIXED, RECIPES, RESUME, check_resumable, with_whole_paths
from trainer.metrics.console import Display, open_console

#: What the command reads besides flags.
SOURCES = Sources(
    ready=RECIPES / "sft",
    resume=RESUME,
    shared=RunConfig,
    other_names=other_names,
    no_counterpart=no_counterpart,
    secrets=(API_KEY_VARIABLE,),
)
#: What stays as it is when a run is resumed; the number of steps decides the learning rate and may change.
SFT_FIXED = (*FIXED, ("batch_size",), ("registry",))


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, check, train, report."""
    description = "Fine-tune a model on conversations: it learns what the assistant says in them."
    config = with_whole_paths(parse(SftConfig, argv, "python -m trainer.sft", description, SOURCES))
    if config.checkpoint.resume:
        base = validate(SftConfig, read_file(SftConfig, config.checkpoint.resume / CONFIG))
        check_resumable(config, base, SFT_FIXED)
    elif not config.show:
        new_folder(config.log.out, config.log.name)
    # Imported late, so that --help and a mistyped flag answer at once.
    from trainer.callbacks import check_callbacks

    if config.env:
        get_spec(config.env, *config.registry)
    check_sources(config.model.model, config.data.data, config.data.eval_data)
    check_callbacks(config.log.callback)
    # These import torch, which takes seconds.
    from trainer.checkpoint.session import RunFailed, check_finite, resume_hint, run_to_end
    from trainer.sft.loop import run_sft
    from trainer.sft.session import LIKELIHOOD_NOT_FINITE
    from trainer.sft.setup import load_data, prepare

    console = open_console()
    console.print("loading model and conversations ...")
    data = load_data(config)
    train = data.train
    held_out = data.evaluation
    for found in (train, held_out):
        if found is not None and found.left_out.count:
            console.print(str(found.left_out), soft_wrap=True)
    if config.show:
        for stream in train.streams(range(min(config.show, len(train)))):
            console.print(
                f"{stream.trajectory.sample_id}: {len(stream.ids_T)} tokens, {stream.num_taught} in [[ ]] learnt"
            )
            for is_learnt, text in train.renderer.spans(stream):
                if is_learnt:
                    shown = Text(f"[[{text}]]", "black on green")
                else:
                    shown = Text(text)
                console.print(shown, end="", soft_wrap=True)
            console.print("\n")
        return 0
    context = prepare(config, data)
    console.print(
        f"{len(train)} conversations of {train.num_tokens} tokens, {train.num_taught} of them learnt; "
        f"{len(held_out) if held_out else 0} held out; {context.num_steps} steps; "
        f"run folder {path_text(context.folder)}",
        soft_wrap=True,
    )
    try:
        with context.cleanup, Display(console) as display:
            summary = run_to_end(run_sft(context, display), "trainer.sft", context.folder)
        console.print(f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_gib']:.2f} GiB")
        console.print(f"everything is in {path_text(context.folder)}", soft_wrap=True)
        check_finite(summary, LIKELIHOOD_NOT_FINITE)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if summary["interrupted"]:
        console.print(resume_hint("trainer.sft", context.folder), soft_wrap=True, markup=False)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
