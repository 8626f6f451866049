"""A run killed over and over against one that is not: `python -m benchmarks.resume_drill --kills 20 --steps 30`.

Kills come with SIGKILL at random moments: while the model is loaded, episodes are played, weights change, or a
checkpoint is written. The run goes on with `--resume` each time. At the end, metrics, recorded episodes, weights and
optimizer state are compared with those of the unbroken run, bit for bit; left out are times, what the image store of a
process counts, and the probe that each process takes first. Prints a table and writes
`benchmarks/results/resume_drill.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from agents.recording import Recording
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from tests.trainer.runs import PATIENT, episodes_of, metrics_of, num_lines, num_members, state_of

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pillow")
SMALL = {
    "--max-turns": "3",
    "--max-new-tokens": "64",
    "--train-size": "96",
    "--eval-size": "16",
    "--problems-per-step": "4",
    "--group-size": "4",
    "--save-every": "2",
    # However busy the machine is, the same episodes share a batch.
    "--config": PATIENT,
}


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: how many steps the metrics held when it came, and what the run was doing as far as one can see."""

    after_s: float
    steps_logged: int
    checkpoint_in_writing: bool
    steps_lost: int


def start(folder: Path, argv: list[str]) -> subprocess.Popen[bytes]:
    """Start a run, or go on with it where its folder is there."""
    begun = (folder / "config.yaml").exists()
    how = ["--resume", str(folder)] if begun else ["--out", str(folder.parent), "--name", folder.name, *argv]
    if not begun and folder.exists():  # killed before it had written its settings
        (folder / ".lock").unlink(missing_ok=True)
        folder.rmdir()
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.run", *how], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )


def kill_once(folder: Path, argv: list[str], target: int, delay_s: float) -> Kill | None:
    """Kill the run `delay_s` after it has logged `target` steps, or after its start; None if it ended before."""
    run, started = start(folder, argv), time.perf_counter()
    metrics = folder / "metrics.jsonl"
    while num_lines(metrics) < target and run.poll() is None:
        time.sleep(0.02)
    try:
        run.wait(delay_s)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGKILL)
    code = run.wait()
    if code == 0:
        return None
    assert code == -signal.SIGKILL, f"the run ended with {code}, see {folder}.log"
    whole = [int(path.name.split("-")[1]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdigit()]
    logged = num_lines(metrics)
    is_writing = any(folder.glob("checkpoints/*.writing"))
    return Kill(round(time.perf_counter() - started, 2), logged, is_writing, logged - max(whole, default=0))


def compare(unbroken: Path, broken: Path, steps: int) -> dict[str, Any]:
    """Return what is the same, and what was lost or recorded twice."""
    metrics = [metrics_of(folder) for folder in (unbroken, broken)]
    first, second = (Counter(episodes_of(folder)) for folder in (unbroken, broken))
    states = [state_of(folder, steps) for folder in (unbroken, broken)]
    equal = [name for name in states[0] if torch.equal(states[0][name], states[1][name])]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (unbroken, broken)]
    keys = ("accuracy_before", "accuracy_after", "evaluation_after", "end_reasons", "max_rollout_train_kl")
    given_up = sorted(broken.glob("episodes/abandoned/episodes.jsonl-*.gz"))
    return {
        "steps": [len(rows) for rows in metrics],
        "figures_per_step": len(metrics[0][0]),
        "metrics_equal": metrics[0] == metrics[1],
        "first_step_that_differs": next((a["step"] for a, b in zip(*metrics, strict=False) if a != b), None),
        "episodes": [first.total(), second.total()],
        "outcomes_in_order": list(Recording.open(unbroken).outcomes()) == list(Recording.open(broken).outcomes()),
        "episodes_lost": (first - second).total(),
        "episodes_twice": (second - first).total(),
        "episodes_played_again_and_kept_aside": sum(num_members(path) for path in given_up),
        "tensors": len(states[0]),
        "tensors_equal": len(equal),
        "model_files_equal": (unbroken / "model/model.safetensors").read_bytes()
        == (broken / "model/model.safetensors").read_bytes(),
        "summary_equal": all(summaries[0][key] == summaries[1][key] for key in keys),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "resume_drill.json")
    args, extra = parser.parse_known_args()
    at, rng = commit(), random.Random(args.seed)
    argv = [word for pair in SMALL.items() for word in pair] + ["--steps", str(args.steps), *extra]
    # Every fifth kill comes while the model is loaded; the others at a step and some way into what follows it.
    targets = sorted(rng.randrange(args.steps) for _ in range(args.kills))
    with tempfile.TemporaryDirectory() as place:
        unbroken, broken = Path(place) / "unbroken", Path(place) / "broken"
        started = time.perf_counter()
        assert start(unbroken, argv).wait() == 0, (Path(place) / "unbroken.log").read_text()[-2000:]
        unbroken_s, kills, started = time.perf_counter() - started, [], time.perf_counter()
        for number, target in enumerate(targets):
            early = number % 5 == 4
            kill = kill_once(broken, argv, 0 if early else target, rng.uniform(0, 8) if early else rng.uniform(0, 1.5))
            if kill:
                kills.append(kill)
                print(f"kill {len(kills)}: {kill}", flush=True)
        assert start(broken, argv).wait() == 0, (Path(place) / "broken.log").read_text()[-2000:]
        broken_s = time.perf_counter() - started
        found = compare(unbroken, broken, args.steps)
    figures = {
        "kills": [asdict(kill) for kill in kills],
        "seconds": {"unbroken": round(unbroken_s, 1), "broken": round(broken_s, 1)},
        **found,
    }
    command = f"python -m benchmarks.resume_drill --steps {args.steps} --kills {args.kills} --seed {args.seed}"
    write_result(args.out, " ".join([command, *extra]), figures, at, PACKAGES)
    print(markdown(("what", "found"), [("kills", len(kills)), *found.items()]))


if __name__ == "__main__":
    main()
