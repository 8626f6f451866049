"""Engines that break one promise each, for `agents.check_engine` to find."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from agents.engines.base import EngineSetup
from agents.engines.hf import HFEngine
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.types import Completion, GenerateRequest, ProcessedImage, SamplingDistribution
from tests.agents.engines.plain_engine import PlainEngine


class Faulty(HFEngine):
    """The embedded engine, which a fault changes before or after it has written."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(PolicyModel.load(setup.model_path), setup.context_length, setup.max_batch, max_wait_s=0.2)
        self.setup = setup

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        """Return what the engine reads in place of a request."""
        return request

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        """Return what the engine gives back in place of a completion."""
        return completion

    async def submit(self, session: Any, request: GenerateRequest) -> Completion:
        return self.done(request, await super().submit(session, self.asked(request)))


class Unfinished(Faulty):
    """Has no `resume`."""

    resume = None  # type: ignore[assignment]


class Lists(Faulty):
    """Gives ids as a list of NumPy numbers."""

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        return replace(completion, ids=list(np.array(completion.ids)))  # type: ignore[arg-type]


class OwnWords(Faulty):
    """Ends turns with a word of its own."""

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        return replace(completion, finish="eos")  # type: ignore[arg-type]


class CountsImages(Faulty):
    """Counts an image as one token."""

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        extra = sum(image.num_tokens - 1 for image in request.images)
        return replace(completion, prompt_length=completion.prompt_length - extra)


class Shifted(Faulty):
    """Reports the log-probs one token late."""

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        return replace(completion, logprobs=(completion.logprobs[-1], *completion.logprobs[:-1]))


class UnscaledLogprobs(Faulty):
    """Reports log-probs of temperature 1, whatever it draws with."""

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        ids = (*request.ids, *completion.ids)
        distribution = SamplingDistribution(1.0, request.sampling.suppressed_ids)
        scores = stream_logprobs(self.model, ids, request.images, "cpu", distribution=distribution)
        return replace(completion, logprobs=tuple(scores[len(request.ids) - 1 :].tolist()))


class NeverGreedy(Faulty):
    """Draws at temperature 0 too."""

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, sampling=replace(request.sampling, temperature=request.sampling.temperature or 1.0))


class TopP(PlainEngine):
    """Leaves out the least likely tenth, as top-p 0.9 does, and reports the log-probs of all."""

    def draw(self, logprobs_V: NDArray[np.float32], random: np.random.Generator) -> int:
        order = np.argsort(-logprobs_V)
        kept = order[: 1 + np.searchsorted(np.cumsum(np.exp(logprobs_V[order])), 0.9)]
        return int(kept[super().draw(logprobs_V[kept], random)])


class OneSeed(Faulty):
    """Draws with the same random numbers whatever the seed."""

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, seed=0)


class Retokenised(Faulty):
    """Returns the text's ids as its tokenizer would cut it."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.tokenizer = AutoTokenizer.from_pretrained(setup.model_path)

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        ids = tuple(self.tokenizer(self.tokenizer.decode(completion.ids), add_special_tokens=False)["input_ids"])
        logprobs = (*completion.logprobs, *[-1.0] * len(ids))[: len(ids)]
        return replace(completion, ids=ids, logprobs=logprobs, versions=((self.weight_version, len(ids)),))


class SuppressesNothing(Faulty):
    """Ignores the ids that must not be drawn, but for those that end a turn."""

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, sampling=replace(request.sampling, suppressed_ids=()))


class StripsStop(Faulty):
    """Takes the stop id away, as servers that answer with text do."""

    def done(self, request: GenerateRequest, completion: Completion) -> Completion:
        if completion.finish != "stop":
            return completion
        ids, logprobs = completion.ids[:-1], completion.logprobs[:-1]
        return replace(completion, ids=ids, logprobs=logprobs, versions=((self.weight_version, len(ids)),))


class OneMore(Faulty):
    """Writes one token more than asked for."""

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, max_new_tokens=request.max_new_tokens + 1)


class Blind(Faulty):
    """Reads grey in place of every image."""

    def grey(self, images: Sequence[ProcessedImage]) -> tuple[ProcessedImage, ...]:
        return tuple(replace(image, pixels_PD=np.zeros_like(image.pixels_PD)) for image in images)

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, images=self.grey(request.images))

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        return await super().score(ids, self.grey(images))


class ForgetsTheLast(PlainEngine):
    """Never reads the last token that it wrote itself: the second turn continues a stream without it."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.ends: set[tuple[int, ...]] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        known = [end for end in self.ends if request.ids[: len(end)] == end]
        if known:
            place = len(known[0]) - 1
            ids = (*request.ids[:place], *request.ids[place + 1 :])
            return replace(await super().generate(replace(request, ids=ids)), prompt_length=len(request.ids))
        completion = await super().generate(request)
        self.ends.add((*request.ids, *completion.ids))
        return completion


