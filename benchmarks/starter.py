"""Makes a starter and measures it, in one go: `python -m benchmarks.starter --out runs/new-starter`.

The parts run one after the other, each in a process of its own with its share of the time: training, held-out problems,
the demonstration over three seeds with and without its tool, on overprinted problems and on those of textbooks, zooming
into small print, and the real test set. Each leaves its results and a log in `--out`. After `--minutes` the
command prints what there is; called again, it goes on with the parts that are not done, and with the training where it
stands. Exit code 0: everything is done.

Everything at the smallest size, on a CPU: `--recipe smoke --device cpu --quick`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
DONE, OUTCOMES = "done", "outcomes.json"
STYLES = ("--registry", str(ROOT / "benchmarks" / "styles.yaml"))
PLAIN = ("--env", "geo3k_plain", *STYLES, "--max-turns", "3")
TEXTBOOK = ("--env", "geo3k_textbook", *STYLES, "--max-turns", "3", "--max-new-tokens", "512")
SMALL_PRINT = ("--env", "geo3k_zoom", "--max-turns", "4", "--max-new-tokens", "1024")
TITLES = {"demo": "Demonstration", "textbook": "Textbook problems", "zoom": "Zooming"}
MARGIN_S = 20  # for the training to save its state, of its share


@dataclass(frozen=True)
class Part:
    """A command, the most seconds that it may take, and what is deleted if an earlier call left it undone."""

    name: str
    argv: tuple[str, ...]
    limit_s: float
    leftovers: tuple[Path, ...] = ()


def parts(args: argparse.Namespace, real: Path | None) -> list[Part]:
    """Return all parts in the order in which they matter."""
    out: Path = args.out
    model, is_gpu = str(out / "model"), args.device == "cuda"
    where = (
        "--device",
        args.device,
        "--dtype",
        "bfloat16" if is_gpu else "float32",
        "--max-batch",
        "512" if is_gpu else "64",
    )
    tiny = ("--size", "4") if args.quick else ()
    chosen = ("--split", "validation", *(tiny or ("--size", "2048")))

    def evaluation(name: str, model: str, *flags: str) -> Part:
        argv = (
            "trainer.evaluate",
            "--out",
            str(out),
            "--name",
            name,
            "--model",
            model,
            "--record",
            "0",
            *where,
            *flags,
        )
        return Part(name, argv, 240, (out / name,))

    def demonstration(name: str, *flags: str) -> Part:
        runs = out / f"{name}-runs"
        short = (
            ("--steps", "1", "--problems-per-step", "2", "--group-size", "2", "--eval-size", "4") if args.quick else ()
        )
        seeds = ("--jobs", str(args.jobs), "--seeds", *map(str, args.seeds))
        files = ("--keep", str(runs), "--out", str(out / f"{name}.json"))
        return Part(name, ("benchmarks.demo", *flags, *seeds, *files, "--model", model, *short), 600, (runs,))

    training = ("--recipe", args.recipe, "--device", args.device, "--num-workers", str(args.num_workers))
    made = [
        Part("train", ("trainer.starter", "--out", model, *training), 60 * args.train_minutes),
        evaluation("validation", model, *chosen),
        evaluation("validation-plain", model, *PLAIN, *chosen),
        evaluation("validation-textbook", model, *TEXTBOOK, *chosen),
        demonstration("demo"),
        demonstration("textbook", *TEXTBOOK),
        demonstration("zoom", *SMALL_PRINT, *(("--device", "cuda", "--engine", "hf") if is_gpu else ())),
    ]
    if real:
        rows = ("--data", str(real), "--max-prompt-tokens", "2048", "--max-new-tokens", "512", *tiny)
        after = str(out / "textbook-runs" / f"seed-{args.seeds[0]}")
        for when, folder in (("before", model), ("after", after)):
            made.append(evaluation(f"real-{when}-greedy", folder, *rows))
            made.append(evaluation(f"real-{when}-sampled", folder, *rows, "--samples", "8", "--eval-temperature", "1"))
    return [part for part in made if part.name.split("-")[0] in args.parts]


def run(part: Part, limit_s: float, log: Path) -> str:
    """Run a part for at most so many seconds; return what became of it in a few words."""
    for left in part.leftovers:
        shutil.rmtree(left, ignore_errors=True)
    own_limit = ("--max-minutes", f"{(limit_s - MARGIN_S) / 60:.2f}") if part.name == "train" else ()
    argv = [sys.executable, "-m", *part.argv, *own_limit]
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time"
    if code:
        return f"failed with exit code {code}, see {log}"
    is_stopped = part.name == "train" and not (Path(part.argv[2]) / "recipe.json").exists()
    return "stopped, goes on" if is_stopped else DONE


def summary(args: argparse.Namespace) -> str:
    """Return tables of all results that are there."""
    out: Path = args.out
    texts = []
    if found := _read(out / "model" / "recipe.json"):
        rows = [[s["stage"], s["steps"], s["seconds"], s["reading"], s["exact"]] for s in found["stages"]]
        texts.append(f"{found['seconds']:.0f} s on {found['device']}, {found['parameters']:,} parameters")
        texts.append(markdown(("stage", "steps", "seconds", "reading", "exact"), rows))
    for name, title in TITLES.items():
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
    parser.add_argument("--parts", nargs="+", default=["train", "validation", *TITLES, "real"])
    parser.add_argument("--real", type=Path, help="rows of the real test set; without it, looked for in shared/geo3k")
    parser.add_argument("--quick", action="store_true", help="a few problems and one step: does everything run?")
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    places = [args.real] if args.real else [ROOT / place for place in REAL]
    real = next((place for place in places if place.exists()), None)
    if real is None:
        print("no real test set: left out")
    began, outcomes = time.monotonic(), _read(args.out / OUTCOMES) or {}
    for part in parts(args, real):
        if outcomes.get(part.name) == DONE:
            continue
        started = time.monotonic()
        left = 60 * args.minutes - (started - began)
        limit_s = min(part.limit_s, left)
        outcomes[part.name] = (
            run(part, limit_s, args.out / f"{part.name}.log") if limit_s > 2 * MARGIN_S else "no time left"
        )
        (args.out / OUTCOMES).write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
        print(f"{part.name}: {outcomes[part.name]}, {time.monotonic() - started:.0f} s", flush=True)
        if part.name == "train" and outcomes[part.name] != DONE:
            break
    text = summary(args)
    (args.out / "tables.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(outcome == DONE for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
