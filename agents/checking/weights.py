"""Checks of new weights: what was written before and after them, and that nothing of the old ones is used again.

Each check returns what was seen, or raises `Broken` or `NotApplicable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from agents.checking.reference import Reference, text_gap
from agents.checking.trial import TURN, Trial
from agents.checking.turns import LONG_TURN, LONGEST_TURN, RUN_S
from agents.engines.base import Engine
from agents.types import Completion, GenerateRequest
from envs.checks import Broken

#: What was asked for, and what was written.
Turn = tuple[GenerateRequest, Completion]
#: How long nothing may be written in a pause, in seconds.
PAUSE_S = 0.3
#: What to do where tokens have other log-probs or versions than those of the weights that wrote them.
PAUSE_FIX = "between pause() and resume() write nothing, and give each token the version of the weights that wrote it"


async def check_pausing(trial: Trial) -> str:
    """In a pause nothing is written; after it, turns go on, and each token has the version that wrote it."""
    num_tokens = LONG_TURN
    old = trial.engine.weight_version
    first = trial.network
    async with trial.first_weights_again():
        pairs, was_cut = await _paused_turns(trial, num_tokens)
        while not was_cut and num_tokens < LONGEST_TURN:  # the engine is faster than the pause came
            num_tokens *= 4
            pairs, was_cut = await _paused_turns(trial, num_tokens)
        return _judge(trial, pairs, {trial.engine.weight_version: trial.other or first} | {old: first})


def _judge(trial: Trial, pairs: list[Turn], networks: Mapping[int, Reference]) -> str:
    """Compare each token of turns that were paused with the network of its version; the last one began in the pause."""
    new = trial.engine.weight_version
    late = pairs[-1][1]
    if late.versions != ((new, len(late.ids)),):
        found = f"a turn that was asked for in the pause has versions {late.versions}, the new weights are {new}"
        raise Broken(found, PAUSE_FIX)
    counts = dict.fromkeys(networks, 0)
    for request, completion in pairs:
        for version, part, rest in _runs(request, completion):
            if version not in networks:
                raise Broken(f"versions {completion.versions}, but the weights were {list(networks)}", PAUSE_FIX)
            counts[version] += len(part.ids)
            trial.compare([(rest, part)], PAUSE_FIX, networks[version])
    seen = ", ".join(f"{count} tokens by weights {version}" for version, count in counts.items())
    return f"{len(pairs)} turns over a pause of {PAUSE_S:g} s: {seen}"


async def _paused_turns(trial: Trial, num_tokens: int) -> tuple[list[Turn], bool]:
    """Pause while turns are written, and load other weights; return the turns, and whether one was cut.

    The last turn was asked for in the pause.
    """
    requests = [trial.request(trial.prompt(n), seed=n, num_tokens=num_tokens) for n in range(3)]
    requests.append(trial.request(trial.prompt(), num_tokens=TURN))
    tasks = [asyncio.ensure_future(trial.write(request)) for request in requests[:-1]]
    try:
        await asyncio.sleep(RUN_S)
        async with trial.paused():
            num_done = sum(task.done() for task in tasks)
            tasks.append(asyncio.ensure_future(trial.write(requests[-1])))
            await asyncio.sleep(PAUSE_S)
            if sum(task.done() for task in tasks) > num_done:
                raise Broken("a turn ended in the pause", PAUSE_FIX)
            if trial.other is not None and num_done < len(requests) - 1:
                await trial.push(trial.other)
        return list(zip(requests, await asyncio.gather(*tasks), strict=True)), num_done < len(requests) - 1
    finally:
        for task in tasks:
            task.cancel()


def _runs(request: GenerateRequest, completion: Completion) -> list[tuple[int, Completion, GenerateRequest]]:
    """Return each run of a completion: its version, its tokens, and the request that they continue."""
    found = []
    start = 0
    for version, count in completion.versions:
        end = start + count
        part = replace(completion, ids=completion.ids[start:end], logprobs=completion.logprobs[start:end])
        found.append((version, part, replace(request, ids=(*request.ids, *completion.ids[:start]))))
        start = end
    return found


async def turns_over_update(
    engine: Engine,
    request: GenerateRequest,
    follow: Callable[[GenerateRequest, Completion], GenerateRequest],
    update: Callable[[], Awaitable[None]],
) -> tuple[Turn, Turn]:
    """Write a turn, update the weights, and return what is then written: in a new session, and in the open one."""
    async with engine.session() as session:
        first = await session.generate(request)
        await update()
        longer = follow(request, first)
        second = await session.generate(longer)
    async with engine.session() as session:
        fresh = await session.generate(request)
    return (request, fresh), (longer, second)


async def check_new_weights(trial: Trial) -> str:
    """After an update everything is the new network's: scores, turns, open sessions, images seen before."""
    other = trial.other_network
    version = trial.engine.weight_version + 1

    async def update() -> None:
        async with trial.paused():
            await trial.push(other)
        if trial.engine.weight_version != version:
            found = f"weight_version is {trial.engine.weight_version} after update_from_disk(folder, {version})"
            raise Broken(found, "take over the version with the weights")
        trial.doing = "generate(request)"

    async with trial.first_weights_again():
        prompt = trial.prompt(0, [1] if trial.reads_images else [])
        request = trial.request(prompt)
        await trial.engine.score(prompt.ids, prompt.images)  # what is cached of it must not be used again
        trial.doing = "generate(request)"
        turns = await turns_over_update(trial.engine, request, trial.following, update)
        for _, completion in turns:
            if completion.versions != ((version, len(completion.ids)),):
                found = f"versions {completion.versions} of a turn by weights {version}"
                raise Broken(found, "stamp each token with the version that wrote it")
        fix = "load every weight of the folder, and drop encoded images and keys and values of the old ones"
        seen = trial.compare(turns[:1], f"in a new session: {fix}", other)
        trial.compare(turns[1:], f"in a session that was open meanwhile: {fix}", other)
        got = await trial.engine.score(prompt.ids, prompt.images)
        wanted = await other.score(prompt.ids, prompt.images)
        moved = abs(wanted - await trial.network.score(prompt.ids, prompt.images)).mean()
        gap = text_gap(prompt.ids, got, wanted, trial.renderer.image_token_id)
        if gap > other.bound:
            raise Broken(f"score is {gap:.2g} nats off the new network, which moved by {moved:.2g}", fix)
    fix = "load every weight of the folder: the first weights were loaded again"
    trial.compare([(request, await trial.write(request))], fix)
    return f"the network moved by {moved:.2g} nats, and the engine with it: {seen}"
