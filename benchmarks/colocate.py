"""A server on the learner's own GPU, which frees its memory while the learner trains. Needs one GPU and SGLang.

`python -m benchmarks.colocate --model 2b` prints for every step: the GPU's memory in use while the server writes, after
it has freed its memory, and after the push; the seconds of each; the size of a tensor that was held meanwhile; and the
log-prob gap between server and learner after the push. `--model 2b` is the shape of Qwen3-VL-2B with fresh weights.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from benchmarks.learner_workload import shape_config
from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.learner.cuda_ipc import share_weights
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.weights_io import empty_model
from trainer.setup.components import sampling_params
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import IpcTransport, ServersTransport

GIB = 2**30


def used_gib() -> float:
    """Return the memory of the first GPU that is in use, by any process; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return 0.0
    return int(lines[0]) / 1024


def write_model(name: str, folder: Path, renderer: Renderer, device: str) -> None:
    """Write the starter, or fresh weights of a larger shape, as a model folder."""
    torch.manual_seed(0)
    if name == "starter":
        PolicyModel.load(STARTER_PATH).save(folder)
    else:
        with torch.device(device):
            PolicyModel.from_config(shape_config(name)).save(folder)
    renderer.save(folder)


async def measure(options: argparse.Namespace, folder: Path, learner: FSDPLearner, renderer: Renderer) -> list[Any]:
    """Return a row for every step."""
    settings = SGLangSettings(
        str(folder),
        mem_fraction=options.mem_fraction,
        dtype=options.dtype,
        arguments=tuple(shlex.split(options.engine_args)),
        command=tuple(shlex.split(options.server_command)),
        log_folder=options.out.parent / "servers",
        context_length=4096,
        frees_memory=True,
    )
    engine = SGLangEngine(settings, renderer.image_token_id)
    on_gpu = learner.device.type == "cuda"
    transport = (
        IpcTransport(learner, engine, folder / "sync", partial(share_weights, learner))
        if on_gpu
        else ServersTransport(learner, engine, folder / "sync")
    )
    prompt = renderer.prompt([{"role": "user", "content": "How many sides has a hexagon?"}], ())
    sync = WeightSync(learner, transport, prompt.ids, (), renderer.image_token_id or -1, tolerance=0.2)
    rows = []
    try:
        await sync.start()
        for step in range(1, options.steps + 1):
            row: dict[str, Any] = {"step": step, "writing_gib": used_gib()}
            started = time.perf_counter()
            await sync.begin_training()
            row |= {"free_s": time.perf_counter() - started, "training_gib": used_gib()}
            room = max(0.0, row["writing_gib"] - row["training_gib"] - 1.0)
            row["fits_gib"] = room
            held = torch.empty(int(room * GIB), dtype=torch.uint8, device=learner.device)  # raises if it does not fit
            with torch.no_grad():
                for parameter in learner.model.parameters():
                    parameter.mul_(1.001)
            learner.steps_done += 1
            del held
            row["push_s"] = (await sync.push(step)).seconds
            row |= {"after_gib": used_gib(), "gap": await sync.probe()}
            rows.append({name: round(value, 4) for name, value in row.items()})
            print(rows[-1], flush=True)
        print("\n".join(engine.servers.events), flush=True)
    finally:
        await engine.close()
        sync.close()
    return rows


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=("starter", "2b"), default="2b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mem-fraction", type=float, default=0.6)
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--server-command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--out", type=Path, default=RESULTS / "colocate.json")
    options = parser.parse_args()
    at = commit()
    with tempfile.TemporaryDirectory(prefix="colocate-") as folder:
        path, renderer = Path(folder) / "model", Renderer.from_checkpoint(STARTER_PATH)
        write_model(options.model, path, renderer, options.device)
        dtype: torch.dtype = getattr(torch, options.dtype)
        network = empty_model(path, torch.float32)
        learner = FSDPLearner(
            network, sampling_params(renderer, 1.0), 100, device=options.device, dtype=dtype, path=path
        )
        rows = asyncio.run(measure(options, path, learner, renderer))
    columns = tuple(rows[0])
    print(markdown(columns, [[row[name] for name in columns] for row in rows]))
    write_result(
        options.out, f"python -m benchmarks.colocate {shlex.join(sys.argv[1:])}", {"rows": rows}, at, ("torch",)
    )


if __name__ == "__main__":
    main()
