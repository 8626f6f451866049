"""Claims about the checksums that prove which weights a server holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.servers import Server
from agents.engines.weight_servers import ServerRefused
from agents.rendering.renderer import Renderer
from tests.agents.engines.sglang_server import held_by
from tests.trainer.weight_sync.test_sync import learner_of, move
from trainer.learner.checksums import TensorSlice, checksum, checksums, word_hash
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.weight_sender import RankSender
from trainer.weight_sync.weight_checks import SHARES, WeightChecks, WeightsDiffer


def mixed(x: int) -> int:
    """The final mix of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ x >> shift) * factor) % 2**32
    return x ^ x >> 16


def one_word_at_a_time(values: bytes) -> int:
    """The hash of SGLang's GPU kernel, in plain integers: word by word, 8,192 of them in a tile."""
    values += bytes(-len(values) % 4)
    words = np.frombuffer(values, dtype="<u4").tolist()
    seeds = 0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) % 2**32
    total = 0
    for start in range(0, len(words), 8192):
        halves = []
        for seed, factor, turn in ((seeds[0], 0x27D4EB2D, 15), (seeds[1], 0x165667B1, 13)):
            tile = 0
            for i, word in enumerate(words[start : start + 8192], start):
                turned = (i << turn | i >> 32 - turn) % 2**32
                tile = (tile + mixed(word ^ (i * factor + seed) % 2**32 ^ turned)) % 2**32
            halves.append(mixed(tile ^ len(words) * 4 % 2**32))
        total = (total + (halves[0] << 32 | halves[1])) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ total >> shift) * factor % 2**64
    return total ^ total >> 31


@pytest.mark.parametrize("count", [1, 7, 4096, 40_000])
def test_the_hash_in_tensor_operations_is_that_of_one_word_at_a_time(count: int) -> None:
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert word_hash(flat) == one_word_at_a_time(flat.numpy().tobytes())
    other = flat.clone()
    other[count // 2] ^= 1
    assert word_hash(other) != word_hash(flat)


def test_cuts_are_parts_of_weights_joined_by_rows() -> None:
    q, k = torch.arange(8.0).view(4, 2), torch.arange(8.0, 12.0).view(2, 2)
    whole = TensorSlice(("q", "k"))
    half = TensorSlice(("q", "k"), index=1, count=2)
    columns = TensorSlice(("q",), axis=1, index=0, count=2)
    third = TensorSlice(("k",), index=0, count=3)
    stream = [("q", q), ("norm", torch.ones(2)), ("k", k)]
    assert checksums(stream, [whole, half, columns, third]) == {
        whole: checksum(torch.cat([q, k])),
        half: checksum(torch.cat([q[2:], k[1:]])),
        columns: checksum(q[:, :1]),
    }


class OneServer:
    """Answers `checksums` for a server of so many GPUs with some weights."""

    def __init__(self, weights: Mapping[str, Tensor], num_gpus: int) -> None:
        self.weights, self.num_gpus, self.url = dict(weights), num_gpus, "http://nowhere"

    async def checksums(self) -> list[dict[str, str]]:
        return [held_by(self.weights, gpu, self.num_gpus) for gpu in range(self.num_gpus)]


def checks_of(learner: FSDPLearner, client: Any) -> WeightChecks:
    engine = SGLangEngine(SGLangSettings(), None)
    engine.servers.all = [Server(client.url, 0, is_up=True)]
    engine.servers.all[0].client = client
    return WeightChecks(engine, RankSender(learner))


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_wrong_tensor_is_found_within_the_shares_wherever_it_is_and_right_ones_never(
    checkpoint: Path, renderer: Renderer, num_gpus: int
) -> None:
    learner = learner_of(checkpoint, renderer)
    client = OneServer(dict(learner.stream()), num_gpus)
    checks = checks_of(learner, client)

    async def play(names: Sequence[str]) -> None:
        await checks.check()  # finds out how the server holds what it has
        for _ in range(SHARES + 1):
            move(learner)
            client.weights = {name: weight.clone() for name, weight in learner.stream()}
            await checks.check()
        for name in names:
            right = client.weights[name]
            client.weights[name] = right.clone()
            client.weights[name].view(-1)[-1] += 1e-3
            with pytest.raises(WeightsDiffer, match="server 0 holds other weights"):
                for _ in range(SHARES):
                    await checks.check()
            client.weights[name] = right

    asyncio.run(play([name for place, name in enumerate(client.weights) if place % 5 == 0]))


def test_a_server_without_checksums_is_left_to_the_probe(checkpoint: Path, renderer: Renderer) -> None:
    learner = learner_of(checkpoint, renderer)

    class NoChecksums(OneServer):
        async def checksums(self) -> list[dict[str, str]]:
            raise ServerRefused("status 404")

    asyncio.run(checks_of(learner, NoChecksums({}, 1)).check())


def test_what_cannot_be_compared_is_said(checkpoint: Path, renderer: Renderer) -> None:
    learner = learner_of(checkpoint, renderer)
    weights = dict(learner.stream())
    checks = checks_of(
        learner, OneServer({**weights, "model.turned": next(iter(weights.values())).flatten().flip(0)}, 1)
    )
    asyncio.run(checks.check())
    (event,) = checks._engine.servers.events
    assert event.startswith("checksums compare") and event.endswith("are left to the probe")
