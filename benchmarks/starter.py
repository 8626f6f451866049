"""Makes a starter and measures it, in one go: `python -m benchmarks.starter --out runs/new-starter`.

The parts run one after the other, each in a process of its own with its share of the time: training, held-out problems,
the demonstration over three seeds with and without its tool, the same for zooming, and the real test set. Each leaves a
file in `--out`. After `--minutes`, or when a part fails, the command prints what there is; called again, it goes on
with the parts that are not done, and with the training where it stands. Exit code 0: everything is done.

Everything at the smallest size, on a CPU: `--recipe smoke --device cpu --quick`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo import accuracy_table, attempts_table, family_table
from benchmarks.report import ROOT, markdown
from trainer.starter.recipes import RECIPES

#: Where the 400 real problems may be: they are for measuring only, and not in the repository.
REAL = ("shared/geo3k/test.jsonl", "../shared/geo3k/test.jsonl")
MARGIN_S = 20  # for the training to save its state, of its share


@dataclass(frozen=True)
class Part:
    """A command that leaves a file, and the most seconds that it may take."""

    name: str
    argv: tuple[str, ...]
    result: Path
    limit_s: float


def parts(args: argparse.Namespace, real: Path | None) -> list[Part]:
    """Return all parts in the order in which they matter."""
    out: Path = args.out
    model, device = str(out / "model"), args.device
    kind = "bfloat16" if device == "cuda" else "float32"
    where = ("--model", model, "--device", device, "--dtype", kind)
    evaluate = ("trainer.evaluate", "--out", str(out), "--record", "0", *where)
    tiny = ("--size", "4") if args.quick else ()
    size = tiny or ("--size", "2048")
    batch = ("--max-batch", "512") if device == "cuda" else ()
    demo = ("benchmarks.demo", "--jobs", str(args.jobs), "--seeds", *map(str, args.seeds))
    short = ("--steps", "1", "--problems-per-step", "2", "--group-size", "2", "--eval-size", "4") if args.quick else ()
    workers = ("--num-workers", str(args.num_workers))
    made = [
        Part(
            "train",
            ("trainer.starter", "--recipe", args.recipe, "--out", model, "--device", device, *workers),
            out / "model" / "recipe.json",
            60 * args.train_minutes,
        ),
        Part(
            "validation",
            (*evaluate, "--name", "validation", "--split", "validation", *size, *batch),
            out / "validation" / "evaluation.json",
            240,
        ),
        Part(
            "demo",
            (*demo, "--keep", str(out / "runs"), "--out", str(out / "demo.json"), "--model", model, *short),
            out / "demo.json",
            600,
        ),
    ]
    if "zoom" in args.parts:
        zoom = ("--env", "geo3k_zoom", "--max-turns", "4", "--keep", str(out / "zoom-runs"))
        made.append(Part("zoom", (*demo, *zoom, "--out", str(out / "zoom.json"), "--model", model, *short),
                         out / "zoom.json", 600))  # fmt: skip
    if real:
        after = str(out / "runs" / f"seed-{args.seeds[0]}")
        rows = ("--data", str(real), "--max-prompt-tokens", "2048", "--max-new-tokens", "512", *batch, *tiny)
        sampled = ("--samples", "8", "--eval-temperature", "1")
        for when, folder in (("before", model), ("after", after)):
            for how, flags in (("greedy", ()), ("sampled", sampled)):
                name = f"real-{when}-{how}"
                argv = (*evaluate, "--model", folder, "--name", name, *rows, *flags)
                made.append(Part(name, argv, out / name / "evaluation.json", 240))
    return [part for part in made if part.name.split("-")[0] in args.parts]


def run(part: Part, limit_s: float) -> str:
    """Run a part for at most so many seconds; return what became of it in a word."""
    argv = [*part.argv, "--max-minutes", f"{(limit_s - MARGIN_S) / 60:.2f}"] if part.name == "train" else part.argv
    log = part.result.parent / f"{part.name}.log" if part.name == "train" else part.result.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time"
    if code:
        return f"failed with exit code {code}: {log}"
    return "done" if part.result.exists() else "stopped, goes on"


def summary(args: argparse.Namespace) -> str:
    """Return tables of all results that are there."""
    out: Path = args.out
    texts = []
    if found := _read(out / "model" / "recipe.json"):
        rows = [[s["stage"], s["steps"], s["seconds"], s["reading"], s["exact"]] for s in found["stages"]]
        texts.append(f"{found['seconds']:.0f} s on {found['device']}, {found['parameters']:,} parameters")
        texts.append(markdown(("stage", "steps", "seconds", "reading", "exact"), rows))
    for name, title in (("demo", "Demonstration"), ("zoom", "Zooming")):
        if found := _read(out / f"{name}.json"):
            tables: Sequence[Callable[..., str]] = (accuracy_table, attempts_table, family_table)
            texts += [f"{title}, {found['split']}", *(table(found["runs"]) for table in tables)]
    rows = []
    for file in sorted(out.glob("*/evaluation.json")):
        for way, figures in json.loads(file.read_text())["ways"].items():
            shares = [f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in figures["pass_at"].values()]
            rows.append(
                [file.parent.name, way, figures["num_problems"], shares[0], shares[-1] if len(shares) > 1 else ""]
            )
    if rows:
        texts.append(markdown(("evaluation", "way", "problems", "pass@1", "pass@8"), rows))
    return "\n\n".join(texts)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="starter")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-workers", type=int, default=max(0, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--minutes", type=float, default=30, help="stop after so many; called again, it goes on")
    parser.add_argument("--train-minutes", type=float, default=30, help="the training's share of one call")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=3, help="seeds that run at the same time")
    parser.add_argument("--parts", nargs="+", default=["train", "validation", "demo", "zoom", "real"])
    parser.add_argument("--real", type=Path, help="rows of the real test set; without it, looked for in shared/geo3k")
    parser.add_argument("--quick", action="store_true", help="a few problems and one step: does everything run?")
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    places = [args.real] if args.real else [ROOT / place for place in REAL]
    real = next((place for place in places if place.exists()), None)
    if real is None:
        print("no real test set: left out")
    began, is_done = time.monotonic(), True
    for part in parts(args, real):
        if part.result.exists():
            continue
        left = 60 * args.minutes - (time.monotonic() - began)
        started = time.monotonic()
        outcome = run(part, min(part.limit_s, left)) if left > 2 * MARGIN_S else "no time left"
        print(f"{part.name}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
        if outcome != "done":
            is_done = False
            break
    text = summary(args)
    (args.out / "tables.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
