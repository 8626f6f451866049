"""Which wrong attempts teach second ones? `python -m benchmarks.second_attempts`, a CPU, a quarter of an hour.

The bundled model learns what to do after wrong first attempts of its own: those that it makes as it plays, or those
that follow from what it misreads in a picture. Either way it tries as many problems, and sees as many lessons. Prints
what share of its second attempts at held-out problems is right, and writes `benchmarks/results/second_attempts.json`.

`limit` is the share that would be right if a wrong first reading were followed by the reading that the network itself
takes for the next likely one, as one forward pass over the solutions tells.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from trainer.starter.batches import Collator, taught_logits
from trainer.starter.lessons import Lessons
from trainer.starter.misreadings import Solutions, likeliest_two
from trainer.starter.plans import Mixture
from trainer.starter.recipes import ANGLES, Recipe, Stage
from trainer.starter.training import STATE, Position, StarterRun

PACKAGES = ("torch", "transformers", "numpy", "pillow")
PROBLEMS = {"families": list(ANGLES), "levels": [1, 2]}
BATCH = 32


def recipe(way: str, steps: int, rounds: int, tried: int, seed: int) -> Recipe:
    """Return the recipe of a stage that teaches second attempts; `tried` problems are played or read in each round."""
    played, read = (tried, 0) if way == "played" else (0, tried)
    mixture = Mixture(tools_offered=1.0, checks=1.0, first_wrong=0.0, corrects=True)
    stage = Stage(
        steps,
        BATCH,
        3e-4,
        20,
        mixture,
        PROBLEMS,
        lessons_per_drawing=1,
        attempts_frac=0.8,
        rounds=rounds,
        final_lr=0.05,
        num_attempts=played,
        num_readings=read,
    )
    return Recipe("starter", (stage,), seed=seed, num_probes=128)


def begin(recipe: Recipe, folder: Path) -> None:
    """Make a folder where a run of the recipe goes on from the bundled model."""
    model, renderer = PolicyModel.load(STARTER_PATH), Renderer.from_checkpoint(STARTER_PATH)
    model.float().save(folder)
    renderer.save(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=recipe.weight_decay)
    state = {"recipe": asdict(recipe), "position": Position(), "model": model.state_dict()}
    torch.save(state | {"optimizer": optimizer.state_dict()}, folder / STATE)


@torch.no_grad()
def limit(folder: Path, size: int) -> dict[str, int]:
    """Count the held-out problems whose likeliest reading is wrong, and those of them whose next one is right."""
    model, tokenizer = PolicyModel.load(folder).float(), Renderer.from_checkpoint(folder).tokenizer
    stage = Stage(-(-size // BATCH), BATCH, 1e-3, 1, problems=PROBLEMS, lessons_per_drawing=1)
    lessons = Lessons(tokenizer, stage, 99, "validation")
    collator = Collator(tokenizer.convert_tokens_to_ids("<|image_pad|>"), tokenizer.pad_token_id)
    digits_D = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    solutions, counts = Solutions(lessons, range(size), collator), {"first_wrong": 0, "next_right": 0}
    for start in range(0, size, BATCH):
        batch, written = solutions.collate([solutions[number] for number in range(start, min(size, start + BATCH))])
        logits_ND, ids_N = taught_logits(model, batch)[:, digits_D], batch.ids_BT[batch.loss_mask_BT]
        places: dict[int, list[int]] = defaultdict(list)
        for number in written:
            places[number.index] += range(number.begin, number.end)
        for at in places.values():
            first, following = likeliest_two(logits_ND[at].float())
            true = [digits_D.tolist().index(token) for token in ids_N[at].tolist()]
            counts["first_wrong"] += first != true
            counts["next_right"] += following == true
    return counts


def train_and_measure(way: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the second attempts of a model that was taught in a way; the way "not at all" leaves it as it is."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.jobs))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        if way == "not at all":
            model = STARTER_PATH
        else:
            one = recipe(way, args.steps, args.rounds, args.tried, seed)
            begin(one, model)
            StarterRun(one, model, torch.device("cpu")).train()
        seconds = time.perf_counter() - began
        entry = {
            "entry_point": "envs.geo3k.env:build_env",
            "description": "Angles in simple figures.",
            "dataset": "envs.geo3k.procedural:ProceduralGeo3k",
            "dataset_options": PROBLEMS,
            "system_prompt": "envs.geo3k.env:SYSTEM_PROMPT",
            "tool_calls": "last",
            "max_turns": 3,
        }
        registry = Path(work) / "registry.yaml"
        registry.write_text(json.dumps({"geo3k_angles": entry}))  # JSON is YAML
        command = [sys.executable, "-m", "trainer.evaluate", "--env", "geo3k_angles", "--registry", str(registry)]
        command += ["--model", str(model), "--split", "validation", "--size", str(args.size), "--max-turns", "3"]
        command += ["--record", "0", "--out", work, "--name", "measured"]
        env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((Path(work) / "measured" / "evaluation.json").read_text())["ways"]["with_tool"]
        found["limit"] = limit(model, args.size)
    figures = {name: found[name] for name in ("accuracy", "second_attempts", "mean_tool_calls", "limit")}
    return {"way": way, "seed": seed, "seconds": round(seconds, 1), **figures}


def row(run: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    second = run["second_attempts"] or {"after_wrong": None, "confusion": {"wrong": {"right": 0}}}
    after, confusion = second["after_wrong"], second["confusion"]["wrong"]
    share = f"{after['value']:.3f} [{after['low']:.3f}, {after['high']:.3f}]" if after else "-"
    tries = sum(count for name, count in confusion.items() if name != "none")
    accuracy = f"{run['accuracy']['value']:.3f}"
    best = f"{run['limit']['next_right']} of {run['limit']['first_wrong']}"
    cells = [run["way"], str(run["seed"]), f"{run['seconds']:.0f}", f"{confusion['right']} of {tries}", share]
    return [*cells, accuracy, best]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ways", nargs="+", default=["not at all", "played", "read"])
    parser.add_argument("--steps", type=int, default=200, help=f"of {BATCH} lessons")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tried", type=int, default=1024, help="problems that are played or read in each round")
    parser.add_argument("--size", type=int, default=512, help="held-out problems")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS / "second_attempts.json")
    args = parser.parse_args()
    at, command = commit(), f"python -m benchmarks.second_attempts {' '.join(sys.argv[1:])}".strip()
    todo = [(way, seed, args) for seed in args.seeds for way in args.ways]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(train_and_measure, *zip(*todo, strict=True)))
    write_result(args.out, command, {"problems": PROBLEMS, "runs": runs}, at, PACKAGES)
    header = ("attempts", "seed", "seconds", "second right after a wrong first", "share", "accuracy", "limit")
    print(markdown(header, list(map(row, runs))))


if __name__ == "__main__":
    main()
