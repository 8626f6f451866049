"""What recording takes and what a kill costs: `python -m benchmarks.recording --steps 20 --kills 50`.

Three parts. A run of the starter says what share of a step recording is. Its files say how many bytes a million tokens
take, beside plain arrays and plain JSON. Then a process that does nothing but play and record is killed with SIGKILL,
over and over, at random moments; it says on a pipe when an episode has ended and when it is written, and what the files
hold is compared with what it said. Prints tables and writes `benchmarks/results/recording.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from agents.recording import EPISODES, OUTCOMES, SCORES, TOKENS, Manifest, Recorder, Recording
from agents.types import EndReason, Trajectory, Turn
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from envs.registry import get_spec

PACKAGES = ("numpy", "pillow", "pyarrow", "torch", "transformers")
#: Tokens of an episode of the drill: large, so that a kill often meets a line half written.
DRILL_TOKENS = 20_000


def overhead(steps: int, folder: Path) -> dict[str, float]:
    """Return the share of a step that recording takes, in a run of the starter that is left in `folder`."""
    argv = ["--env", "geo3k", "--max-turns", "3", "--steps", str(steps), "--eval-size", "0", "--save-every", "0"]
    argv += ["--out", str(folder), "--name", "run"]
    subprocess.run([sys.executable, "-m", "trainer.run", *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    step_s = [row["rollout_s"] + row["train_s"] + row["sync_s"] for row in rows]
    record_s = [row["record_s"] for row in rows]
    return {
        "steps": steps,
        "step_s": round(mean(step_s), 3),
        "record_s": round(mean(record_s), 4),
        "share": round(sum(record_s) / sum(step_s), 5),
    }


def sizes(run: Path) -> dict[str, Any]:
    """Return the bytes that a million tokens of a recording take, by part, and what other forms would take."""
    recording = Recording.open(run)
    episodes = list(recording.episodes())
    num_tokens = sum(len(episode.ids) for episode in episodes)
    images = [path.stat().st_size for path in (recording.folder / "images").iterdir()]
    parts = {name: (recording.folder / name).stat().st_size for name in (EPISODES, OUTCOMES, SCORES, TOKENS)}
    with gzip.open(recording.folder / EPISODES) as lines:
        plain = sum(map(len, lines))
    forms = {
        **parts,
        "all of it but pictures": sum(parts.values()),
        "episodes as plain JSON lines": plain,
        "ids, mask and two log-probs as plain arrays": 13 * num_tokens,
    }
    return {
        "episodes": len(episodes),
        "tokens": num_tokens,
        "model_tokens": sum(sum(episode.mask) for episode in episodes),
        "pictures": len(images),
        "picture_bytes": sum(images),
        "mb_per_million_tokens": {name: round(size / num_tokens, 3) for name, size in forms.items()},
    }


def drill_episode(number: int) -> Trajectory:
    """Return an episode like a very long one: random ids, a turn over half of them."""
    random_ = np.random.default_rng(number)
    half = DRILL_TOKENS // 2
    turn = Turn(half, DRILL_TOKENS, "x" * half, "stop", ((0, half),), 0, (), {}, 0.0, 0.0, True)
    mask_T = np.arange(DRILL_TOKENS) >= half
    return Trajectory(
        sample_id=f"drill-{number}",
        sample_index=0,
        seed=number,
        ids_T=random_.integers(0, 50_000, DRILL_TOKENS),
        mask_T=mask_T,
        logprobs_T=np.where(mask_T, -random_.random(DRILL_TOKENS), 0).astype(np.float32),
        images=(),
        turns=(turn,),
        reward=1.0,
        end_reason=EndReason.COMPLETED,
        prompt_length=half,
        group=number,
    )


def record_for_ever(folder: Path, first: int) -> None:
    """Write episode after episode, and say of each on the standard output when it has ended and when it is written."""
    with Recorder(folder, Manifest(created="", env=get_spec("geo3k"))) as recorder:
        os.write(1, b"open 0\n")
        for number in range(first, first + 100_000):
            played = drill_episode(number)
            os.write(1, f"ended {number}\n".encode())
            recorder.write(played, step=1)
            os.write(1, f"written {number}\n".encode())


def drill(kills: int, seed: int) -> dict[str, Any]:
    """Kill the writer, look, let another go on; return the counts."""
    random_, ended, written, worst, torn = random.Random(seed), set[int](), set[int](), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder, first, place = Path(name), 0, 0
        for _ in range(kills):
            argv = [sys.executable, "-m", "benchmarks.recording", "--record-into", str(folder), "--first", str(first)]
            process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stdout.readline() == b"open 0\n"
            time.sleep(random_.uniform(0.0, 0.5))
            process.send_signal(signal.SIGKILL)
            said = [line.split() for line in process.stdout.read().splitlines()]
            process.wait()
            now = {int(number) for what, number in said if what == b"ended"}
            ended |= now
            written |= {int(number) for what, number in said if what == b"written"}
            new = list(Recording.open(folder).episodes_from(place))
            place = new[-1][0] if new else place
            worst = max(worst, len(now - {episode.seed for _, episode in new}))
            first = max([first, *(number + 1 for number in ended)])
        with Recorder(folder, Manifest(created="", env=get_spec("geo3k"))):  # moves the last half a line aside
            torn = len(list(folder.glob("abandoned/episodes*")))
        with gzip.open(folder / EPISODES, "rt", encoding="utf-8") as lines:
            found = Counter(json.loads(line)["seed"] for line in lines)
        size = (folder / EPISODES).stat().st_size
    return {
        "kills": kills,
        "seed": seed,
        "ended": len(ended),
        "said_to_be_written": len(written),
        "found": len(found),
        "written_and_lost": len(written - found.keys()),
        "ended_and_lost": len(ended - found.keys()),
        "most_lost_by_one_kill": worst,
        "found_twice": sum(count - 1 for count in found.values()),
        "half_lines_moved_aside": torn,
        "mib": round(size / 2**20, 1),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "recording.json")
    parser.add_argument("--record-into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record_into:
        record_for_ever(args.record_into, args.first)
        return
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        share = overhead(args.steps, Path(folder))
        size = sizes(Path(folder) / "run")
    killed = drill(args.kills, args.seed)
    print(markdown(("of a step", ""), list(share.items())))
    print(markdown(("form", "MB per 1M tokens"), list(size["mb_per_million_tokens"].items())))
    print(markdown(("SIGKILL", ""), list(killed.items())))
    figures = {"overhead": share, "sizes": size, "drill": killed}
    command = f"python -m benchmarks.recording --steps {args.steps} --kills {args.kills} --seed {args.seed}"
    write_result(args.out, command, figures, at, PACKAGES)


if __name__ == "__main__":
    main()
