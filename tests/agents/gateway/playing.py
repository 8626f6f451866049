"""Plays episodes of agents that a test writes as functions, and asks the endpoint as they do."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from agents.engines.base import Engine
from agents.engines.scripted import ScriptedEngine
from agents.gateway.episode import AgentEpisode
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Limits
from agents.types import Completion, GenerateRequest, Trajectory
from envs.config.plugins import give
from envs.execution.load import load_env
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample
from tests.builders import sampling
from tests.prompts import sample

Ask = Callable[..., tuple[int, dict[str, Any]]]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


#: What a model writes that clients and templates stumble over.
TEXTS = (
    "So 5.",
    "",
    " two\n\n",
    "<think>Hm.</think>\n\nYes",
    'A <tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
    "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "look", "argu',
    "\u2028é\U0001f642 <|x|> </tool_call> {{ x }}\n",
)


class NotingEngine(ScriptedEngine):
    """Notes each request of its one session with the completion."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: list[tuple[GenerateRequest, Completion]] = []

    @asynccontextmanager
    async def session(self) -> AsyncIterator[NotingEngine]:  # type: ignore[override]
        async with super().session() as self.inner:
            yield self

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await self.inner.generate(request)
        self.noted.append((request, completion))
        return completion


def entry(agent: str | Callable[..., Any], **more: Any) -> EnvSpec:
    """Return the entry of an agent, which may be a function that gets the task and `ask`."""
    if not isinstance(agent, str):
        agent = give(Asking(agent))
    return EnvSpec.model_validate({"id": "agent", "agent": agent, "description": "Test.", "max_turns": 8, **more})


class Asking:
    """An agent whose function gets `ask(messages, **fields)`, which returns the status and the body of an answer."""

    def __init__(self, function: Callable[[dict[str, Any], Ask], Any]) -> None:
        self.function = function

    def __call__(self, task: dict[str, Any], base_url: str, api_key: str) -> Any:
        def ask(messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
            return post(base_url, api_key, {"model": "policy", "messages": messages, **fields}, headers)

        return self.function(task, ask)


def post(
    base_url: str, key: str, body: Any, headers: dict[str, str] | None = None, path: str = "/chat/completions"
) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{base_url}{path}", data, headers or {})
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def said(answer: tuple[int, dict[str, Any]], choice: int = 0) -> dict[str, Any]:
    """Return the message of an answer."""
    status, body = answer
    assert status == 200, body
    return body["choices"][choice]["message"]


def command(folder: Path, source: str) -> str:
    """Write an agent that is a program; return its command."""
    path = folder / "agent.py"
    path.write_text(f"import json, os, sys, time, urllib.request\n{source}")
    return f"{sys.executable} {path}"


#: The beginning of such a program: its task, and how it asks.
ASK = """
task = json.loads(sys.stdin.readline())
def ask(messages):
    body = json.dumps({"messages": messages}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]
"""


def as_part(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def script(*texts: str) -> Callable[[int, GenerateRequest], str]:
    """Return what a scripted engine writes: these texts in order, the last one for ever."""
    return lambda turn, _: texts[min(turn, len(texts) - 1)]


def loop_of(
    renderer: Renderer,
    agent: str | Callable[..., Any],
    *texts: str,
    engine: Engine | None = None,
    asked: Sample | None = None,
    limits: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[AgentEpisode, Callable[[], Any], Sample]:
    """Return the loop of an agent's episodes in which the model writes `texts`, what builds its program, and a task."""
    spec = entry(agent, **more)
    engine = engine or ScriptedEngine(renderer.tokenizer, script(*(texts or ("yes",))))
    settings = {"max_turns": spec.max_turns, "max_new_tokens": 2000, **(limits or {})}
    loop = AgentEpisode(spec, engine, renderer, Limits(**settings, env=EnvLimits.of(spec)), sampling(renderer))
    build = load_env(spec)
    task = asked or sample()
    return loop, lambda: build(task, spec.args()), task


def play(renderer: Renderer, agent: str | Callable[..., Any], *texts: str, **options: Any) -> Trajectory:
    """Play one episode of an agent; see `loop_of`."""
    loop, build, task = loop_of(renderer, agent, *texts, **options)
    return asyncio.run(loop.run(task, build, seed=7))
