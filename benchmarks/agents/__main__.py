"""Trains on agents whose loops nobody here wrote: `python -m benchmarks.agents --node FOLDER --site FOLDER`.

`openai` of Node (`runTools`), openai-agents and smolagents look at parts of a diagram and answer; nothing is changed in
them but the URL and the key, which they read from the environment. Each run is the public command on the embedded
engine; episodes are rewarded for few tokens, so that every step has something to learn. Prints a table and writes
`benchmarks/results/agents.json`. `--node` is a folder with `node_modules/openai`, `--site` one where pip has put
openai-agents and smolagents (`pip install --target FOLDER openai-agents==0.24.0 smolagents==1.26.0`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from agents.recording import Recording
from agents.types import EndReason
from benchmarks.report import RESULTS, commit, markdown, write_result
from benchmarks.training_run import train

HERE = Path(__file__).parent
SCRIPTS = {"node": "node_openai.mjs", "openai-agents": "openai_agents.py", "smolagents": "smol.py"}
ENTRY = """{name}:
  agent: {command}
  dataset: starter.textbook.problems:TextbookGeo3k
  dataset_options: {{style: small_print}}
  system_prompt: envs.geo3k.zoom:SYSTEM_PROMPT
  description: Reads a diagram.
  max_turns: 4
"""
COLUMNS = (
    "episodes",
    "turns",
    "streams",
    "late images",
    "invalid streams",
    "env errors",
    "updates",
    "rollout_train_kl",
)


def run(name: str, steps: int, work: Path, args: argparse.Namespace) -> dict[str, float]:
    """Train on one agent; return the counts of its recorded episodes."""
    # Where they lie, neither must find our packages: openai-agents has one of the same name.
    script = work / SCRIPTS[name]
    shutil.copy(HERE / SCRIPTS[name], script)
    if name == "node":
        (work / "node_modules").symlink_to((args.node / "node_modules").absolute())
        command = f"node {script}"
    else:
        command = f"env PYTHONPATH={args.site.absolute()} {sys.executable} {script}"
    registry = work / "registry.yaml"
    registry.write_text(ENTRY.format(name=name, command=command))
    flags = ["--env", name, "--registry", str(registry), "--reward", "benchmarks.asynchrony:shortness"]
    flags += ["--problems-per-step", "8", "--group-size", "8", "--max-new-tokens", "512", "--doctor", "off"]
    rows = train(work / "run", steps, *flags)
    counts: dict[str, float] = dict.fromkeys(COLUMNS, 0)
    for _, episode in Recording.open(work / "run" / "episodes").episodes_from(0):
        streams = episode.streams
        counts["episodes"] += 1
        counts["turns"] += len(episode.turns)
        counts["streams"] += len(streams)
        counts["late images"] += max((len(stream.images) for stream in streams), default=0) > 1
        counts["invalid streams"] += episode.end_reason is EndReason.INVALID_STREAM
        counts["env errors"] += episode.end_reason is EndReason.ENV_ERROR
    counts["updates"] = sum(row["num_updates"] for row in rows)
    counts["rollout_train_kl"] = max(row["rollout_train_kl"] for row in rows)
    return counts


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs=3, default=(24, 4, 4), help="of each agent, 64 episodes a step")
    parser.add_argument("--out", type=Path, default=RESULTS / "agents.json")
    args = parser.parse_args()
    at = commit()
    found: dict[str, Any] = {}
    for name, steps in zip(SCRIPTS, args.steps, strict=True):
        with tempfile.TemporaryDirectory(prefix="agents-") as folder:
            found[name] = run(name, steps, Path(folder), args)
        lines = [[each, *(f"{counts[column]:.4g}" for column in COLUMNS)] for each, counts in found.items()]
        print(markdown(("agent", *COLUMNS), lines), flush=True)
        command = f"python -m benchmarks.agents --steps {' '.join(map(str, args.steps))}"
        write_result(args.out, command, {"agents": found}, at, ("torch", "transformers"))


if __name__ == "__main__":
    main()
