"""What a turn costs over the gateway: `python -m benchmarks.gateway [--verifiers FOLDER]`.

Episodes of three turns, two of them with a call of a tool, with an engine that answers at once: in the agent loop
within the process; by agents that ask the gateway over HTTP; by the same agents at verifiers' interception server,
whose model is a fixed answer (it renders, tokenises and checks nothing); and by the same agents at a bare server of
the same stack, which is what HTTP and the agents themselves cost. Each way has a process of its own, server and agents
together. FOLDER is where pip has put verifiers (`pip install --target FOLDER verifiers==0.4.0`). Prints a table and
writes `benchmarks/results/gateway.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result

NUM_TURNS = 3
CALL = {"name": "calc_score", "arguments": '{"answer": "37"}'}
ANSWER = "The answer is \\boxed{68}."
TOOL = {
    "name": "calc_score",
    "description": "Return the score of an answer.",
    "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
}
#: Plays all episodes, so many at once.
Player = Callable[[int, int], Awaitable[None]]


def converse(base_url: str, key: str, number: int) -> str:
    """Play one episode as an agent does: a connection of its own, the whole conversation in every request."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Find x, given that y is {number}."}]
    for _ in range(NUM_TURNS):
        body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        connection.request("POST", f"{address.path}/chat/completions", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        message = answer["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Score 0.0"})
    connection.close()
    assert messages[-1]["content"] == ANSWER and len(messages) == 2 * NUM_TURNS, messages
    return ANSWER


def completion(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fixed answer to a request: a call, another, the answer."""
    turn = sum(message["role"] == "assistant" for message in messages)
    message: dict[str, Any] = {"role": "assistant", "content": ANSWER}
    if turn < NUM_TURNS - 1:
        calls = [{"id": f"call_{turn}", "type": "function", "function": CALL}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


async def by_threads(base_url: str, keys: list[str], at_once: int) -> None:
    """Let an agent converse under each key, each on a thread, as those of an entry that are functions do."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(at_once) as threads:
        agents = [loop.run_in_executor(threads, converse, base_url, key, number) for number, key in enumerate(keys)]
        await asyncio.gather(*agents)


async def bare_server() -> Player:
    """Return what plays at a server that does nothing."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(completion((await request.json())["messages"]))

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", ws="none"))
    serving.append(asyncio.create_task(server.serve(sockets=[listener])))
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    return lambda episodes, at_once: by_threads(url, ["key"] * episodes, at_once)


#: Servers that run until the process ends.
serving: list[asyncio.Task[None]] = []


async def verifiers_server() -> Player:
    """Return what plays at verifiers' interception server, with a session for each episode."""
    from verifiers.v1.clients import Client, ModelContext
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.interception.server import InterceptionServer
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.task import Task, TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    class FixedClient(Client):
        async def get_response(self, dialect: Any, body: Any, *args: Any, **options: Any) -> Any:
            raw = completion(body["messages"])
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    server = InterceptionServer()
    await server.start()
    context = ModelContext("policy", EvalClientConfig(base_url="http://127.0.0.1:9/v1"))

    def session(number: int) -> RolloutSession:
        data = TaskData(idx=number, prompt=f"Find x, given that y is {number}.")
        return RolloutSession(
            context, Trace(task=TraceTask(type=Task.__name__, data=data), agent=AgentInfo(config=AgentConfig()))
        )

    async def play(episodes: int, at_once: int) -> None:
        sessions = [session(number) for number in range(episodes)]
        slots = [server.register(one) for one in sessions]
        for one in sessions:
            one.client = FixedClient()
        await by_threads(f"{server.base_url}/v1", [model for model, _ in slots], at_once)
        assert all(one.trace.num_turns == NUM_TURNS for one in sessions)
        for slot in slots:
            server.unregister(*slot)

    return play


async def gateway() -> Player:
    """Return what plays at our endpoint, each episode rendered, tokenised, checked and turned into a trajectory."""
    from agents.engines.scripted import ScriptedEngine
    from agents.gateway.episode import AgentEpisode
    from agents.model import STARTER_PATH
    from agents.rendering.renderer import Renderer
    from agents.rollout.episode import Limits
    from agents.types import EndReason, GenerateRequest, SamplingParams
    from envs.config.plugins import give
    from envs.execution.load import load_env
    from envs.spec import EnvLimits, EnvSpec
    from envs.types import Sample

    renderer = Renderer.from_checkpoint(STARTER_PATH)
    call = f'<tool_call>\n{{"name": "{CALL["name"]}", "arguments": {CALL["arguments"]}}}\n</tool_call>'

    def written(turn: int, request: GenerateRequest) -> str:
        return call if turn < NUM_TURNS - 1 else ANSWER

    def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        return converse(base_url, api_key, int(task["id"]))

    spec = EnvSpec.model_validate({"id": "agent", "agent": give(agent), "description": "Asks.", "max_turns": 8})
    sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)
    limits = Limits(spec.max_turns, 2000, EnvLimits.of(spec))
    loop = AgentEpisode(spec, ScriptedEngine(renderer.tokenizer, written), renderer, limits, sampling)
    build = load_env(spec)

    async def play(episodes: int, at_once: int) -> None:
        allowed = asyncio.Semaphore(at_once)

        async def one(number: int) -> None:
            sample = Sample(str(number), ({"role": "user", "content": f"Find x, given that y is {number}."},))
            async with allowed:
                trajectory = await loop.run(sample, lambda: build(sample, spec.args()), seed=number)
            assert trajectory.end_reason is EndReason.COMPLETED and len(trajectory.turns) == NUM_TURNS, trajectory

        await asyncio.gather(*map(one, range(episodes)))

    return play


