"""What an SGLang server keeps between turns, and over new weights, of a network with states. Needs a GPU.

`python -m benchmarks.states --model taught/states --out results` prints two tables and writes `states.json`:

- `caching`: seconds and tokens read of each turn, with each way to keep the states of linear attention
- `pushes`: log-probs of turns with late images against plain Transformers, before and after a push of other weights.
  The streams after it are those of before, so whatever the server kept of an image, a prefix or a state would show;
  `in session` pushes between two turns of a session.

On a CPU, to try it:

    python -m benchmarks.states --model agents/model/starter --device cpu --dtype float32 --sessions 2 \\
      --server-command "python -m tests.agents.engines.sglang_server" --ways default= --out /tmp
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.types import Completion, GenerateRequest
from benchmarks.images import Workload
from benchmarks.learner_peers import image_inputs
from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.setup.components import sampling_params

PACKAGES = ("torch", "transformers")
TURNS = 3
#: The server's arguments by the name of a way. The first is SGLang's own choice: it keeps states at multiples of 64
#: tokens of what it reads, and of 256 of what it writes.
WAYS = {
    "default": "",
    "every 64": "--mamba-track-interval 64",
    "no buffer": "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
}


@dataclass(frozen=True, eq=False)
class Played:
    """One turn: what was asked for and written, the seconds it took, and the tokens that the server read for it."""

    request: GenerateRequest
    written: Completion
    seconds: float

    @property
    def num_read(self) -> int:
        """The tokens of the prompt that came from no cache."""
        return self.written.prompt_length - self.written.num_cached


class Sessions:
    """Sessions of several turns on one server; every turn but the first begins with text and an image of a tool.

    Example: `await Sessions(engine, workload, 64, 40).play(seed=0)` plays 64 sessions; turn k of session s is `[s][k]`.
    """

    def __init__(self, engine: SGLangEngine, workload: Workload, count: int, new_tokens: int) -> None:
        self.engine = engine
        self.workload = workload
        self.count = count
        self.new_tokens = new_tokens

    async def play(self, seed: int, push: tuple[Path, int] | None = None) -> list[list[Played]]:
        """Play all sessions at once; with `push`, that folder becomes that version after their first turn."""
        waiting = asyncio.Barrier(self.count)

        async def between_turns(turn: int) -> None:
            if push and turn == 0 and await waiting.wait() == 0:
                await self.push(*push)
            if push and turn == 0:
                await waiting.wait()

        async def one(random: np.random.Generator) -> list[Played]:
            turns = []
            ids, images = self.workload.stream(random, 20, 1)
            async with self.engine.session() as session:
                for turn in range(TURNS):
                    request = GenerateRequest(ids, images, self.new_tokens, self.workload.sampling, turn)
                    began = time.perf_counter()
                    written = await session.generate(request)
                    turns.append(Played(request, written, time.perf_counter() - began))
                    await between_turns(turn)
                    more_ids, more_images = self.workload.stream(random, 20, 1)
                    ids, images = (*ids, *written.ids, *more_ids), (*images, *more_images)
            return turns

        randoms = np.random.default_rng(seed).spawn(self.count)
        return list(await asyncio.gather(*map(one, randoms)))

    async def push(self, folder: Path, version: int) -> None:
        """Let the server load the weights of a folder, as a run without shared GPUs does."""
        await self.engine.pause()
        await self.engine.update_from_disk(folder, version)
        await self.engine.resume()


def plain_network(folder: Path, device: str, dtype: torch.dtype) -> Any:
    """Return Transformers' own network of a checkpoint."""
    from transformers import AutoModelForImageTextToText

    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    return loaded.to(device).eval()


@torch.no_grad()
def plain_logprobs(network: Any, played: Played) -> NDArray[np.float64]:
    """Return the log-probs of what was written in a turn, by Transformers alone."""
    request = played.request
    ids = (*request.ids, *played.written.ids)
    count = len(played.written.ids)
    device = next(network.parameters()).device
    ids_1T = torch.tensor([ids], device=device)
    inputs: dict[str, Any] = image_inputs(request.images, str(device))
    inputs["pixel_values"] = inputs["pixel_values"].to(network.dtype)
    inputs["mm_token_type_ids"] = (ids_1T == network.config.image_token_id).int()
    logits_NV = network(input_ids=ids_1T, use_cache=False, **inputs).logits[0, -count - 1 : -1].float()
    logits_NV[:, list(request.sampling.suppressed_ids)] = -torch.inf
    return logits_NV.log_softmax(-1).gather(1, ids_1T[0, -count:, None])[:, 0].double().cpu().numpy()


def gaps(network: Any, sessions: Sequence[Sequence[Played]], turn: int) -> dict[str, float]:
    """Return mean |d| and the k3 KL of what the server wrote in a turn against a network."""
    parts = [plain_logprobs(network, s[turn]) - np.asarray(s[turn].written.logprobs) for s in sessions]
    gap_N = np.concatenate(parts)
    return {"mean_gap": float(np.abs(gap_N).mean()), "k3": float((np.expm1(gap_N) - gap_N).mean())}


