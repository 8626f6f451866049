"""An engine of one's own: Transformers as it is, one forward over the whole stream for each token, nothing kept.

It shares no code with `agents.engines.hf`: `--engine tests/agents/engines/plain_engine.py:make_engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText

from agents.engines.base import EngineSetup
from agents.types import Completion, GenerateRequest, ProcessedImage, add_run


class PlainEngine:
    """Writes each token with a forward of its own; all turns take their tokens in turn."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup, self.context_length, self.weight_version = setup, setup.context_length, 0
        self.network = self.load(setup.model_path)
        self.is_closed = False

    def load(self, folder: str | Path) -> Any:
        network = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, self.setup.dtype))
        return network.to(self.setup.device).eval()

    async def start(self) -> None:
        self.lock, self.may_write = asyncio.Lock(), asyncio.Event()
        self.may_write.set()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[PlainEngine]:
        yield self

    async def generate(self, request: GenerateRequest) -> Completion:
        sampling, random = request.sampling, np.random.default_rng(request.seed)
        ids, logprobs, versions = list[int](), list[float](), list[tuple[int, int]]()
        finish = "length"
        while len(ids) < request.max_new_tokens and finish == "length":
            await self.may_write.wait()
            async with self.lock:
                if self.is_closed:
                    raise RuntimeError("the engine is closed")
                logits_TV = await asyncio.to_thread(self.logits, (*request.ids, *ids), request.images)
                add_run(versions, self.weight_version, 1)
            logits_V = logits_TV[-1] / (sampling.temperature or 1.0)
            logits_V[list(sampling.suppressed_ids)] = -torch.inf
            logprobs_V = logits_V.log_softmax(-1).numpy()
            token = int(logprobs_V.argmax()) if sampling.temperature == 0 else self.draw(logprobs_V, random)
            ids.append(token)
            logprobs.append(float(logprobs_V[token]))
            if token in sampling.stop_ids:
                finish = "stop"
        return Completion(tuple(ids), tuple(logprobs), finish, len(request.ids), tuple(versions))

    def draw(self, logprobs_V: NDArray[np.float32], random: np.random.Generator) -> int:
        noise_V = random.gumbel(size=len(logprobs_V))  # the largest sum is a draw from the softmax
        return int((logprobs_V + noise_V).argmax())

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> torch.Tensor:
        ids_1T, inputs = torch.tensor([ids], device=self.setup.device), dict[str, torch.Tensor]()
        if images:
            inputs["pixel_values"] = torch.from_numpy(np.concatenate([image.pixels_PD for image in images]))
            inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in images])
            inputs["mm_token_type_ids"] = (ids_1T == self.setup.image_token_id).int()
        inputs = {name: value.to(self.setup.device) for name, value in inputs.items()}
        return self.network(input_ids=ids_1T, use_cache=False, **inputs).logits[0].float().cpu()

    async def pause(self) -> None:
        self.may_write.clear()
        async with self.lock:  # until the token that is being written is there
            pass

    async def resume(self) -> None:
        self.may_write.set()

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        async with self.lock:
            logits_TV = await asyncio.to_thread(self.logits, ids, images)
        logprobs_NV = logits_TV[:-1].log_softmax(-1)
        return logprobs_NV[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)].numpy()

    async def update_from_disk(self, folder: Path, version: int) -> None:
        self.network, self.weight_version = await asyncio.to_thread(self.load, folder), version

    async def close(self) -> None:
        self.is_closed = True
        self.may_write.set()


def make_engine(setup: EngineSetup) -> PlainEngine:
    return PlainEngine(setup)
