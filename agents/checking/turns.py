"""Checks of what a turn is made of and how calls behave. None needs to know the network's probabilities.

Each check returns what was seen, or raises `Broken` or `NotApplicable`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from dataclasses import replace

from agents.checking.trial import TURN, Trial
from agents.engines.base import Engine, Session
from agents.engines.own import missing_parts
from agents.rollout.invariants import FINISHES, MAX_LOGPROB, broken_turn
from agents.types import Completion, GenerateRequest
from envs.checks import Broken, NotApplicable
from envs.workers.process_info import children

#: Tokens of a turn that is long enough to be interrupted, at first and at most.
LONG_TURN = 64
LONGEST_TURN = 16_384
#: How long a turn runs before it is interrupted, and how soon the call must then end, in seconds.
RUN_S = 0.2
END_S = 10.0


async def check_protocol(trial: Trial) -> str:
    """Engine and session have the methods of the protocols, with their parameters."""
    missing = missing_parts(trial.engine, Engine)
    trial.doing = "session()"
    async with trial.engine.session() as session:
        missing += missing_parts(session, Session)
    if missing:
        raise Broken(f"lacks {', '.join(missing)}", "see Engine and Session of agents/engines/base.py")
    if trial.engine.context_length < 2 or trial.engine.weight_version != 0:
        found = f"context_length {trial.engine.context_length}, weight_version {trial.engine.weight_version}"
        raise Broken(found, "context_length is that of the setup or less, and the first weights have version 0")
    if not missing_parts(trial.engine):
        trainable = "takes new weights"
    else:
        trainable = "cannot be trained, only evaluated"
    return f"{type(trial.engine).__name__}, context of {trial.engine.context_length}, {trainable}"


async def check_completion(trial: Trial) -> str:
    """A completion has the types and lengths that it should, and says which weights wrote it."""
    requests = [trial.request(prompt, stop_ids=trial.renderer.stop_ids) for prompt in trial.prompts()]
    for request in requests:
        completion = await trial.write(request)
        if rule := _broken_types(completion, trial):
            raise Broken(rule, "see Completion of agents/types.py")
        # The length of the prompt has a check of its own.
        if rule := broken_turn(1, request, replace(completion, prompt_length=len(request.ids))):
            raise Broken(rule, "see Completion of agents/types.py")
        if {version for version, _ in completion.versions} - {trial.engine.weight_version}:
            found = f"versions {completion.versions}, weight_version {trial.engine.weight_version}"
            raise Broken(found, "versions are runs of (weight_version at the time, tokens)")
    return f"{len(requests)} turns: ids, log-probs, finish and versions belong together"


def _broken_types(c: Completion, trial: Trial) -> str:
    """Return which field of a completion is of the wrong type or out of range; "" if none is."""
    if trial.reference:
        num_ids = trial.reference.num_ids
    else:
        num_ids = len(trial.renderer.tokenizer)
    if not isinstance(c.ids, tuple) or not all(type(token) is int for token in c.ids):
        return f"ids must be a tuple of int, got {_shown(c.ids)}"
    if wrong := [token for token in c.ids if not 0 <= token < num_ids]:
        return f"id {wrong[0]} is not in the vocabulary of {num_ids}"
    if not isinstance(c.logprobs, tuple) or not all(isinstance(value, float) for value in c.logprobs):
        return f"logprobs must be a tuple of float, got {_shown(c.logprobs)}"
    if wrong := [value for value in c.logprobs if not -math.inf < value <= MAX_LOGPROB]:
        return f"a log-prob must be finite and at most 0, got {wrong[0]}"
    if c.finish not in FINISHES:
        return f"finish must be one of {', '.join(FINISHES)}, got {c.finish!r}"
    if not isinstance(c.versions, tuple) or not isinstance(c.num_cached, int) or c.num_cached < 0:
        return f"versions must be a tuple and num_cached a whole number, got {c.versions!r} and {c.num_cached!r}"
    return ""


def _shown(value: object) -> str:
    if isinstance(value, list | tuple) and value:
        inside = f" of {type(value[0]).__name__}"
    else:
        inside = ""
    return f"a {type(value).__name__}{inside}"


async def check_prompt_length(trial: Trial) -> str:
    """The engine's own count of the tokens that it has read is the request's, each placeholder counted."""
    lengths = []
    for prompt in trial.prompts():
        completion = await trial.write(trial.request(prompt, num_tokens=2))
        lengths.append(len(prompt.ids))
        if completion.prompt_length != len(prompt.ids):
            found = f"read {completion.prompt_length} tokens of {len(prompt.ids)}, {len(prompt.images)} images"
            raise Broken(found, "read the request's ids as they are, and count every placeholder")
    return f"{', '.join(map(str, lengths))} tokens{', images included' if trial.reads_images else ''}"


async def check_stop(trial: Trial) -> str:
    """A turn ends with its first stop id, which is kept; also where the budget ends with it."""
    request = trial.request(trial.prompt(), temperature=0.0, stop_ids=trial.renderer.stop_ids)
    if trial.reference is not None:
        free = await trial.write(trial.request(trial.prompt(), temperature=0.0))
        stop = free.ids[min(4, len(free.ids) - 1)]
        sampling = replace(trial.request(trial.prompt(), temperature=0.0).sampling, stop_ids=(stop,))
        request = replace(request, sampling=sampling)
    first = await trial.write(request)
    last = await trial.write(replace(request, max_new_tokens=len(first.ids)))
    for completion in (first, last):
        stops = set(request.sampling.stop_ids)
        places = [place for place, token in enumerate(completion.ids) if token in stops]
        if completion.finish != "stop" or places != [len(completion.ids) - 1]:
            found = (
                f"stop ids {sorted(stops)} at {places} of {len(completion.ids)} tokens, finish {completion.finish!r}"
            )
            raise Broken(found, "end a turn at its first stop id, keep that id and its log-prob, and call it 'stop'")
    return f"ended with stop id {first.ids[-1]} after {len(first.ids)} tokens"


async def check_budget(trial: Trial) -> str:
    """A turn has no more tokens than asked for; where no stop id can be drawn, exactly as many."""
    seen = []
    for budget in (1, 3 * TURN):
        request = trial.request(trial.prompt(), num_tokens=budget)
        completion = await trial.write(request)
        wanted = request.max_new_tokens
        num_tokens = len(completion.ids)
        is_cut = num_tokens == wanted and completion.finish == "length"
        may_stop = trial.reference is None and num_tokens <= wanted and completion.finish == "stop"
        if not is_cut and not may_stop:
            found = f"{num_tokens} tokens and finish {completion.finish!r}, asked for {wanted} and no stop id possible"
            raise Broken(found, "end a turn after max_new_tokens ('length') or a stop id ('stop'), at nothing else")
        seen.append(num_tokens)
    return f"{' and '.join(map(str, seen))} tokens, as many as asked for"


async def check_seeds(trial: Trial) -> str:
    """Other seeds give other turns. One seed should give one turn."""
    if trial.reference is None:
        raise NotApplicable("an engine without a network")
    requests = [trial.request(trial.prompt(3), temperature=2.0, seed=seed) for seed in (1, 1, 2, 3)]
    first, again, *others = [(await trial.write(request)).ids for request in requests]
    if all(ids == first for ids in others):
        raise Broken(f"seeds 1, 2 and 3 give the same {len(first)} tokens", "draw with the request's seed")
    if first != again:
        return "other seeds give other tokens; one seed does not repeat, so runs will not"
    return "one seed gives the same tokens again, others give others"


async def check_concurrency(trial: Trial) -> str:
    """Turns that are written at once, more of them than a batch holds, are those that are written one by one."""
    prompts = trial.prompts()
    requests = [
        trial.request(prompts[number % len(prompts)], seed=number, num_tokens=8 + number)
        for number in range(trial.setup.max_batch + 2)
    ]
    together = await trial.write_all(requests)
    fix = "give each session its own completion, and let no turn change another's"
    found = ""
    if trial.reference is not None:
        found = trial.compare(list(zip(requests, together, strict=True)), fix)
    tried = (0, len(requests) // 2, len(requests) - 1)
    num_same = sum([(await trial.write(requests[number])).ids == together[number].ids for number in tried])
    # Another batch rounds otherwise, so a network may draw another token: only the log-probs can tell.
    if trial.reference is None and num_same < len(tried):
        raise Broken(f"{len(tried) - num_same} of {len(tried)} turns are others when they are alone", fix)
    return f"{len(requests)} at once: {found}; {num_same} of {len(tried)} have the same tokens when alone"


def _is_same(trial: Trial, request: GenerateRequest, one: Completion, other: Completion) -> bool:
    """Return whether two turns at temperature 0 are equal up to their first near-tie."""
    pairs = zip(one.ids, other.ids, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), -1)
    if place < 0:
        return len(one.ids) == len(other.ids)
    if trial.reference is None:
        return False
    row_V = trial.reference.table(request, one.ids)[place]
    return abs(float(row_V[one.ids[place]] - row_V[other.ids[place]])) < 4 * trial.reference.bound


async def check_second_turn(trial: Trial) -> str:
    """A session's second turn, whose stream extends the first, is that of a fresh session."""
    request = trial.request(trial.prompt(0, [1] if trial.reads_images else []), temperature=0.0)
    async with trial.engine.session() as session:
        first = await trial.generate(session, request)
        longer = trial.following(request, first)
        second = await trial.generate(session, longer)
    if second.prompt_length != len(longer.ids):
        found = f"read {second.prompt_length} tokens of {len(longer.ids)}"
        raise Broken(found, "the request holds the whole stream: read what is new of it, and count all")
    if trial.reference is None:
        return f"read all {len(longer.ids)} tokens"
    fix = "let the second turn see all of the first, its last token and the new images included"
    seen = trial.compare([(longer, second)], fix)
    fresh = await trial.write(longer)
    if not _is_same(trial, longer, second, fresh):
        raise Broken("it is another turn in a fresh session", fix)
    return f"{seen}; the same in a fresh session"


