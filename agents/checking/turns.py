"""Checks of what a turn is made of and how calls behave.

Each check returns what was seen, or raises `Broken` or `NotApplicable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np

from agents.checking.reference import Reference
from agents.checking.trial import TURN, Trial, Turn, following
from agents.engines.base import Engine, Session, capabilities_of
from agents.engines.own import missing_parts
from agents.model.architectures import ModelFacts
from agents.rollout.invariants import broken_routes, broken_turn, check_types, expert_twice
from agents.types import Completion
from envs.checks import Broken, NotApplicable
from envs.workers.process_info import children

#: Tokens of a turn that is long enough to be interrupted, at first and at most.
LONG_TURN = 64
LONGEST_TURN = 16_384
#: How long a turn runs before it is interrupted, how soon the call must then end, and how long nothing may be written
#: in a pause, in seconds.
RUN_S = 0.2
END_S = 10.0
PAUSE_S = 0.3
#: What to do where tokens have other log-probs or versions than those of the weights that wrote them.
PAUSE_FIX = "between pause() and resume() write nothing, and give each token the version of the weights that wrote it"


async def check_protocol(trial: Trial) -> str:
    """Engine and session have the methods of the protocols, with their parameters."""
    missing = missing_parts(trial.engine, Engine)
    async with trial.engine.session() as session:
        missing += missing_parts(session, Session)
    if missing:
        raise Broken(f"lacks {', '.join(missing)}", "see Engine and Session of agents/engines/base.py")
    if trial.engine.context_length < 2 or trial.engine.weight_version != 0:
        found = f"context_length {trial.engine.context_length}, weight_version {trial.engine.weight_version}"
        raise Broken(found, "context_length is that of the setup or less, and the first weights have version 0")
    return f"{type(trial.engine).__name__}, context of {trial.engine.context_length}"


async def check_completion(trial: Trial) -> str:
    """A completion has the types and lengths that it should, and says which weights wrote it."""
    turns = [(request, await trial.write(request)) for request in map(trial.request, trial.prompts())]
    for request, completion in turns:
        if rule := _wrong_types(completion) or broken_turn(1, request, completion):
            raise Broken(rule, "see Completion of agents/types.py; images count with all their placeholders")
        if {version for version, _ in completion.versions} - {trial.engine.weight_version}:
            found = f"versions {completion.versions}, weight_version {trial.engine.weight_version}"
            raise Broken(found, "versions are runs of (weight_version at the time, tokens)")
    return f"{len(turns)} turns: ids, log-probs, prompt length, finish and versions belong together"


def _wrong_types(completion: Completion) -> str:
    """Return which field of a completion is of the wrong type; "" if none is."""
    # NumPy's and torch's numbers compare alike, but not as keys of JSON or in the invariants.
    for name, kind in {"ids": int, "logprobs": float}.items():
        values = getattr(completion, name)
        if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
            kinds = ", ".join({type(value).__name__ for value in values})
            return f"{name} must be a tuple of {kind.__name__}, got a {type(values).__name__} of {kinds}"
    return ""


async def check_stop(trial: Trial) -> str:
    """A turn ends with its first stop id, which is kept; also where the budget ends with it."""
    request = trial.request(trial.prompt(), temperature=0.0)
    free = await trial.write(request)
    # A token that the network writes anyway stands for the stop id, which it may never write.
    stop = free.ids[min(4, len(free.ids) - 1)]
    request = replace(request, sampling=replace(request.sampling, stop_ids=(stop,)))
    first = await trial.write(request)
    last = await trial.write(replace(request, max_new_tokens=len(first.ids)))
    for completion in (first, last):
        places = [place for place, token in enumerate(completion.ids) if token == stop]
        if completion.finish != "stop" or places != [len(completion.ids) - 1]:
            found = f"stop id {stop} in tokens {list(completion.ids)}, finish {completion.finish!r}"
            raise Broken(found, "end a turn at its first stop id, keep that id and its log-prob, and call it 'stop'")
    return f"ended with stop id {stop} after {len(first.ids)} tokens"


async def check_budget(trial: Trial) -> str:
    """A turn whose stop ids cannot be drawn has exactly as many tokens as asked for."""
    for budget in (1, 3 * TURN):
        request = trial.request(trial.prompt(), num_tokens=budget)
        completion = await trial.write(request)
        if len(completion.ids) != request.max_new_tokens or completion.finish != "length":
            found = f"{len(completion.ids)} tokens and finish {completion.finish!r}, asked for {request.max_new_tokens}"
            raise Broken(found, "end a turn after max_new_tokens ('length') or a stop id ('stop'), at nothing else")
    return f"1 and {3 * TURN} tokens, as many as asked for"


async def check_concurrency(trial: Trial) -> str:
    """Turns that are written at once, more of them than a batch holds, do not mix."""
    prompts = trial.prompts()
    numbers = range(trial.setup.max_batch + 2)
    requests = [trial.request(prompts[n % len(prompts)], seed=n, num_tokens=8 + n) for n in numbers]
    together = await trial.write_all(requests)
    fix = "give each session its own completion, and let no turn change another's"
    return f"{len(requests)} at once: {trial.compare(together, fix)}"


async def check_second_turn(trial: Trial) -> str:
    """A session's second turn reads the first as it was drawn, ids that no tokenizer would choose included."""
    # At a high temperature, the text of most turns would be cut into other ids.
    request = trial.request(trial.with_image(), temperature=2.0, seed=200)
    async with trial.engine.session() as session:
        first = await session.generate(request)
        trial.compare([(request, first)], "keep ids as ids: never decode and encode them")
        longer = following(trial, request, first)
        second = await session.generate(longer)
    if second.prompt_length != len(longer.ids):
        found = f"read {second.prompt_length} tokens of {len(longer.ids)}"
        raise Broken(found, "the request holds the whole stream: read what is new of it, and count all")
    fix = "let the second turn see all of the first as it was drawn, its last token and the new images included"
    return trial.compare([(longer, second)], fix)


