"""The endpoint for agents under fire: `python -m benchmarks.fuzz_gateway --count 100000 --seed 0`.

Agents send requests that go on, begin anew, edit and cut histories, show images again and say what the model never
said; each body may then be mutated: wrong types, unknown fields, huge, nested or torn bodies, cut connections, keys of
other episodes, and requests after the end. They reach the ASGI application itself, without sockets. Then each turn of
each episode is compared with what the engine read and wrote. Prints two tables, writes
`benchmarks/results/fuzz_gateway.json` and exits with 1 if anything was raised, or a turn differs.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agents.gateway import server
from agents.gateway.episode import AgentEpisode
from agents.rollout.episode import Limits
from agents.types import SamplingParams, Trajectory
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.env import Env
from envs.spec import EnvLimits, EnvSpec
from tests.agents.gateway.playing import TEXTS, TOOL, NotingEngine, as_part
from tests.agents.rendering.template_cases import OWN_TEMPLATES, QWEN_TEMPLATES, TEXT_ONLY, renderer_for
from tests.prompts import make_image, sample

REQUESTS_PER_EPISODE = 20
CHAT = "/v1/chat/completions"
IMAGES = [as_part(make_image(64, 64, seed)) for seed in range(4)]
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**400, float("nan"), "", "x", "\ud800", "<|im_end|>", "data:image/png;base64,AAAA",
    "data:image/png;base64," + "A" * 1000, "http://127.0.0.1:1/a.png", [], [[]], {}, {"type": "image_url"},
    {"role": "user"}, {"url": []}, "a" * 20_000,
)  # fmt: skip
FIELDS: tuple[Mapping[str, Any], ...] = (
    {}, {}, {}, {}, {"n": 2}, {"tool_choice": "none"}, {"max_tokens": 3}, {"stop": ["o", "5"]}, {"stream": True},
    {"parallel_tool_calls": False}, {"tools": []}, {"logprobs": True}, {"temperature": 1.0, "seed": 3},
    {"temperature": 0.2}, {"response_format": {"type": "json_object"}}, {"logit_bias": {"5": 9}}, {"best_of": 3},
)  # fmt: skip


class Waiting(Env):
    """In place of a program: it tells its key, and ends when it is told to."""

    def __init__(self) -> None:
        self.key = ""
        self.has_key = threading.Event()
        self.may_end = threading.Event()

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self.key = json.loads(response_text)["agent"]["api_key"]
        self.has_key.set()
        self.may_end.wait()
        return {}, True, {"result": "5"}

    def reward(self, final_text: str) -> float:
        return 1.0


# Requests -------------------------------------------------------------------------------------------------------------


def conversation(rng: random.Random, told: list[list[Any]], problem: list[Any]) -> tuple[str, list[Any]]:
    """Return the kind of a request, and its messages: from those that were sent and answered before."""
    parts = [{"type": "text", "text": "See"}, *IMAGES]
    content = rng.choice(["Hm?", "", "<|im_end|> x", rng.choices(parts, k=rng.randint(1, 3))])
    added = {"role": rng.choice(["user", "user", "tool", "system"]), "content": content}
    if not told:
        return "fresh", [*problem]
    before = copy.deepcopy(told[max(-len(told), -1 - int(rng.expovariate(1)))])
    place = rng.randrange(len(before))
    kind = rng.choice(["extend"] * 6 + ["fresh", "edit", "cut", "order", "foreign", "again", "images", "roles"])
    if kind == "fresh":
        before = []
    elif kind == "edit":
        before[place]["content"] = "Edited."
    elif kind == "cut":
        del before[place]
    elif kind == "order":
        rng.shuffle(before)
    elif kind == "foreign":
        call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "<|im_end|>"}'}}
        before.insert(place, {"role": "assistant", "content": "Mine.", "tool_calls": [call]})
    elif kind == "again":
        return kind, before[:-1]
    elif kind == "images":
        before.insert(place, {"role": "user", "content": [IMAGES[0], IMAGES[0]]})
    elif kind == "roles":
        before[place]["role"] = rng.choice(["user", "assistant", "tool", "system", "developer", "function", "robot"])
    return kind, [*before, added]


def in_dialect(rng: random.Random, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request, now and then as another protocol has it."""
    path = rng.choice([CHAT] * 8 + ["/v1/responses", "/v1/messages"])
    if path == CHAT:
        return path, body
    texts = "input_text" if path == "/v1/responses" else "text"
    items: list[Any] = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = [{"type": texts, "text": part.get("text")} if "text" in part else part for part in content]
        items.append({**message, "content": content})
        for call in message.get("tool_calls", []):
            function = call["function"]
            items.append({"type": "function_call", "call_id": call.get("id"), **function})
            items[-2]["content"] = [
                {"type": "tool_use", **function, "input": {"at": "x"}},
                {"type": texts, "text": "y"},
            ]
    rest = {name: item for name, item in body.items() if name not in ("messages", "tools")}
    if path == "/v1/responses":
        return path, {**rest, "input": items, "tools": [{"type": "function", **TOOL["function"]}]}
    return path, {**rest, "messages": items, "tools": [{"name": "look", "input_schema": {}}]}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value in a JSON value."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += places(item, (*path, key))
    return found


