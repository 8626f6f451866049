"""What all checks of an engine share: the engine, the requests to try it with, and how results are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from agents.checking.reference import Reference
from agents.engines.base import EngineSetup, Session, TrainableEngine
from agents.engines.own import missing_parts
from agents.rendering.renderer import Rendered, Renderer
from agents.types import Completion, GenerateRequest, SamplingParams
from envs.checks import Broken, NotApplicable
from envs.types import Message

#: Tokens of an ordinary turn.
TURN = 24
#: Fewer tokens than these may differ by more than rounding does on average.
ENOUGH = 8
QUESTIONS = ("What is 3 + 4?", "Name a colour.", "Find x.", "Say anything that comes to your mind, at some length.")


@dataclass(eq=False)
class Trial:
    """An engine that is being checked, with the network that it should run.

    `reference` is None for an engine without a network. `other` has other weights, which the engine can load from a
    folder of `folder`; None if the engine cannot be trained. `doing` names the call that the engine got last.
    """

    engine: TrainableEngine
    setup: EngineSetup
    renderer: Renderer
    reference: Reference | None
    folder: Path
    other: Reference | None = None
    doing: str = "start()"

    def load_other(self) -> None:
        """Make the network with other weights, if the engine can load them."""
        if self.reference and not missing_parts(self.engine):
            prompt = self.prompt()
            self.other = self.reference.disturbed(self.setup.model_path, prompt.ids, prompt.images)

    @property
    def network(self) -> Reference:
        """The network that the engine should run."""
        if self.reference is None:
            raise NotApplicable("an engine without a network")
        return self.reference

    @property
    def other_network(self) -> Reference:
        """The network with other weights."""
        if self.network and self.other is None:
            raise NotApplicable("the engine cannot be trained: it has no async update_from_disk(folder, version)")
        assert self.other is not None
        return self.other

    # Requests ---------------------------------------------------------------------------------------------------------

    def prompt(self, number: int = 0, images: Sequence[int] = ()) -> Rendered:
        """Return one of four questions, with images of these seeds before it."""
        parts = [{"type": "image", "image": make_image(seed)} for seed in images]
        text = QUESTIONS[number % len(QUESTIONS)]
        if parts:
            content = [*parts, {"type": "text", "text": text}]
        else:
            content = text
        return self.renderer.prompt([{"role": "user", "content": content}], ())

    def prompts(self) -> list[Rendered]:
        """Return a prompt of text and, where the model sees, one with an image and one with two."""
        if self.reads_images:
            images = [(), (1,), (2, 3)]
        else:
            images = [()]
        return [self.prompt(number, seeds) for number, seeds in enumerate(images)]

    def suffix(self, last_id: int) -> Rendered:
        """Return what follows a turn: an answer with an image, where the model sees."""
        content: object = "Go on."
        if self.reads_images:
            content = [{"type": "image", "image": make_image(4)}, {"type": "text", "text": "Go on."}]
        message: Message = {"role": "user", "content": content}
        return self.renderer.suffix([message], last_id)

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
        stop_ids: tuple[int, ...] | None = None,
        suppressed_ids: tuple[int, ...] = (),
    ) -> GenerateRequest:
        """Return a request whose turn goes on to its budget, unless there are `stop_ids`: those of the model cannot be
        drawn."""
        stops = self.renderer.stop_ids
        forbidden = {*self.renderer.suppressed_ids, *suppressed_ids, *(stops if stop_ids is None else ())}
        sampling = SamplingParams(temperature, stops if stop_ids is None else stop_ids, tuple(sorted(forbidden)))
        room = min(self.setup.context_length, self.engine.context_length) - len(prompt.ids)
        return GenerateRequest(prompt.ids, prompt.images, max(1, min(num_tokens, room)), sampling, seed)

    def following(self, request: GenerateRequest, completion: Completion) -> GenerateRequest:
        """Return the request for the turn after a completion."""
        suffix = self.suffix(completion.ids[-1])
        ids = (*request.ids, *completion.ids, *suffix.ids)
        return replace(request, ids=ids, images=(*request.images, *suffix.images), seed=request.seed + 1)

    # Calls ------------------------------------------------------------------------------------------------------------

    async def generate(self, session: Session, request: GenerateRequest) -> Completion:
        """Write a turn in an open session."""
        self.doing = "generate(request)"
        completion = await session.generate(request)
        if not isinstance(completion, Completion):
            found = f"generate returned {type(completion).__name__}"
            raise Broken(found, "return a Completion of agents/types.py")
        return completion

    async def write(self, request: GenerateRequest) -> Completion:
        """Write a turn in a session of its own."""
        self.doing = "session()"
        async with self.engine.session() as session:
            return await self.generate(session, request)

    async def write_all(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Write turns, all at once, each in a session of its own."""
        return list(await asyncio.gather(*map(self.write, requests)))

    async def push(self, reference: Reference) -> int:
        """Let the engine load a network's weights, while it is paused; return their version."""
        assert self.reference is not None
        version = self.engine.weight_version + 1
        if reference is self.reference:
            name = "first"
        else:
            name = "other"
        folder = self.folder / f"{name}-{version}"
        weights_of = reference.model.named_parameters
        await asyncio.to_thread(reference.model.save, folder, next(weights_of())[1].dtype)
        self.doing = "update_from_disk(folder, version)"
        await self.engine.update_from_disk(folder, version)
        return version

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause the engine as long as the context is open."""
        self.doing = "pause()"
        await self.engine.pause()
        try:
            yield
        finally:
            self.doing = "resume()"
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

    def compare(
        self, pairs: Sequence[tuple[GenerateRequest, Completion]], fix: str, reference: Reference | None = None
    ) -> str:
        """Compare log-probs of turns with the network's; return the largest gap in words.

        Raises:
            Broken: a turn has another number of log-probs than ids, or they differ by more than rounding.
        """
        network = reference or self.network
        gaps = []
        for request, completion in pairs:
            if not completion.ids or len(completion.ids) != len(completion.logprobs):
                found = f"{len(completion.logprobs)} log-probs for {len(completion.ids)} ids"
                raise Broken(found, "return the log-prob of every id, stop id included")
            if not 0 <= min(completion.ids) <= max(completion.ids) < network.num_ids:
                raise Broken(f"ids up to {max(completion.ids)} of {network.num_ids}", "return ids of the vocabulary")
            # The mean over few tokens is less sure.
            gaps.append(network.gap(request, completion) * min(1.0, len(completion.ids) / ENOUGH))
        words = f"mean |d| {max(gaps):.1g} nats to the network, at most {network.bound:g} is rounding"
        if max(gaps) > network.bound:
            raise Broken(f"log-probs are not the network's: {words}", fix)
        return f"{sum(len(completion.ids) for _, completion in pairs)} tokens, {words}"


def make_image(seed: int) -> Image.Image:
    """Return an image of coloured squares, 96 x 64."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(16, axis=0).repeat(16, axis=1))
