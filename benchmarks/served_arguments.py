"""Starts SGLang servers with the arguments that are chosen, and with others, and measures what each is worth.

On one GPU, for one and for three servers, with and without CUDA graphs:

    python -m benchmarks.served_arguments --servers 1 3 --engine-args= --engine-args=--disable-cuda-graph

For every setting: seconds until all servers answer, tokens a second of groups of samples (text, and one image each),
the share of their prompts that came from a cache, and the gap in nats to the network itself, computed apart.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.checking.reference import Reference
from agents.checking.trial import make_image
from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.types import Completion, GenerateRequest, SamplingParams
from benchmarks.report import RESULTS, commit, markdown, write_result

CONTEXT = 1024
TEXT = "How many triangles are there? Look at every corner, count slowly, and give reasons for each. "


def requests(renderer: Renderer, options: argparse.Namespace, seed: int, images: bool) -> list[GenerateRequest]:
    """Return a request for each group; all turns go on to their budget."""
    sampling = SamplingParams(suppressed_ids=tuple(sorted({*renderer.suppressed_ids, *renderer.stop_ids})))
    made = []
    for number in range(options.groups):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"{TEXT} ({seed}.{number})"}]
        if images:
            parts.insert(0, {"type": "image", "image": make_image(1000 * seed + number)})
        prompt = renderer.prompt([{"role": "user", "content": parts}], ())
        made.append(GenerateRequest(prompt.ids, prompt.images, options.tokens, sampling, seed=seed))
    return made


async def play(engine: SGLangEngine, groups: Sequence[GenerateRequest], size: int) -> tuple[list[Completion], float]:
    """Write the turns of every group at once; return them and the seconds that took."""

    async def one(request: GenerateRequest) -> Completion:
        async with engine.session() as session:
            return await session.generate(request)

    started = time.perf_counter()
    done = await asyncio.gather(*(one(request) for request in groups for _ in range(size)))
    return list(done), time.perf_counter() - started


async def measure(options: argparse.Namespace, servers: int, arguments: str, folder: Path) -> dict[str, Any]:
    """Return the row of one setting; its servers' log is kept in the folder."""
    path = model_folder(options.model)
    renderer = Renderer.from_checkpoint(path)
    settings = SGLangSettings(
        path,
        num_servers=servers,
        mem_fraction=options.mem_fraction,
        dtype=options.dtype,
        arguments=tuple(shlex.split(arguments)),
        command=tuple(shlex.split(options.server_command)),
        log_folder=folder,
        max_sessions=options.groups * options.size,
        context_length=CONTEXT,
    )
    engine = SGLangEngine(settings, renderer.image_token_id, CONTEXT)
    row: dict[str, Any] = {"servers": servers, "arguments": arguments or "chosen"}
    try:
        started = time.perf_counter()
        await engine.start()
        row["start_s"] = round(time.perf_counter() - started, 1)
        reference = Reference.load(path, options.dtype, options.device)
        for name, images in (("text", False), ("pictures", True)):
            await play(engine, requests(renderer, options, 1, images), options.size)  # kernels
            groups = requests(renderer, options, 2, images)
            done, seconds = await play(engine, groups, options.size)
            row[f"{name}_tokens_per_s"] = round(sum(len(each.ids) for each in done) / seconds)
            row[f"{name}_requests_per_s"] = round(len(done) / seconds, 1)
            cached = sum(each.num_cached for each in done) / sum(each.prompt_length for each in done)
            row[f"{name}_cached_frac"] = round(cached, 3)
            row[f"{name}_gap"] = float(reference.gap(groups[0], done[0]))
    finally:
        await engine.close()
        log = (folder / "sglang-0.log").read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(line for line in log if line.startswith(("$ ", "# "))), flush=True)
    return row


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="starter")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cuda", help="device of the network that log-probs are compared with")
    parser.add_argument("--servers", type=int, nargs="+", default=(1, 3))
    parser.add_argument("--engine-args", action="append", help="a setting; may be given again; empty: all as chosen")
    parser.add_argument("--mem-fraction", type=float, default=0.4)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a turn")
    parser.add_argument("--server-command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--out", type=Path, default=RESULTS / "served_arguments.json")
    options = parser.parse_args()
    rows, at = [], commit()
    for servers in options.servers:
        for arguments in options.engine_args or [""]:
            with tempfile.TemporaryDirectory(prefix="servers-") as folder:
                try:
                    rows.append(asyncio.run(measure(options, servers, arguments, Path(folder))))
                except Exception as error:  # the other settings are still worth having
                    rows.append({"servers": servers, "arguments": arguments or "chosen", "failed": str(error)[-300:]})
                print(rows[-1], flush=True)
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    print(markdown(columns, [[row.get(name, "") for name in columns] for row in rows]))
    command = f"python -m benchmarks.served_arguments {shlex.join(sys.argv[1:])}"
    write_result(options.out, command, {"rows": rows}, at, ("torch", "transformers"))


if __name__ == "__main__":
    main()
