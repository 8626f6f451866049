"""A run killed over and over against one that is not: `python -m benchmarks.resume_drill --kills 20 --steps 30`.

With `--faults`, runs that lose one part each, on two Ray nodes of this machine or on what further flags say
(`--num-gpus 2 --num-servers 2`): a table of the seconds until that step is done, and of episodes lost or twice.

Kills come with SIGKILL at random moments: while the model is loaded, episodes are played, weights change, or a
checkpoint is written. The run goes on with `--resume` each time. At the end, metrics, recorded episodes, weights and
optimizer state are compared with those of the unbroken run, bit for bit; left out are times, what the image store of a
process counts, and the probe that each process takes first. Prints a table and writes
`benchmarks/results/resume_drill.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from agents.recording import Recording
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from tests.recordings import episodes_in
from tests.trainer.checkpoint.learner_drill import MOMENTS, Fault, fault_at, kill_server, ranks_of, signal_rank
from tests.trainer.runs import PATIENT, episodes_of, metrics_of, num_lines, num_members, state_of
from trainer.rollouts.live import LiveRollouts
from trainer.run import run

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


@dataclass(frozen=True)
class Recovery:
    """How a run got over a fault, in seconds from the fault to the end of the step that it hit."""

    fault: str
    moment: str
    seconds: float
    episodes_lost: int
    episodes_twice: int
    equals_unbroken: bool


#: What is lost, at which moment and step.
FAULTS: dict[str, tuple[tuple[str, int], ...]] = {
    "rank": tuple((moment, 2 if moment == "checkpoint" else 4) for moment in MOMENTS),
    "stopped-rank": (("update, early", 4),),
    "node": (("update, middle", 4),),
    "server": (("rollout", 4), ("update, middle", 4)),
    "driver": (("rollout", 3),),
    "driver-twice": (("rollout", 3),),
}


def played(folder: Path) -> Counter[str]:
    """Return how often each episode is in a run's recording."""
    return Counter(str(episode["id"]) for episode in episodes_in(folder))


def recovery(fault: str, moment: str, seconds: float, unbroken: Path, folder: Path) -> Recovery:
    """Compare a run that has lost something with one that has not. With servers or GPUs its figures are others."""
    first, second = played(unbroken), played(folder)
    twice = sum(count - 1 for count in second.values())
    is_equal = metrics_of(unbroken) == metrics_of(folder) and episodes_of(unbroken) == episodes_of(folder)
    return Recovery(fault, moment, round(seconds, 1), len(first.keys() - second.keys()), twice, is_equal)


def driver_killed(folder: Path, argv: list[str], step: int, is_twice: bool) -> float:
    """Kill the command once a step is logged, and again while it resumes; return the seconds until the next step."""
    assert kill_once(folder, argv, step, 0.1), "the run ended before the kill"
    began, logged = time.monotonic(), num_lines(folder / "metrics.jsonl")
    if is_twice:
        assert kill_once(folder, argv, 0, 8.0), "the run ended before the second kill"
    resumed = start(folder, argv)
    while num_lines(folder / "metrics.jsonl") <= logged and resumed.poll() is None:
        time.sleep(0.02)
    seconds = time.monotonic() - began
    assert resumed.wait() == 0, (folder.parent / f"{folder.name}.log").read_text()[-2000:]
    return seconds


def try_faults(names: list[str], moments: list[str], argv: list[str], place: Path) -> Iterator[Recovery]:
    """Run once undisturbed, and once with every moment of each fault, or with these moments alone."""
    from ray.cluster_utils import Cluster

    has_cluster = any(word in argv for word in ("--num-gpus", "--ray-address"))
    nodes = None if has_cluster else Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    if nodes:
        argv = [*argv, "--num-learners", "2", "--ray-address", str(nodes.address)]
    others: dict[str, Any] = {}

    def add_node() -> None:
        node = nodes.add_node(num_cpus=1) if nodes else None
        others[node.node_id if node else ""] = node

    def remove_node(rollouts: LiveRollouts) -> None:
        assert nodes, "a node is removed from a cluster of this machine alone"
        nodes.remove_node(others.pop(ranks_of(rollouts).places[1].node), allow_graceful=False)

    faults: dict[str, Fault] = {
        "rank": signal_rank(-1),
        "stopped-rank": signal_rank(-1, signal.SIGSTOP),
        "node": remove_node,
        "server": kill_server(),
    }
    try:
        add_node()
        unbroken = place / "unbroken"
        assert run([*argv, "--out", str(place), "--name", "unbroken"]) == 0
        for name in names:
            for number, (moment, step) in enumerate(FAULTS[name]):
                folder, is_driver = place / f"{name}-{number}", name.startswith("driver")
                if moments and moment not in moments and not is_driver:
                    continue
                if is_driver:
                    seconds = driver_killed(folder, argv, step, name == "driver-twice")
                    yield recovery(name, "after a step", seconds, unbroken, folder)
                    continue
                if name == "node" and nodes:
                    add_node()
                variables = {"TRUETURN_LEARNER_TIMEOUT_S": "10"} if name == "stopped-rank" else {}
                with patch.dict(os.environ, variables), fault_at(moment, step, faults[name]) as drill:
                    assert run([*argv, "--out", str(place), "--name", folder.name]) == 0
                yield recovery(name, moment, drill.seconds, unbroken, folder)
    finally:
        if nodes:
            nodes.shutdown()


def measure_faults(names: list[str], moments: list[str], argv: list[str], out: Path, at: str, command: str) -> None:
    """Try faults; print a row for each, and write them as they come."""
    found: list[Recovery] = []
    with tempfile.TemporaryDirectory() as place:
        for one in try_faults(names, moments, argv, Path(place)):
            found.append(one)
            print(one, flush=True)
            write_result(out, command, {"recoveries": [asdict(one) for one in found]}, at, (*PACKAGES, "ray"))
    print(markdown(tuple(asdict(found[0])), [tuple(asdict(one).values()) for one in found]))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "resume_drill.json")
    parser.add_argument("--faults", nargs="+", choices=tuple(FAULTS), help="lose these parts in place of the kills")
    parser.add_argument(
        "--moments", nargs="+", choices=MOMENTS, default=[], help="of ranks and servers; all by default"
    )
    args, extra = parser.parse_known_args()
    at, rng = commit(), random.Random(args.seed)
    argv = [word for pair in SMALL.items() for word in pair] + ["--steps", str(args.steps), *extra]
    if args.faults:
        out = args.out if args.out.name != "resume_drill.json" else RESULTS / "recovery.json"
        measure_faults(
            args.faults, args.moments, argv, out, at, f"python -m benchmarks.resume_drill {shlex.join(sys.argv[1:])}"
        )
        return
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
