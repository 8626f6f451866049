"""A checkpoint exported on one machine, scored on another: `python -m benchmarks.export_parity write RUN FOLDER` and
`python -m benchmarks.export_parity check FOLDER --sglang bfloat16`.

`write` exports the newest checkpoint of a run and scores recorded episodes of that run, images included, with the
exported model; streams, images and log-probs lie beside it. `check`, anywhere, loads the same folder in Transformers
alone (no module of ours computes anything) and in a server of SGLang, and compares. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.recording import Recording
from agents.rendering.renderer import Renderer
from agents.types import ProcessedImage
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.errors import UserError
from trainer.setup.export import export

PACKAGES = ("torch", "transformers", "numpy", "pillow")
MODEL, STREAMS = "model", "streams.json"


@dataclass(frozen=True, eq=False)
class Stream:
    """One recorded episode: its ids, its images as files, and the log-prob of each id but the first."""

    ids: tuple[int, ...]
    images: tuple[str, ...]
    logprobs_T: NDArray[np.float32]


def recorded(run: Path, count: int) -> list[tuple[list[int], list[str]]]:
    """Return ids and image files of the longest recorded episodes."""
    chosen = sorted(Recording.open(run).episodes(), key=lambda episode: -len(episode.ids))[:count]
    return [(list(e.ids), [f"images/{image.digest}.png" for image in e.images]) for e in chosen]


def write(run: Path, folder: Path, count: int) -> None:
    """Export, and score here."""
    path = export(run, None, folder / MODEL, torch.bfloat16)
    model, renderer = PolicyModel.load(path), Renderer.from_checkpoint(path)
    streams = []
    for ids, names in recorded(run, count):
        images = []
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            image = Image.open(run / "episodes" / name).convert("RGB")
            image.save(folder / name)
            images.append(process(renderer, image))
        logprobs = stream_logprobs(model, ids, images, "cpu").tolist()
        streams.append({"ids": ids, "pictures": names, "logprobs": logprobs})
    (folder / STREAMS).write_text(json.dumps(streams))
    print(f"{len(streams)} streams, {sum(len(s['ids']) for s in streams)} tokens, model {path}")


def process(renderer: Renderer, image: Image.Image) -> ProcessedImage:
    """Return an image as the network reads it."""
    assert renderer.images is not None, "the model reads no images"
    return renderer.images.process(image)


def read(folder: Path) -> list[Stream]:
    """Return what `write` left."""
    lines = json.loads((folder / STREAMS).read_text())
    return [Stream(tuple(s["ids"]), tuple(s["pictures"]), np.asarray(s["logprobs"], np.float32)) for s in lines]


@torch.no_grad()
def transformers_scores(folder: Path, streams: Sequence[Stream], dtype: torch.dtype) -> list[NDArray[np.float32]]:
    """Return Transformers' own log-probs, its own image processor's patches included."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder / MODEL, dtype=dtype)
    network = loaded.to(device).eval()
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder / MODEL)
    scores = []
    for stream in streams:
        ids = torch.tensor([stream.ids], device=device)
        inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == network.config.image_token_id).int()}
        if stream.images:
            images = [Image.open(folder / name) for name in stream.images]
            processed = processor(images=images, return_tensors="pt")
            inputs["pixel_values"] = processed["pixel_values"].to(device, dtype)
            inputs["image_grid_thw"] = processed["image_grid_thw"].to(device)
        logits_TV = network(**inputs).logits[0, :-1].float()
        scores.append(logits_TV.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
    return scores


async def sglang_scores(
    folder: Path, streams: Sequence[Stream], dtype: str, args: argparse.Namespace
) -> list[NDArray[np.float32]]:
    """Return the log-probs of a server that is started on the folder."""
    renderer = Renderer.from_checkpoint(folder / MODEL)
    settings = SGLangSettings(
        model_path=str(folder / MODEL),
        mem_fraction=args.mem_fraction,
        dtype=dtype,
        arguments=tuple(shlex.split(args.engine_args)),
        log_folder=args.out.parent / f"server-{folder.name}-{dtype}",
    )
    engine = SGLangEngine(settings, renderer.image_token_id)
    try:
        await engine.start()
        raw_images = [[process(renderer, Image.open(folder / name)) for name in stream.images] for stream in streams]
        return [await engine.score(s.ids, images) for s, images in zip(streams, raw_images, strict=True)]
    finally:
        await engine.close()


def figures(streams: Sequence[Stream], scores: Sequence[NDArray[np.float32]], image_id: int) -> dict[str, float]:
    """Return mean and max |d| and the k3 KL, over all text tokens."""
    parts = []
    for stream, score in zip(streams, scores, strict=True):
        is_text = np.asarray(stream.ids[1:]) != image_id
        parts.append((score - stream.logprobs_T)[is_text].astype(np.float64))
    gap_N = np.concatenate(parts)
    return {
        "tokens": len(gap_N),
        "mean_gap": float(np.abs(gap_N).mean()),
        "max_gap": float(np.abs(gap_N).max()),
        "k3": float((np.exp(gap_N) - 1 - gap_N).mean()),
    }


def check(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of every way to load the folder."""
    streams, found = read(folder), {}
    image_id = int(json.loads((folder / MODEL / "config.json").read_text())["image_token_id"])
    for dtype in (torch.float32, torch.bfloat16):
        name = f"Transformers, {str(dtype).removeprefix('torch.')}"
        found[name] = figures(streams, transformers_scores(folder, streams, dtype), image_id)
    for dtype in args.sglang:
        try:
            scores = asyncio.run(sglang_scores(folder, streams, dtype, args))
        except UserError as error:  # a server that does not start is a result too
            print(f"SGLang, {dtype}: {error}", flush=True)
            continue
        found[f"SGLang, {dtype}"] = figures(streams, scores, image_id)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("run", type=Path)
    writing.add_argument("folder", type=Path)
    writing.add_argument("--streams", type=int, default=24)
    checking = commands.add_parser("check")
    checking.add_argument("folders", type=Path, nargs="+")
    checking.add_argument("--sglang", nargs="*", default=[], metavar="DTYPE", help="serve it in these dtypes too")
    checking.add_argument("--engine-args", default="")
    checking.add_argument("--mem-fraction", type=float, default=0.3)
    checking.add_argument("--out", type=Path, default=RESULTS / "export_parity.json")
    args = parser.parse_args()
    if args.command == "write":
        write(args.run, args.folder, args.streams)
        return
    found = {folder.name: check(folder, args) for folder in args.folders}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    command = f"python -m benchmarks.export_parity check {' '.join(map(str, args.folders))}"
    write_result(args.out, command, {"device": device, "found": found}, commit(), PACKAGES)
    rows = [
        (name, way, f["tokens"], f"{f['mean_gap']:.1e}", f"{f['max_gap']:.1e}", f"{f['k3']:.1e}")
        for name, ways in found.items()
        for way, f in ways.items()
    ]
    print(markdown(("folder", "loaded by", "text tokens", "mean gap", "max gap", "k3 KL"), rows))


if __name__ == "__main__":
    main()