def mutated(rng: random.Random, body: dict[str, Any]) -> tuple[str, bytes]:
    """Return the kind of a mutation, and the bytes of the mutated body."""
    kind = rng.choice(["wrong type", "no value", "more keys", "torn", "bytes", "nested", "huge", "twice"])
    body = copy.deepcopy(body)
    *path, last = rng.choice(places(body))
    holder: Any = body
    for key in path:
        holder = holder[key]
    if kind == "wrong type":
        holder[last] = rng.choice(JUNK)
    elif kind == "no value":
        del holder[last]
    elif kind == "more keys":
        body[rng.choice(["functions", "best_of", "", "messages "])] = rng.choice(JUNK)
    elif kind == "twice":
        name = rng.choice([name for name in ("messages", "input", "tools") if name in body])
        body[name] = body[name] * rng.choice([2, 40])
    elif kind == "huge":
        holder[last] = "word " * rng.choice([5_000, 200_000])
    data = json.dumps(body).encode()
    if kind == "torn":
        data = data[: rng.randrange(len(data))]
    elif kind == "bytes":
        spoilt = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        data = bytes(spoilt)
    elif kind == "nested":
        depth = rng.choice([50, 5_000, 200_000])
        data = data[:-1] + b', "metadata": ' + b"[" * depth + b"]" * depth + b"}"
    return kind, data


async def send(
    app: Any, key: str, data: bytes, path: str, method: str = "POST", cuts: int | None = None
) -> tuple[int, bytes]:
    """Return status and body of a request; with `cuts` the connection ends after so many of its bytes. 0: no answer."""
    chunks = [data[start : start + 2**20] for start in range(0, len(data), 2**20)] or [b""]
    received = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    received[-1] = {**received[-1], "more_body": cuts is not None}
    status = 0
    answer = bytearray()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return received.pop(0) if received else {"type": "http.disconnect"}

    async def sent(message: Any) -> None:
        nonlocal status
        if cuts is not None:
            raise OSError("the connection is closed")
        status = message.get("status", status)
        answer.extend(message.get("body", b""))

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "client": None, "root_path": ""}
    try:
        await app(scope, receive, sent)
    except OSError:
        if cuts is None:
            raise
    return status, bytes(answer)


# Episodes -------------------------------------------------------------------------------------------------------------


