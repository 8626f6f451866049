"""A recording of episodes whose history was cut: each has several token streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agents.engines.scripted import ScriptedEngine
from agents.recording import Recorder, Recording
from agents.recording.manifest import build_manifest
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.types import SamplingParams, TokenStream, Trajectory
from envs.checking.hostile import write_call
from envs.execution.load import load_env
from envs.history import History
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.types import Sample
from tests.prompts import make_image

#: Four turns: three images that the tool answers with, each of another part, then the answer.
TEXTS = (
    *(write_call("zoom", {"left": 0, "top": 0, "right": right, "bottom": 500}, "hermes") for right in (400, 600, 800)),
    "\\boxed{68}",
)


def windowed_spec() -> EnvSpec:
    """Return the zoom environment, of whose answers the last image alone is kept."""
    return get_spec("geo3k_zoom").model_copy(update={"history": History(keep_images=1)})


def windowed_episode(renderer: Renderer, texts: Sequence[str] = TEXTS) -> tuple[Trajectory, Episode]:
    """Play a script, with log-probs that tell the tokens of all streams apart."""
    spec = windowed_spec()
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: texts[turn])
    params = SamplingParams(1.0, renderer.stop_ids, renderer.suppressed_ids)
    episode = Episode(engine, renderer, Limits(len(texts), 2000, check_template_every=1), params, history=spec.history)
    problem = {
        "role": "user",
        "content": [{"type": "image", "image": make_image()}, {"type": "text", "text": "Find x."}],
    }
    sample = Sample("windowed", (problem,), "68")
    t = asyncio.run(episode.run(sample, lambda: load_env(spec)(sample, spec.args(len(texts))), seed=7))
    first, *later = (_with_logprobs(stream, number) for number, stream in enumerate(t.streams))
    return replace(t, logprobs_T=first.logprobs_T, later=tuple(later)), episode


def _with_logprobs(stream: TokenStream, number: int) -> TokenStream:
    places = np.arange(len(stream.mask_T), dtype=np.float32)
    return replace(stream, logprobs_T=np.where(stream.mask_T, -number - places / 4096, 0).astype(np.float32))


def windowed_recording(folder: Path, renderer: Renderer, model: str) -> tuple[Recording, Trajectory]:
    """Record the episode with its outcome and the trainer's log-probs; return the recording and what was played."""
    t, episode = windowed_episode(renderer)
    manifest = build_manifest(windowed_spec(), renderer, model, {"train": episode})
    with Recorder(folder, manifest, renderer.encoder.spell) as recorder:
        recorder.write(t, step=1)
        recorder.write_outcome(t, 1, "train", 0.5)
        own = np.concatenate([stream.logprobs_T[stream.mask_T] for stream in t.streams])
        recorder.write_scores(t, 1, own - np.float32(0.125))
    return Recording.open(folder), t
