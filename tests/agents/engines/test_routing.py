"""Claims about which server gets which session: prompts are read once for a group, and servers are equally busy."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.routing import SLACK, PromptRouter, most_sessions, prompt_key
from agents.engines.sglang.servers import Server
from agents.types import Completion, GenerateRequest, ProcessedImage, SamplingParams

PROMPT = 50
LIMIT_S = 30


class CachingServer:
    """A server that keeps every prefix it has read, as SGLang's prefix cache does, and writes one token a turn."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.num_read = 0
        self.is_down = False
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        if self.is_down:
            return web.Response(status=503)
        if request.path == "/update_weights_from_disk":
            self.seen.clear()
            return web.json_response({"success": True})
        if request.path != "/generate":
            return web.json_response({"weight_version": "default"})
        body = await request.json()
        ids = tuple(body["input_ids"])
        prefixes = [ids[:length] for length in range(1, len(ids) + 1)]
        cached = sum(prefix in self.seen for prefix in prefixes[:-1])
        self.seen.update(prefixes)
        self.num_read += len(ids) - cached
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 2, None]],
            "prompt_tokens": len(ids),
            "cached_tokens": cached,
            "weight_version": "default",
        }
        return web.json_response({"output_ids": [2], "meta_info": meta})


def on_servers(count: int, play: Callable[[SGLangEngine, Sequence[CachingServer]], Awaitable[Any]]) -> Any:
    """Run `play` with an engine on so many servers."""

    async def run() -> Any:
        servers, runners = [CachingServer() for _ in range(count)], list[web.AppRunner]()
        try:
            for server in servers:
                app = web.Application()
                app.router.add_route("*", "/{path:.*}", server.handle)
                runners.append(runner := web.AppRunner(app, shutdown_timeout=0.01))
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            engine = SGLangEngine(SGLangSettings(urls=tuple(server.url for server in servers)), None)
            try:
                await engine.start()
                return await play(engine, servers)
            finally:
                await engine.close()
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def prompt(number: int, length: int = PROMPT) -> GenerateRequest:
    ids = tuple(random.Random(number).choices(range(10, 10_000), k=length))
    return GenerateRequest(ids, (), 4, SamplingParams(), seed=0)


async def play_group(engine: SGLangEngine, number: int, size: int, turns: int = 1) -> list[list[Completion]]:
    """Play the samples of one prompt at once, each in a session of its own."""

    async def one(sample: int) -> list[Completion]:
        request, written = prompt(number), list[Completion]()
        async with engine.session() as session:
            for turn in range(turns):
                written.append(await session.generate(request))
                ids = (*request.ids, *written[-1].ids, 10_000 + sample, turn)
                request = GenerateRequest(ids, (), 4, SamplingParams(), seed=0)
        return written

    return list(await asyncio.gather(*map(one, range(size))))


@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_a_prompt_read_at_once_is_read_once_for_its_group_on_any_number_of_servers(num_servers: int) -> None:
    groups, size = 12, 8

    async def play(engine: SGLangEngine, servers: Sequence[CachingServer]) -> None:
        await asyncio.gather(*(play_group(engine, number, size) for number in range(groups)))
        # The last token of a prompt is always read: it gives the first log-prob.
        assert sum(server.num_read for server in servers) == groups * (PROMPT + size - 1)
        loads = [server.num_read for server in servers]
        assert max(loads) == min(loads)

    on_servers(num_servers, play)


def test_later_turns_read_only_what_is_new_and_forks_of_an_episode_share_a_server() -> None:
    async def play(engine: SGLangEngine, servers: Sequence[CachingServer]) -> None:
        await play_group(engine, 0, size=4, turns=3)
        second_turns = 3 + 3 * 2  # the samples have written the same token
        assert [server.num_read for server in servers] == [PROMPT + 3 + second_turns + 4 * 3, 0]
        one, other = engine.servers.all
        one.num_sessions = 1
        for busy in (0, 5, 0):  # forks after the first turn
            other.num_sessions = busy
            async with engine.session() as session:
                await session.generate(GenerateRequest((*prompt(0).ids, 2, 10_000, 0), (), 4, SamplingParams(), seed=0))
        assert servers[1].num_read == PROMPT + 3 + 2

    on_servers(2, play)


