"""What all checks of an engine share: the engine, the requests to try it with, and how results are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from agents.checking.reference import Reference
from agents.engines.base import EngineSetup, TrainableEngine
from agents.engines.own import missing_parts
from agents.rendering.renderer import Rendered, Renderer
from agents.types import Completion, GenerateRequest, SamplingParams
from envs.checks import Broken, NotApplicable

#: Tokens of an ordinary turn.
TURN = 24
#: Fewer tokens than these may differ by more than rounding does on average.
ENOUGH = 8
QUESTIONS = ("What is 3 + 4?", "Name a colour.", "Find x.", "Say anything that comes to your mind, at some length.")

#: What was asked for, and what was written.
Turn = tuple[GenerateRequest, Completion]


@dataclass(eq=False)
class Trial:
    """An engine that is being checked, with the network that it should run, and a folder to save weights in."""

    engine: TrainableEngine
    setup: EngineSetup
    renderer: Renderer
    network: Reference
    folder: Path

    @cached_property
    def other_network(self) -> Reference:
        """A network with other weights, which the engine can load."""
        if missing_parts(self.engine):
            raise NotApplicable("the engine cannot be trained: it has no async update_from_disk(folder, version)")
        prompt = self.prompt()
        return self.network.disturbed(self.setup.model_path, prompt.ids, prompt.images)

    # Requests ---------------------------------------------------------------------------------------------------------

    def prompt(self, number: int = 0, images: Sequence[int] = ()) -> Rendered:
        """Return one of four questions, with images of these seeds before it."""
        content: list[dict[str, object]] = [{"type": "image", "image": make_image(seed)} for seed in images]
        content.append({"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]})
        return self.renderer.prompt([{"role": "user", "content": content}], ())

    def prompts(self) -> list[Rendered]:
        """Return a prompt of text and, where the model sees, one with an image and one with two."""
        if self.reads_images:
            return [self.prompt(0), self.prompt(1, (1,)), self.prompt(2, (2, 3))]
        return [self.prompt(0)]

    def with_image(self) -> Rendered:
        """Return a prompt with an image, where the model sees."""
        return self.prompts()[:2][-1]

    @property
    def reads_images(self) -> bool:
        """Whether the model reads images."""
        return self.renderer.image_token_id is not None

    def request(
        self,
        prompt: Rendered,
        temperature: float = 1.0,
        seed: int = 0,
        num_tokens: int = TURN,
        suppressed_ids: tuple[int, ...] = (),
    ) -> GenerateRequest:
        """Return a request whose turn goes on to its budget: the ids that end a turn cannot be drawn."""
        forbidden = {*self.renderer.suppressed_ids, *suppressed_ids, *self.renderer.stop_ids}
        room = min(self.setup.context_length, self.engine.context_length) - len(prompt.ids)
        sampling = SamplingParams(temperature, (), tuple(sorted(forbidden)))
        return GenerateRequest(prompt.ids, prompt.images, max(1, min(num_tokens, room)), sampling, seed)

    # Calls ------------------------------------------------------------------------------------------------------------

    async def write(self, request: GenerateRequest) -> Completion:
        """Write a turn in a session of its own."""
        async with self.engine.session() as session:
            return await session.generate(request)

    async def write_all(self, requests: Sequence[GenerateRequest]) -> list[Turn]:
        """Write turns, all at once, each in a session of its own."""
        return list(zip(requests, await asyncio.gather(*map(self.write, requests)), strict=True))

    async def push(self, network: Reference) -> None:
        """Let the engine, which is paused, load a network's weights."""
        version = self.engine.weight_version + 1
        folder = self.folder / str(version)
        dtype = next(network.model.parameters()).dtype
        await asyncio.to_thread(network.model.save, folder, dtype)
        await self.engine.update_from_disk(folder, version)
        if self.engine.weight_version != version:
            found = f"weight_version is {self.engine.weight_version} after update_from_disk(folder, {version})"
            raise Broken(found, "take over the version with the weights")

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause the engine as long as the context is open."""
        await self.engine.pause()
        try:
            yield
        finally:
            await self.engine.resume()

    @asynccontextmanager
    async def first_weights_again(self) -> AsyncIterator[None]:
        """Load the first weights again at the end, where others were loaded."""
        version = self.engine.weight_version
        try:
            yield
        finally:
            if self.engine.weight_version != version:
                async with self.paused():
                    await self.push(self.network)

    # Comparisons ------------------------------------------------------------------------------------------------------

    def compare(self, turns: Sequence[Turn], fix: str, network: Reference | None = None) -> str:
        """Compare log-probs of turns with the network's; return the largest gap in words.

        Raises:
            Broken: they differ by more than rounding.
        """
        network = network or self.network
        # The mean over few tokens is less sure.
        gaps = [network.gap(*turn) * min(1.0, len(turn[1].ids) / ENOUGH) for turn in turns]
        words = f"mean |d| {max(gaps):.1g} nats to the network, at most {network.bound:g} is rounding"
        if max(gaps) > network.bound:
            raise Broken(f"log-probs are not the network's: {words}", fix)
        return f"{sum(len(completion.ids) for _, completion in turns)} tokens, {words}"


def following(trial: Trial, request: GenerateRequest, completion: Completion) -> GenerateRequest:
    """Return the request for the turn after a completion; an answer with an image, where the model sees, is between."""
    content: list[dict[str, object]] = [{"type": "text", "text": "Go on."}]
    if trial.reads_images:
        content.insert(0, {"type": "image", "image": make_image(4)})
    suffix = trial.renderer.suffix([{"role": "user", "content": content}], completion.ids[-1])
    ids = (*request.ids, *completion.ids, *suffix.ids)
    return replace(request, ids=ids, images=(*request.images, *suffix.images), seed=request.seed + 1)


def make_image(seed: int) -> Image.Image:
    """Return an image of coloured squares, 96 x 64."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(16, axis=0).repeat(16, axis=1))