async def caching(engines: Mapping[str, SGLangEngine], workload: Workload, args: argparse.Namespace) -> list[dict]:
    """Return a row for each way, number of sessions and turn."""
    rows = []
    for name, engine in engines.items():
        for count in args.sessions:
            sessions = Sessions(engine, workload, count, args.new_tokens)
            await sessions.play(seed=count)  # compiles kernels, and is not timed
            began = time.perf_counter()
            played = await sessions.play(seed=1000 + count)
            seconds = time.perf_counter() - began
            for turn in range(TURNS):
                row = {"way": name, "sessions": count, "turn": turn + 1, "sessions_per_s": count / seconds}
                row["median_s"] = median(session[turn].seconds for session in played)
                row["prompt"] = median(session[turn].written.prompt_length for session in played)
                rows.append({**row, "read": median(session[turn].num_read for session in played)})
                print(rows[-1], flush=True)
    return rows


async def pushes(
    engine: SGLangEngine, workload: Workload, folders: Sequence[Path], args: argparse.Namespace
) -> list[dict]:
    """Return a row for each turn: before a push, after one, and with one between the first turn and the second."""
    networks = [plain_network(folder, args.device, getattr(torch, args.dtype)) for folder in folders]
    sessions = Sessions(engine, workload, args.pushed_sessions, args.new_tokens)
    rows = []

    async def measure(name: str, versions: Sequence[int], push: tuple[Path, int] | None = None) -> None:
        played = await sessions.play(seed=7, push=push)
        for turn, version in enumerate(versions):
            others = [
                gaps(network, played, turn)["mean_gap"] for network in networks[:version] + networks[version + 1 :]
            ]
            row = {"when": name, "turn": turn + 1, **gaps(networks[version], played, turn), "to_others": min(others)}
            rows.append(row)
            print(row, flush=True)

    await measure("before", (0, 0, 0))
    await sessions.push(folders[1], 1)
    await measure("after a push", (1, 1, 1))
    await measure("in session", (1, 2, 2), (folders[2], 2))
    return rows


def other_weights(folder: Path, out: Path, seed: int) -> Path:
    """Write a checkpoint whose weights are those of another, moved by a share of their own spread."""
    model = PolicyModel.load(folder)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std().nan_to_num(0.0)
            parameter.add_(torch.randn_like(parameter) * spread * 0.1)
    shutil.copytree(folder, out)
    model.save(out)
    return out


async def measure_all(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Start a server for each way, and return the figures of all parts."""
    renderer = Renderer.from_checkpoint(args.model)
    workload = Workload(renderer, replace(sampling_params(renderer, 1.0), stop_ids=()))
    folders = [args.model, *(other_weights(args.model, work / f"other-{n}", n) for n in (1, 2))]
    engines = {}
    for name, words in (text.split("=", 1) for text in args.ways):
        settings = SGLangSettings(
            model_path=str(args.model),
            mem_fraction=args.mem_fraction,
            dtype=args.dtype,
            arguments=tuple(shlex.split(f"{args.engine_args} {words}")),
            command=tuple(shlex.split(args.server_command)),
            log_folder=args.out / "servers" / name.replace(" ", "-"),
            max_sessions=max(args.sessions),
            context_length=2048,
        )
        engines[name] = SGLangEngine(settings, renderer.image_token_id, 2048)
    figures: dict[str, Any] = {}
    try:
        for engine in engines.values():
            engine.launch()
            await asyncio.sleep(args.apart_s)  # servers that start together take each other's memory
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        figures["caching"] = await caching(engines, workload, args)
        first = next(iter(engines.values()))
        figures["pushes"] = await pushes(first, workload, folders, args)
    except Exception as error:  # what was measured before is worth keeping
        figures["failed"] = f"{type(error).__name__}: {error}"
        print(figures["failed"], flush=True)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
    return figures


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table."""
    if rows:
        lines = [[f"{v:.3g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
        print(markdown(tuple(rows[0]), lines), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--ways", nargs="+", default=[f"{k}={v}" for k, v in WAYS.items()], metavar="NAME=ARGS")
    parser.add_argument("--sessions", type=int, nargs="+", default=(8, 64), help="sessions at once")
    parser.add_argument("--pushed-sessions", type=int, default=16, help="sessions of the part on pushes")
    parser.add_argument("--new-tokens", type=int, default=100, help="tokens of a turn")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mem-fraction", type=float, default=0.8, help="with bounded pools, of what others leave")
    parser.add_argument("--engine-args", default="--max-total-tokens 65536 --max-mamba-cache-size 400")
    parser.add_argument("--server-command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--apart-s", type=float, default=2.5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    at = commit()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        figures = asyncio.run(measure_all(args, Path(work)))
    figures["gpu"] = torch.cuda.get_device_name() if args.device == "cuda" else ""
    command = f"python -m benchmarks.states {shlex.join(sys.argv[1:])}"
    write_result(args.out / "states.json", command, figures, at, PACKAGES)
    for part in ("caching", "pushes"):
        show(figures.get(part, ()))


if __name__ == "__main__":
    main()
