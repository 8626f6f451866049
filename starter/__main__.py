"""Make the starter model: `python -m starter --recipe starter`, from a clone.

Each stage writes its lessons, then teaches them with `trainer.sft`, whose run folder stands in `--out`. The same
command goes on where it stopped.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError, did_you_mean
from starter.architecture import SHAPES, write_untrained
from starter.attempts import OwnAttempts, own_attempts
from starter.corpus import corpus
from starter.lessons import Lessons
from starter.recipes import RECIPES, Recipe, Stage
from starter.textbook.problems import problems_of

#: Lessons that a process makes at a time.
CHUNK = 256


class StarterConfig(Section):
    """The starter to make."""

    recipe: str = Field(default="starter", description=f"one of: {', '.join(RECIPES)}")
    out: Path = Field(default=Path("runs/starter"), description="folder to write")
    device: str = Field(default="", description="torch device; empty: cuda, or cpu where there is none")
    num_workers: int = Field(default=1, ge=1, description="processes that make lessons")


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and train."""
    config = parse(StarterConfig, argv, "python -m starter", "Make the starter model.")
    if config.recipe not in RECIPES:
        raise UserError("--recipe", "must be a known recipe", config.recipe, did_you_mean(config.recipe, RECIPES))
    # Imported late, so that --help and a mistyped flag answer at once.
    import torch

    from trainer.config.inputs import check_device

    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"give another folder ({error.strerror})"
        raise UserError("--out", "must be a folder that can be written", str(config.out), fix) from error
    return make(RECIPES[config.recipe], config.out, device, config.num_workers)


def make(recipe: Recipe, out: Path, device: str, num_workers: int = 1) -> int:
    """Train all stages that are not done; return 0 once they are, or the exit code of the stage that stopped.

    Raises:
        UserError: the folder holds a run of another recipe.
    """
    settings = json.dumps(asdict(recipe), indent=1) + "\n"
    kept = out / "recipe.json"
    if kept.exists() and kept.read_text(encoding="utf-8", errors="replace") != settings:
        raise UserError("--out", "must hold a run of the same recipe", str(out), "give another folder")
    kept.write_text(settings, encoding="utf-8")
    model = out / "untrained"
    if not (model / "model.safetensors").exists():
        write_untrained(model, SHAPES[recipe.shape], corpus(recipe.corpus_size, recipe.seed), recipe.seed)
    for number, stage in enumerate(recipe.stages, 1):
        folder = out / f"{number:02}-{stage.name}"
        if not _is_done(folder):
            print(f"stage {number} of {len(recipe.stages)}: {stage.name}", flush=True)
            code = _train(recipe, stage, recipe.seed + number, model, folder, device, num_workers)
            if code:
                return code
            gc.unfreeze()  # a run excludes from collection what exists at its start: now free what the stage held
            gc.collect()
        model = folder / "model"
    print(f"done: {model}")
    return 0


def _is_done(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and not json.loads(summary.read_text(encoding="utf-8"))["interrupted"]


def _train(recipe: Recipe, stage: Stage, seed: int, model: Path, folder: Path, device: str, num_workers: int) -> int:
    """Train one stage, from the model of the one before or from its last checkpoint; return the exit code."""
    from trainer.sft.__main__ import run as sft

    if folder.exists():
        return sft(["--resume", str(folder)])
    attempts: Sequence[OwnAttempts] = ()
    if stage.num_played:
        # Their places come after those of the lessons, so no lesson shows one of these problems otherwise.
        size = stage.num_lessons + stage.num_played
        sources = [problems_of("demonstrations", size, seed, **options) for options in stage.problems]
        places = range(stage.num_lessons, size)
        attempts = own_attempts(model, [sources[p % len(sources)].item(p) for p in places], device, seed)
        print(f"played {stage.num_played} problems: {len(attempts)} wrong attempts", flush=True)
    lessons, heldout = (folder.parent / f"{folder.name}{ending}.jsonl" for ending in ("", "-heldout"))
    _write(lessons, Lessons(stage, seed, attempts=attempts), stage.num_lessons, num_workers)
    _write(heldout, Lessons(stage, seed, "validation"), recipe.num_heldout, num_workers)
    flags = {
        "model": model,
        "data": lessons,
        "eval-data": heldout,
        "out": folder.parent,
        "name": folder.name,
        "seed": seed,
        "epochs": stage.epochs,
        "batch-size": stage.batch_size,
        "lr": stage.lr,
        "warmup-steps": stage.warmup_steps,
        "schedule": stage.schedule,
        "config": _settings(folder.with_suffix(".yaml"), recipe),
        "device": device,
        "save-every": 100,
    }
    if device.startswith("cuda"):
        flags |= {"dtype": "bfloat16", "max-tokens-per-microbatch": 32_768}
    return sft([word for name, value in flags.items() for word in (f"--{name}", str(value))])


def _settings(file: Path, recipe: Recipe) -> Path:
    """Write the settings that have no flag to a file; return it."""
    file.write_text(f"optim: {{weight_decay: {recipe.weight_decay}}}\n", encoding="utf-8")
    return file


def _write(file: Path, lessons: Lessons, count: int, num_workers: int) -> None:
    """Write `count` lessons, one a line."""
    with ExitStack() as stack, file.open("w", encoding="utf-8") as rows:
        if num_workers == 1:
            rows.writelines(map(lessons.line, range(count)))
        else:
            pool = stack.enter_context(ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")))
            rows.writelines(pool.map(lessons.line, range(count), chunksize=CHUNK))


if __name__ == "__main__":
    sys.exit(exit_code(run))