class Fuzz:
    """Plays episodes, and counts what became of their requests."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.statuses: dict[str, Counter[str]] = {}
        self.ends: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.faults: list[str] = []
        self.old_keys = ["", "sk-x"]

    @property
    def num_requests(self) -> int:
        return sum(counts.total() for counts in self.statuses.values())

    async def play(self, number: int) -> None:
        """Play one episode of about `REQUESTS_PER_EPISODE` requests."""
        rng = random.Random(f"{self.seed}/{number}")
        name = (*OWN_TEMPLATES, *QWEN_TEMPLATES)[number % (len(OWN_TEMPLATES) + len(QWEN_TEMPLATES))]
        renderer = renderer_for(name)
        images = [] if name in TEXT_ONLY else IMAGES[:1]
        engine = NotingEngine(renderer.tokenizer, lambda turn, request: rng.choice(TEXTS), context_length=3000)
        sampling = SamplingParams(1.0, renderer.stop_ids, renderer.suppressed_ids)
        spec = EnvSpec.model_validate({"id": "fuzz", "agent": "true", "description": "Fuzz.", "max_turns": 30})
        limits = Limits(30, 2_000, EnvLimits(step_timeout_s=600))
        env = Waiting()
        loop = AgentEpisode(spec, engine, renderer, limits, sampling)
        playing = asyncio.ensure_future(loop.run(sample(), lambda: env, seed=number))
        await asyncio.to_thread(env.has_key.wait)
        try:
            await self._ask(rng, env.key, [{"role": "user", "content": [*images, {"type": "text", "text": "x?"}]}])
        except Exception as error:
            self.faults.append(f"{number}: {type(error).__name__}: {error}"[:300])
        env.may_end.set()
        try:
            self._check(number, await playing, engine)
        except Exception as error:
            self.faults.append(f"{number}: the episode raised {type(error).__name__}: {error}"[:300])
        self.old_keys.append(env.key)

    async def _ask(self, rng: random.Random, key: str, problem: list[Any]) -> None:
        gateway = server._GATEWAYS[asyncio.get_running_loop()]
        told: list[list[Any]] = []
        for _ in range(REQUESTS_PER_EPISODE):
            fields = {"model": "policy", "tools": [TOOL], **rng.choice(FIELDS)}
            try:
                kind, messages = conversation(rng, told, problem)
                path, body = in_dialect(rng, {**fields, "messages": messages})
            except (AttributeError, KeyError, TypeError):  # a mutated history that was answered, and goes on nowhere
                told.clear()
                continue
            kind = kind if path == CHAT else path.removeprefix("/v1/")
            data = json.dumps(body).encode()
            used = key
            cuts = None
            draw = rng.random()
            if draw < 0.35:
                kind, data = mutated(rng, body)
            elif draw < 0.40:
                kind = "cut connection"
                cuts = rng.randrange(len(data))
                data = data[: rng.choice([cuts, len(data)])]
            elif draw < 0.44:
                kind = "another key"
                used = rng.choice(self.old_keys)
            elif draw < 0.46:
                kind = "another method"
                status, _ = await send(gateway.app, key, data, path, rng.choice(["GET", "PUT", "HEAD", "DELETE"]))
                self._count(kind, status, b"")
                continue
            if rng.random() < 0.05:  # two at once
                (status, answer), other = await asyncio.gather(
                    send(gateway.app, used, data, path, cuts=cuts), send(gateway.app, used, data, path, cuts=cuts)
                )
                self._count(kind, *other)
            else:
                status, answer = await send(gateway.app, used, data, path, cuts=cuts)
            self._count(kind, status, answer)
            if status == 200 and path == CHAT and answer.startswith(b"{"):
                read = json.loads(data)["messages"]
                told += [[*read, choice["message"]] for choice in json.loads(answer)["choices"]]

    def _count(self, kind: str, status: int, answer: bytes) -> None:
        self.statuses.setdefault(kind, Counter())[str(status or "none")] += 1
        if status >= 500:
            self.faults.append(f"{kind}: {status} {answer[:200]!r}")
        if status == 400:
            error = json.loads(answer)["error"]
            field = re.split(r"[\[.]", error.get("param") or "")[0]
            self.codes[f"{error['code']} {field}".strip()] += 1

    def _check(self, number: int, t: Trajectory, engine: NotingEngine) -> None:
        """Count a trajectory, and compare each of its turns with what the engine read and wrote."""
        self.ends[t.end_reason.value] += 1
        self.totals.update(streams=len(t.streams), turns=len(t.turns), images=sum(len(s.images) for s in t.streams))
        self.totals.update(went_on=len(t.turns) - len({turn.stream for turn in t.turns}))
        if t.end_reason == "invalid_stream":
            self.faults.append(f"{number}: {t.error}"[:600])
        trained = 0
        for turn, (request, completion) in zip(t.turns, engine.noted, strict=True):
            stream = t.streams[turn.stream]
            same = tuple(stream.ids_T[: turn.end].tolist()) == (*request.ids, *completion.ids)
            same = same and stream.images[: len(request.images)] == request.images
            same = same and bool(stream.mask_T[turn.start : turn.end].all())
            trained += len(completion.ids)
            if not same:
                self.faults.append(f"{number}: a turn differs from what the engine read and wrote")
        if trained != t.num_model_tokens:
            self.faults.append(f"{number}: {trained} tokens were written, {t.num_model_tokens} are trained")
        self.totals["tokens"] += trained


async def fuzz(count: int, seed: int, at_once: int = 4) -> Fuzz:
    """Play episodes until `count` requests were sent."""
    state = Fuzz(seed)
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            if state.num_requests >= count:
                return
            await state.play(number)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return state


def main() -> int:
    """Send the requests, and print the tables."""
    parser = argparse.ArgumentParser(description="Send mutated requests to the endpoint for agents.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    at = commit()
    started = time.perf_counter()
    state = asyncio.run(fuzz(flags.count, flags.seed))
    seconds = time.perf_counter() - started
    columns = sorted({status for counts in state.statuses.values() for status in counts})
    rows = [[kind, *(counts[status] for status in columns)] for kind, counts in sorted(state.statuses.items())]
    print(markdown(["request", *columns], rows))
    print(markdown(["of episodes", "count"], [*state.ends.items(), *state.totals.items()]))
    print(markdown(["refused for", "count"], state.codes.most_common(30)))
    print(f"{state.num_requests} requests in {seconds:.0f} s, {len(state.faults)} faults", *state.faults[:20], sep="\n")
    figures = {
        "requests": state.num_requests,
        "seconds": round(seconds, 1),
        "statuses": {kind: dict(counts) for kind, counts in sorted(state.statuses.items())},
        "ends": dict(state.ends),
        "totals": dict(state.totals),
        "refusals": dict(state.codes),
        "faults": len(state.faults),
    }
    command = f"python -m benchmarks.fuzz_gateway --count {flags.count} --seed {flags.seed}"
    write_result(RESULTS / "fuzz_gateway.json", command, figures, at, ("starlette", "transformers"))
    return int(bool(state.faults))


if __name__ == "__main__":
    sys.exit(main())