async def in_process() -> Player:
    """Return what plays in the agent loop, with the tool called in the process."""
    from agents.model import STARTER_PATH
    from agents.rendering.renderer import Renderer
    from agents.rollout.manager import rollout_groups
    from benchmarks.agent_loop import ARGS, GROUP_SIZE, ScoreEnv, build_episode, make_samples

    episode = build_episode(Renderer.from_checkpoint(STARTER_PATH), "inline")

    async def play(episodes: int, at_once: int) -> None:
        samples = make_samples(episodes // GROUP_SIZE)
        await rollout_groups(episode, samples, ScoreEnv, ARGS, GROUP_SIZE, seed=0, max_concurrent=at_once)

    return play


WAYS: dict[str, Callable[[], Awaitable[Player]]] = {
    "the loop in the process": in_process,
    "a bare server": bare_server,
    "the gateway": gateway,
    "verifiers' server": verifiers_server,
}


async def measure(way: str, episodes: int, at_once: int, repeats: int) -> dict[str, float]:
    """Return the best of a few runs: microseconds of processor and of wall time a turn, and turns a second."""
    play = await WAYS[way]()
    await play(at_once, at_once)  # starts threads, fills caches
    best: dict[str, float] = {}
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        await play(episodes, at_once)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        turns = episodes * NUM_TURNS
        found = {
            "cpu_us_per_turn": cpu / turns * 1e6,
            "wall_us_per_turn": wall / turns * 1e6,
            "turns_per_s": turns / wall,
        }
        if not best or found["cpu_us_per_turn"] < best["cpu_us_per_turn"]:
            best = found
    return best


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--verifiers", type=Path, help="folder with verifiers; without it that row is left out")
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway.json")
    parser.add_argument("--only", choices=WAYS, help="measure one way in this process and print its figures")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(asyncio.run(measure(args.only, args.episodes, args.at_once, args.repeats))))
        return
    at = commit()
    flags = ["--episodes", str(args.episodes), "--at-once", str(args.at_once), "--repeats", str(args.repeats)]
    figures: dict[str, dict[str, float]] = {}
    for way in WAYS:
        environment = dict(os.environ)
        if way == "verifiers' server":
            if not args.verifiers:
                continue
            environment["PYTHONPATH"] = str(args.verifiers.absolute())
        command = [sys.executable, "-m", "benchmarks.gateway", *flags, "--only", way]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        figures[way] = json.loads(done.stdout)
    columns = ("way", "CPU µs a turn", "wall µs a turn", "turns a second")
    rows = [(way, *(f"{number:.0f}" for number in found.values())) for way, found in figures.items()]
    print(markdown(columns, rows))
    write_result(args.out, f"python -m benchmarks.gateway {' '.join(flags)}", {"ways": figures}, at, ("uvicorn",))


if __name__ == "__main__":
    main()