async def ended(call: Awaitable[object], what: str) -> object:
    """Await what must end soon, however it ends; return its result or exception.

    Raises:
        Broken: it did not end.
    """
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait([task], timeout=END_S)
    if not done:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise Broken(f"{what} has not ended {END_S:.0f} s later", "end the call at once, and stop writing")
    if task.cancelled():
        return None
    return task.exception() or task.result()


async def check_cancelling(trial: Trial) -> str:
    """A cancelled call ends soon; its session and others write on as if it had never been."""
    long = trial.request(trial.prompt(3), num_tokens=LONGEST_TURN)
    cut = replace(long, max_new_tokens=min(TURN, long.max_new_tokens))
    short = trial.request(trial.prompt())
    waits = []
    pairs = []
    for run_s in (0.0, RUN_S):
        async with trial.engine.session() as session:
            task = asyncio.ensure_future(trial.generate(session, long))
            await asyncio.sleep(run_s)
            cancelled = time.monotonic()
            task.cancel()
            result = await ended(task, "a cancelled generate(request)")
            waits.append(time.monotonic() - cancelled)
            if isinstance(result, Exception):
                raise Broken(f"a cancelled turn raises {type(result).__name__}: {result}", "raise CancelledError")
            pairs.append((short, await ended(trial.write(short), "a turn of another session, after the cancelling,")))
            pairs.append((cut, await ended(trial.generate(session, cut), "the session's next turn")))
    for _, completion in pairs:
        if isinstance(completion, BaseException):
            raise Broken(f"a turn after it raises {type(completion).__name__}: {completion}", "let others go on")
    seen = ""
    if trial.reference is not None:
        completions = [(request, c) for request, c in pairs if isinstance(c, Completion)]
        seen = f"; after it {trial.compare(completions, 'forget what the cancelled turn has written')}"
    return f"ended after {1000 * max(waits):.0f} ms{seen}"


async def check_closing(trial: Trial, num_children: int, with_turn: bool) -> str:
    """Closing ends turns and processes, and may be done twice. `with_turn`: while a turn is being written."""
    tasks = []
    if with_turn:
        request = trial.request(trial.prompt(3), num_tokens=LONGEST_TURN)
        tasks = [asyncio.ensure_future(trial.write(request))]
        await asyncio.sleep(RUN_S)
    for times in ("close()", "a second close()"):
        trial.doing = times
        result = await ended(trial.engine.close(), times)
        if isinstance(result, Exception):
            raise Broken(f"{times} raises {type(result).__name__}: {result}", "close whatever there is")
    for task in tasks:
        await ended(task, "a turn that was being written when close() came")
    left = len(children()) - num_children
    if left > 0:
        raise Broken(f"{left} child processes are left", "end in close() what the engine has started")
    return (
        f"turns have ended, no process is left, and it can be done twice{'' if with_turn else '; tried without turns'}"
    )
