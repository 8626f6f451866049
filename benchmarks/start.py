"""Seconds from the command to the end of step 1, cold and warm: `python -m benchmarks.start --before COMMIT`.

Each run is a process of its own with one step and no evaluation. Cold means that no compiled kernel is kept yet, warm
that those of the run before are. `--before` names an older tree too: a commit, or a folder where there is no git.
`--delayed N` lets servers start that speak SGLang's protocol and need N seconds (no GPU). Other flags go to the run:

    python -m benchmarks.start --engine sglang --device cuda --dtype bfloat16 --engine-args="..."

Prints a table and writes `benchmarks/results/start.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agents.model.kernel_cache import FOLDERS
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result

COMMAND = ("-m", "trainer.run", "--env", "geo3k", "--max-turns", "3", "--steps", "1", "--eval-size", "0")
DELAYED = """
import time
time.sleep({delay_s})
from tests.agents.engines.sglang_server import main
main()
"""


def first_step(tree: Path, flags: list[str], cache: Path, site: Path | None, folder: Path) -> dict[str, Any]:
    """Run the command in a tree; return the seconds until it printed step 1, and the stages that it measured."""
    paths = [str(tree), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "XDG_CACHE_HOME": str(cache)}
    # An older tree keeps them elsewhere: in the same folders, so that both are equally cold.
    variables |= {variable: str(cache / "trueturn" / "kernels" / name) for variable, name in FOLDERS.items()}
    argv = [sys.executable, *COMMAND, *flags, "--out", str(folder), "--name", "run"]
    began, seconds = time.perf_counter(), None
    with subprocess.Popen(argv, cwd=tree, env=variables, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            if line.startswith("step ") and seconds is None:
                seconds = time.perf_counter() - began
    if seconds is None:
        raise SystemExit(f"the run took no step: {' '.join(argv)}")
    stages = json.loads((folder / "run" / "summary.json").read_text()).get("start", [])
    return {"seconds": round(seconds, 1), "stages": stages}


@contextmanager
def tree_of(before: str) -> Iterator[Path]:
    """Yield the folder of an older tree; a commit is checked out for it."""
    if Path(before).is_dir():
        yield Path(before).absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", f"{folder}/tree", before], cwd=ROOT, check=True)
        try:
            yield Path(folder) / "tree"
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", f"{folder}/tree"], cwd=ROOT, check=True)


def measure(name: str, tree: Path, flags: list[str], delay_s: float | None) -> list[dict[str, Any]]:
    """Return a cold and a warm run of a tree."""
    rows = []
    with tempfile.TemporaryDirectory() as text:
        folder, site = Path(text), None
        if delay_s is not None:
            site, flags = folder / "site", ["--engine", "sglang", *flags]
            (site / "sglang").mkdir(parents=True)
            (site / "sglang" / "__init__.py").write_text("")
            (site / "sglang" / "launch_server.py").write_text(DELAYED.format(delay_s=delay_s))
        for kept in ("cold", "warm"):
            row = first_step(tree, flags, folder / "cache", site, folder / kept)
            rows.append({"tree": name, "kernels": kept, **row})
    return rows


def stage_line(stages: list[Mapping[str, Any]]) -> str:
    """Return the stages with begin and end, those of a second or more."""
    long = [stage for stage in stages if stage["end_s"] - stage["start_s"] >= 1]
    ordered = sorted(long, key=lambda stage: stage["start_s"])
    return ", ".join(f"{stage['name']} {stage['start_s']:.0f}-{stage['end_s']:.0f}" for stage in ordered)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", default="", help="a commit or a folder to compare with; empty: none")
    parser.add_argument("--delayed", type=float, metavar="S", help="servers of the protocol that need S seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "start.json")
    args, flags = parser.parse_known_args()
    at, rows = commit(), []
    if args.before:
        with tree_of(args.before) as tree:
            rows += measure("before", tree, flags, args.delayed)
    rows += measure("now", ROOT, flags, args.delayed)
    delayed = [] if args.delayed is None else ["--delayed", f"{args.delayed:g}"]
    before = ["--before", args.before] if args.before else []
    command = " ".join(["python -m benchmarks.start", *before, *delayed, *flags])
    write_result(args.out, command, {"rows": rows}, at, ("torch", "transformers"))
    columns = ("tree", "kernels", "seconds to the end of step 1", "stages, in seconds since the command")
    print(markdown(columns, [(r["tree"], r["kernels"], r["seconds"], stage_line(r["stages"])) for r in rows]))


if __name__ == "__main__":
    main()
