"""What a turn costs in the loops of other trainers, beside ours: `python -m benchmarks.loop_peers`.

The task is that of `benchmarks.agent_loop`: eight episodes a problem, three turns, two of them with a call of a tool,
and an engine that knows its turns beforehand and answers at once. Each trainer builds the whole token stream of every
episode by its own code, in a process of its own, with its packages in a folder of `--sites` (pip, versions pinned
here). What is timed is from the prompt's messages to the finished streams; before that, one batch is played whose
streams must hold all three turns and both replies.

Peers call the tool inline, which costs them least. Ours is timed that way and, as by default, with tools on threads.
What is left out favours peers: TRL's rewards, verl's padding and rewards. Prints a table and writes
`benchmarks/results/loop_peers.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents.model import STARTER_PATH
from agents.rollout.garbage_collection import tune_garbage_collection
from benchmarks.agent_loop import GROUP_SIZE, TEXTS, make_samples, measure
from benchmarks.exactness import NEEDS as STREAM_NEEDS
from benchmarks.loop_players import PEERS, load_tokenizer
from benchmarks.report import RESULTS, commit, markdown, run_beside, write_result

AT_ONCE = (1, 64)
#: What each trainer needs beside our own packages.
NEEDS: Mapping[str, Sequence[str]] = {
    "TrueTurn": (),
    "TrueTurn, tools on threads": (),
    # 0.4 wants Python 3.12.
    "SkyRL": ("skyrl==0.3.0", "skyrl-gym==0.4.0", "loguru==0.7.3", "omegaconf==2.4.0"),
    "TRL": STREAM_NEEDS["TRL"],
    "verl": (
        *STREAM_NEEDS["verl"],
        "tensordict==0.15.3",
        "pyvers==0.2.3",
        "hydra-core==1.3.8",
        "omegaconf==2.4.0",
        "antlr4-python3-runtime==4.9.3",
        "cachetools==8.0.2",
        "codetiming==1.4.0",
        "fastapi==0.165.0",
    ),
    # 0.4 starts a program for each episode.
    "verifiers": (
        "verifiers==0.3.1",
        "renderers==0.1.10",
        *STREAM_NEEDS["renderers"][1:],
        "anthropic==2.14.0",
        "docstring-parser==0.18.0",
        "loguru==0.7.3",
        "setproctitle==1.3.8",
        "tenacity==9.2.1",
    ),
}


def time_peer(name: str, model: str, num_episodes: int) -> list[dict[str, Any]]:
    """Return the figures of a trainer in this process, by episodes at once."""
    tokenizer = load_tokenizer(model)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [[*tokenizer.encode(text, add_special_tokens=False), stop] for text in TEXTS]
    play = PEERS[name](model, turns)
    samples = [sample for sample in make_samples(num_episodes // GROUP_SIZE) for _ in range(GROUP_SIZE)]
    streams = play(samples[: AT_ONCE[-1]])
    for ids in streams:
        text = tokenizer.decode(ids)
        missing = [part for part in (*TEXTS, "Score 0.0", "Score 1.0") if part not in text]
        assert not missing, f"a stream lacks {missing}: {text}"
    tune_garbage_collection()
    rows = []
    for at_once in AT_ONCE:

        def play_all(at_once: int = at_once) -> float:
            for start in range(0, num_episodes, at_once):
                play(samples[start : start + at_once])
            return 0.0

        found = measure(play_all, num_episodes, repeats=2)
        rows.append({"at_once": at_once, "tokens": len(streams[0]), "cpu_us_per_turn": found["cpu_us_per_turn"]})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with each trainer's cost as a multiple of ours, or why it has none."""
    ours = {row["at_once"]: row["cpu_us_per_turn"] for row in rows if row["trainer"] == "TrueTurn" and "at_once" in row}
    lines = []
    for row in rows:
        if "why" in row:
            lines.append((row["trainer"], "", "", "", row["why"]))
            continue
        cost = row["cpu_us_per_turn"]
        ratio = f"{cost / ours[row['at_once']]:.1f}" if ours else ""
        lines.append((row["trainer"], row["at_once"], f"{cost:.0f}", row["tokens"], ratio))
    return markdown(("trainer", "at once", "CPU µs/turn", "tokens of a stream", "of TrueTurn"), lines)


def time_beside(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of a trainer in a process of its own, or why it has none."""
    out = args.out.with_suffix(".part")
    options = ("--here", "--peers", name, "--model", args.model, "--episodes", str(args.episodes), "--out", str(out))
    why = run_beside([args.sites / name], NEEDS[name], "benchmarks.loop_peers", options)
    if why:
        return [{"trainer": name, "why": why}]
    rows = json.loads(out.read_text())
    out.unlink()
    return [{"trainer": name, **row} for row in rows]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--model", default=str(STARTER_PATH), help="folder with a tokenizer and a chat template")
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="how often; trainers take turns, the best counts")
    parser.add_argument("--sites", type=Path, default=Path.home() / ".cache" / "trueturn-loop-peers")
    parser.add_argument("--out", type=Path, default=RESULTS / "loop_peers.json")
    parser.add_argument("--here", action="store_true", help="time one trainer in this process, whose packages are here")
    args = parser.parse_args()
    if args.here:
        args.out.write_text(json.dumps(time_peer(args.peers[0], args.model, args.episodes)))
        return
    at = commit()
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(args.repeats):
        for name in args.peers:
            for row in time_beside(name, args):
                key = (name, row.get("at_once", 0))
                best[key] = min(best.get(key, row), row, key=lambda each: each.get("cpu_us_per_turn", 0))
    rows = list(best.values())
    print(table(rows))
    command = f"python -m benchmarks.loop_peers --episodes {args.episodes} --repeats {args.repeats}"
    pins = {name: list(needed) for name, needed in NEEDS.items()}
    write_result(args.out, command, {"pins": pins, "rows": rows}, at, ("transformers", "tokenizers", "torch"))


if __name__ == "__main__":
    main()