def test_new_weights_empty_the_servers_caches_and_what_is_remembered_of_them(tmp_path: Path) -> None:
    async def play(engine: SGLangEngine, servers: Sequence[CachingServer]) -> None:
        router = engine.servers.router
        await play_group(engine, 0, size=1)
        engine.servers.all[0].num_sessions = 3  # others are busy there, within balance
        assert router.choose(engine.servers.up, prompt_key(prompt(0))) is engine.servers.all[0]
        await engine.update_from_disk(tmp_path, 1)
        assert router.choose(engine.servers.up, prompt_key(prompt(0))) is engine.servers.all[1]

    on_servers(2, play)


def test_a_lost_servers_groups_move_together_and_it_gets_new_ones_when_it_is_back() -> None:
    async def play(engine: SGLangEngine, servers: Sequence[CachingServer]) -> None:
        await asyncio.gather(*(play_group(engine, number, 4) for number in range(4)))
        before = [server.num_read for server in servers]
        assert before == [2 * (PROMPT + 3)] * 2
        servers[0].is_down = True
        done = await asyncio.gather(*(play_group(engine, number, 4) for number in range(4)))
        assert all(completion.ids == (2,) for group in done for (completion,) in group)
        # Two groups were here before and have only last tokens to read; two have moved here and are read once each.
        assert servers[1].num_read - before[1] == 2 * 4 + 2 * (PROMPT + 3)
        servers[0].is_down = False
        while len(engine.servers.up) < 2:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(play_group(engine, number, 4) for number in (10, 11)))
        assert servers[0].num_read - before[0] == PROMPT + 3

    on_servers(2, play)


def servers_of(count: int) -> list[Server]:
    return [Server(f"http://server{number}", number, is_up=True) for number in range(count)]


@pytest.mark.parametrize("num_servers", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 8, 64, 500])
def test_no_server_gets_more_sessions_than_the_bound_whatever_the_groups(num_servers: int, size: int) -> None:
    rng, router, servers = random.Random(num_servers * size), PromptRouter(), servers_of(num_servers)
    begun: list[Server] = []
    for number in range(3000):
        server = router.choose(servers, number // size)
        server.num_sessions += 1
        begun.append(server)
        mean = sum(each.num_sessions for each in servers) / num_servers
        fewest = min(each.num_sessions for each in servers)
        assert server.num_sessions <= max(most_sessions(mean), fewest + 1)
        for _ in range(rng.choice((0, 1, 1, 2))):  # others end
            if begun:
                begun.pop(rng.randrange(len(begun))).num_sessions -= 1


def test_groups_of_one_step_stay_whole_and_servers_equally_busy() -> None:
    for num_servers, groups, size in ((2, 32, 8), (4, 64, 16), (8, 64, 16), (3, 100, 5)):
        router, servers = PromptRouter(), servers_of(num_servers)
        used: dict[int, Counter[int]] = {number: Counter() for number in range(groups)}
        for number in range(groups):
            for _ in range(size):
                server = router.choose(servers, number)
                server.num_sessions += 1
                used[number][server.number] += 1
        assert all(len(where) == 1 for where in used.values())
        loads = [server.num_sessions for server in servers]
        assert max(loads) - min(loads) <= size


def test_one_large_group_uses_every_server() -> None:
    router, servers = PromptRouter(), servers_of(4)
    for _ in range(512):
        router.choose(servers, 7).num_sessions += 1
    loads = [server.num_sessions for server in servers]
    assert max(loads) <= most_sessions(512 / 4) and min(loads) > 512 / 4 / 2
    assert router.choose(servers, None).num_sessions == min(loads)


def test_a_few_sessions_of_one_prompt_share_a_server() -> None:
    router, servers = PromptRouter(), servers_of(4)
    for _ in range(SLACK):
        router.choose(servers, 7).num_sessions += 1
    assert [server.num_sessions for server in servers] == [SLACK, 0, 0, 0]


def test_prompts_differ_by_their_ids_and_their_images() -> None:
    def image(digest: str) -> ProcessedImage:
        return ProcessedImage(digest, np.zeros((8, 4), np.float32), (1, 2, 4), 2)

    def of(ids: tuple[int, ...], *digests: str) -> int:
        return prompt_key(GenerateRequest(ids, tuple(map(image, digests)), 4, SamplingParams(), seed=0))

    assert of((1, 9, 9), "a") == of((1, 9, 9), "a")
    assert len({of((1, 9, 9), "a"), of((1, 9, 9), "b"), of((1, 9, 9, 1), "a"), of((1, 9, 9))}) == 4