async def check_routes(trial: Trial) -> str:
    """Two turns say which experts each token took in each layer: as many as the network has, none twice."""
    shape = ModelFacts.load(trial.setup.model_path).routes
    if shape is None:
        raise NotApplicable("the model is no mixture of experts")
    if not capabilities_of(trial.engine).gives_routes:
        raise NotApplicable("the engine does not say which experts a token took: its capabilities lack gives_routes")
    request = replace(trial.request(trial.with_image()), num_routed=0)
    async with trial.engine.session() as session:
        first = await session.generate(request)
        num_routed = len(request.ids) + len(first.ids) - 1
        longer = replace(following(trial, request, first), num_routed=num_routed)
        second = await session.generate(longer)
    fix = "give routes_RLK of the tokens from num_routed on to the last one that was read; see agents/types.py"
    routes = []
    for number, (asked, completion) in enumerate(((request, first), (longer, second)), 1):
        check_types(completion)
        if rule := broken_routes(number, asked, completion, shape):
            raise Broken(rule, fix)
        routes.append(completion.routes_RLK)
    routes_RLK = np.concatenate(routes)
    if rule := expert_twice(routes_RLK):
        raise Broken(rule, fix)
    return f"experts of {len(routes_RLK)} tokens in {shape.num_layers} layers, over two turns"


async def ended(call: Awaitable[object], what: str) -> BaseException | None:
    """Await what must end soon, however it ends; return its exception.

    Raises:
        Broken: it did not end.
    """
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait([task], timeout=END_S)
    if not done:
        # Read at its end, so that asyncio does not report an exception that nobody fetched.
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise Broken(f"{what} has not ended {END_S:.0f} s later", "end the call at once, and stop writing")
    if task.cancelled():
        return None
    return task.exception()


