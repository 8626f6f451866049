"""Small builders that tests of agents and trainer share: a checkpoint, requests, streams.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from agents.engines.hf import HFEngine
from agents.model.mrope import mrope_positions
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import sampling_logprobs
from agents.rendering.renderer import Rendered, Renderer
from agents.types import (
    Completion,
    EndReason,
    GenerateRequest,
    ProcessedImage,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from starter.architecture import SHAPES, build_config, build_tokenizer, write_parts
from starter.corpus import corpus


def write_tiny_checkpoint(folder: Path) -> None:
    """Write the smoke shape with weights large enough that text and images move the logits by several nats."""
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = build_tokenizer(corpus(200, seed=1), SHAPES["smoke"].vocabulary)
    config = build_config(SHAPES["smoke"], tokenizer)
    write_parts(folder, tokenizer, config)
    torch.manual_seed(0)
    network = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    network.save_pretrained(folder)


@functools.lru_cache(maxsize=16)
def _loaded(folder: Path) -> PolicyModel:
    return PolicyModel.load(folder)


def fresh_model(folder: Path) -> PolicyModel:
    """Return a copy of a checkpoint's network that the test may change; the folder is read once."""
    return copy.deepcopy(_loaded(folder))


def sampling(renderer: Renderer, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, renderer.stop_ids, renderer.suppressed_ids)


def request(
    rendered: Rendered,
    params: SamplingParams,
    max_new_tokens: int = 12,
    seed: int = 0,
    before: GenerateRequest | None = None,
    written: Completion | None = None,
) -> GenerateRequest:
    """Return a request for the rendered stream, which follows `before` and what the model wrote to it."""
    ids = before.ids + written.ids if before and written else ()
    images = before.images if before else ()
    return GenerateRequest(ids + rendered.ids, images + rendered.images, max_new_tokens, params, seed)


async def play(engine: HFEngine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Write one turn for every request, each in a session of its own, all at once."""

    async def one(asked: GenerateRequest) -> Completion:
        async with engine.session() as session:
            return await session.generate(asked)

    return list(await asyncio.gather(*(one(asked) for asked in requests)))


def full_logprobs(
    model: PolicyModel, ids: Sequence[int], images: Sequence[ProcessedImage], params: SamplingParams
) -> Tensor:
    """Return the (T - 1, V) log-probs of every next token of one stream, from a forward over all of it."""
    ids_T = np.asarray(ids, dtype=np.int64)
    positions = mrope_positions(ids_T, [image.grid_thw for image in images], model.image_token_id, model.merge_size)
    select_BT = torch.ones(1, len(ids), dtype=torch.bool)
    select_BT[0, -1] = False
    logits = model(
        torch.from_numpy(ids_T)[None],
        torch.from_numpy(positions)[:, None],
        None,
        select_BT,
        VisionBatch.build([images], "cpu"),
    )
    return sampling_logprobs(logits, params.distribution)


@torch.no_grad()
def mixed_logprobs(old: Path, new: Path, ids: Sequence[int], num_old: int, params: SamplingParams) -> Tensor:
    """Return the (T - 1, V) log-probs of a text's next tokens if `old` weights read its first `num_old` ids.

    By Transformers alone: the `new` weights go on from what the old ones keep of the text.
    """
    cache = DynamicCache(config=AutoConfig.from_pretrained(old))
    ids_BT = torch.tensor([ids])
    parts = []
    for folder, part_BT in ((old, ids_BT[:, :num_old]), (new, ids_BT[:, num_old:-1])):
        network = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        parts.append(network(input_ids=part_BT, past_key_values=cache).logits[0])
    return sampling_logprobs(torch.cat(parts), params.distribution)


def turn(start: int, end: int, text: str = "") -> Turn:
    return Turn(start, end, text, "stop", ((0, end - start),), 0, (), {}, 0.0, 0.0)


def trajectory(
    ids: Sequence[int] = (5, 6, 7, 8),
    mask: Sequence[int] = (0, 0, 1, 1),
    logprobs: Sequence[float] | None = None,
    images: Sequence[ProcessedImage] = (),
    reward: float = 1.0,
    end_reason: EndReason = EndReason.COMPLETED,
) -> Trajectory:
    """Return a trajectory whose turns are the runs of ones in `mask`; log-probs default to -1 on model tokens."""
    mask_T = np.asarray(mask, dtype=np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask_T.astype(int), [0]])))
    turns = tuple(turn(int(start), int(end)) for start, end in edges.reshape(-1, 2))
    return Trajectory(
        sample_id="sample",
        sample_index=0,
        seed=0,
        ids_T=np.asarray(ids, dtype=np.int64),
        mask_T=mask_T,
        logprobs_T=np.asarray(logprobs if logprobs is not None else -mask_T.astype(float), dtype=np.float32),
        images=tuple(images),
        turns=turns,
        reward=reward,
        end_reason=end_reason,
        prompt_length=turns[0].start if turns else len(mask_T),
    )


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup("sample", trajectories)


def versions_of(trajectory: Trajectory) -> NDArray[np.int64]:
    """Return the version of the weights that wrote each token; -1 on tokens that the model did not write."""
    versions_T = np.full(len(trajectory.ids_T), -1)
    for turn in trajectory.turns:
        runs = np.array(turn.versions, dtype=np.int64).reshape(-1, 2)
        versions_T[turn.start : turn.end] = np.repeat(runs[:, 0], runs[:, 1])
    return versions_T