class MixedUp(Faulty):
    """Gives a session what another one wrote that had asked at the same time."""

    async def submit(self, session: Any, request: GenerateRequest) -> Completion:
        first = len(self._open) > 1 and request.seed == 2
        if not first:
            return await super().submit(session, request)
        other = await super().submit(session, request)
        return replace(other, ids=other.ids[::-1])


class Unnormalised(Faulty):
    """Scores with the logits in place of log-probs: too high everywhere."""

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        return await super().score(ids, images) + np.float32(0.1)


class Uncancellable(PlainEngine):
    """Writes every turn to its end, whoever still waits for it."""

    async def generate(self, request: GenerateRequest) -> Completion:
        task = asyncio.ensure_future(super().generate(request))
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
        return task.result()


class NeverPaused(PlainEngine):
    """Writes on in a pause, and says that the newest weights wrote all."""

    async def pause(self) -> None:
        return None

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, versions=((self.weight_version, len(completion.ids)),))


class KeepsWeights(Faulty):
    """Takes over the version and not the weights."""

    async def update_from_disk(self, folder: Path, version: int) -> None:
        self.weight_version = version


class StaleSession(Faulty):
    """Lets open sessions go on with the keys and values of old weights."""

    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        kept = [(session, session.prefix) for session in self._open.values()]
        super().load_weights(weights, version)
        for session, prefix in kept:
            session.prefix = prefix


class HangsAtTheEnd(Faulty):
    """Never comes back from `close`."""

    async def close(self) -> None:
        await asyncio.sleep(10_000)


class Hangs(Faulty):
    """Never scores."""

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        await asyncio.sleep(10_000)
        return await super().score(ids, images)


class Blocks(Faulty):
    """Keeps the event loop to itself."""

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        time.sleep(6)
        return await super().score(ids, images)


#: The row that must find it, and what it must say.
FAULTS: dict[Callable[[EngineSetup], Any], tuple[str, str]] = {
    Unfinished: ("protocol", "lacks async resume()"),
    Lists: ("completion", "ids must be a tuple of int, got a list of int64"),
    OwnWords: ("completion", "the engine ended with 'eos', which is none of stop, length, abort"),
    CountsImages: ("completion", "images count with all their placeholders"),
    Unnormalised: ("score", "0.1 nats off the network's on average"),
    Shifted: ("log-probs", "log-probs are not the network's"),
    UnscaledLogprobs: ("log-probs", "they are those of temperature 1"),
    NeverGreedy: ("greedy", "less likely than the most likely one"),
    TopP: ("drawing", "from the least likely 10 % of the distribution"),
    OneSeed: ("seeds", "give the same 24 tokens"),
    Retokenised: ("second turn", "never decode and encode them"),
    SuppressesNothing: ("suppressed ids", "were drawn at temperature 0"),
    StripsStop: ("stop ids", "keep that id"),
    OneMore: ("budget", "2 tokens and finish 'length', asked for 1"),
    Blind: ("images", "by 0 nats"),
    ForgetsTheLast: ("second turn", "let the second turn see all of the first"),
    MixedUp: ("many at once", "give each session its own completion"),
    Uncancellable: ("cancelling", "has not ended"),
    NeverPaused: ("pausing", "between pause() and resume() write nothing"),
    KeepsWeights: ("new weights", "load every new weight"),
    StaleSession: ("new weights", "(open session)"),
    HangsAtTheEnd: ("closing", "close() has not ended"),
    Hangs: ("score", "did not end within 4 s"),
    Blocks: ("score", "it blocks the event loop"),
}