async def check_cancelling(trial: Trial) -> str:
    """A cancelled call ends soon; its session and others write on as if it had never been."""
    long = trial.request(trial.prompt(3), num_tokens=LONGEST_TURN)
    cut = replace(long, max_new_tokens=min(TURN, long.max_new_tokens))
    short = trial.request(trial.prompt())
    turns: list[Turn] = []
    # Cancelled before it has begun, and while it is being written.
    for run_s in (0.0, RUN_S):
        async with trial.engine.session() as session:
            task = asyncio.ensure_future(session.generate(long))
            await asyncio.sleep(run_s)
            task.cancel()
            if error := await ended(task, "a cancelled generate(request)"):
                raise Broken(f"a cancelled turn raises {type(error).__name__}: {error}", "raise CancelledError")
            turns.append((short, await trial.write(short)))
            turns.append((cut, await session.generate(cut)))
    return f"after it {trial.compare(turns, 'forget what the cancelled turn has written')}"


async def check_pausing(trial: Trial) -> str:
    """In a pause nothing is written; after it, turns go on, and each token has the version that wrote it."""
    networks = {trial.engine.weight_version: trial.network}
    num_tokens = LONG_TURN
    async with trial.first_weights_again():
        turns = await _paused_turns(trial, num_tokens, networks)
        while len(networks) == 1 and num_tokens < LONGEST_TURN:  # the engine is faster than the pause came
            num_tokens *= 4
            turns = await _paused_turns(trial, num_tokens, networks)
        for request, completion in turns:
            start = 0
            for version, count in completion.versions:
                if version not in networks:
                    raise Broken(f"versions {completion.versions}, the weights were {list(networks)}", PAUSE_FIX)
                part = slice(start, start + count)
                run = replace(completion, ids=completion.ids[part], logprobs=completion.logprobs[part])
                before = replace(request, ids=(*request.ids, *completion.ids[:start]))
                trial.compare([(before, run)], PAUSE_FIX, networks[version])
                start += count
    return f"{len(turns)} turns over a pause of {PAUSE_S:g} s, by weights {' and '.join(map(str, networks))}"


async def _paused_turns(trial: Trial, num_tokens: int, networks: dict[int, Reference]) -> list[Turn]:
    """Return turns over a pause. If it cuts one, other weights are loaded in it and added to `networks`.

    The last turn was asked for in the pause.
    """
    other = trial.other_network
    requests = [trial.request(trial.prompt(n), seed=n, num_tokens=num_tokens) for n in range(3)]
    tasks = [asyncio.ensure_future(trial.write(request)) for request in requests]
    try:
        await asyncio.sleep(RUN_S)
        async with trial.paused():
            running = [task for task in tasks if not task.done()]
            requests.append(trial.request(trial.prompt()))
            tasks.append(asyncio.ensure_future(trial.write(requests[-1])))
            await asyncio.sleep(PAUSE_S)
            if tasks[-1].done() or any(task.done() for task in running):
                raise Broken("a turn ended in the pause", PAUSE_FIX)
            if running:
                await trial.push(other)
                networks[trial.engine.weight_version] = other
        return list(zip(requests, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()


async def check_closing(trial: Trial, num_children: int, with_turn: bool) -> str:
    """Closing ends turns and processes, and may be done twice. `with_turn`: while a turn is being written."""
    tasks = []
    if with_turn:
        tasks.append(asyncio.ensure_future(trial.write(trial.request(trial.prompt(3), num_tokens=LONGEST_TURN))))
        await asyncio.sleep(RUN_S)
    for times in ("close()", "a second close()"):
        if error := await ended(trial.engine.close(), times):
            raise Broken(f"{times} raises {type(error).__name__}: {error}", "close whatever there is")
    for task in tasks:
        await ended(task, "a turn that was being written when close() came")
    left = len(children()) - num_children
    if left > 0:
        raise Broken(f"{left} child processes are left", "end in close() what the engine has started")
    return "turns have ended, no process is left, and it can be done twice"
