"""Claims about environments behind OpenEnv servers: one line is enough, and whatever a server answers is data."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.contract import EnvFault
from envs.env import EnvArgs
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner, StepResult
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
SCHEMA = {
    "action": {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]},
    "observation": {"properties": {"text": {}, "image": {}}},
}
TEXT = {"action": "message", "texts": ["text"], "images": ["image"]}


def answer(observation: Any = {"text": "hi"}, reward: Any = 0.0, done: Any = False) -> str:  # noqa: B006 - only read
    return json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})


#: What the server answers to an action with that message.
ANSWERS = {
    "garbage": "<html>",
    "a list": "[1]",
    "huge": answer({"text": "x" * 2_000_000}),
    "nested": '{"data":' * 5000 + "1" + "}" * 5000,
    "nan": answer(reward=float("nan")),
    "text reward": answer(reward="1"),
    "text done": answer(done="yes"),
    "nothing": answer(None),
    "bad image": answer({"text": "see", "image": "none"}),
    "invalid": json.dumps({"type": "error", "data": {"message": "no such move", "code": "VALIDATION_ERROR"}}),
    "broken": json.dumps({"type": "error", "data": {"message": "oh", "code": "EXECUTION_ERROR"}}),
    "image": answer({"text": "see", "image": PIXEL}),
    "win": answer(reward=True, done=True),
}


#: An item for each session that the server refuses because it is full.
REFUSED: list[bool] = []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server that speaks OpenEnv's protocol, well or badly, as the action asks."""
    pytest.importorskip("openenv.core")
    serve = pytest.importorskip("websockets.sync.server").serve
    closed = pytest.importorskip("websockets.exceptions").ConnectionClosed
    http = pytest.importorskip("websockets.http11")
    headers = pytest.importorskip("websockets.datastructures").Headers

    def schema(connection: Any, request: Any) -> Any:
        body = json.dumps(SCHEMA).encode()
        if "schema" not in request.path:
            return None
        return http.Response(200, "OK", headers({"Content-Length": str(len(body))}), body)

    def handle(socket: Any) -> None:
        if REFUSED and REFUSED.pop():
            socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        for raw in socket:
            message = json.loads(raw)
            said = message.get("data", {}).get("message")
            if message["type"] == "close" or said == "leave":
                return
            if said == "late" and threading.Event().wait(3.0):
                return
            try:
                socket.send(ANSWERS.get(said, answer({"text": str(said)})))
            except closed:
                return

    with serve(handle, "127.0.0.1", 0, process_request=schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def spec_of(url: str, tmp_path: Path, **entry: Any) -> EnvSpec:
    file = tmp_path / "registry.yaml"
    file.write_text(json.dumps({"there": {"openenv": url, "description": "Win.", "max_turns": 3, **entry}}))
    return get_spec("there", file)


def step(spec: EnvSpec, text: str) -> StepResult:
    """Play one turn as the agent loop does."""

    async def play() -> StepResult:
        sample = spec.load_dataset("train", 1, 0)[0]
        runner = EnvRunner(lambda: load_env(spec)(sample, spec.args()), EnvLimits.of(spec))
        try:
            await runner.open()
            return await runner.step(text)
        finally:
            assert await runner.close() is None

    return asyncio.run(play())


def test_the_models_text_is_the_named_field_of_the_action(url: str, tmp_path: Path) -> None:
    result = step(spec_of(url, tmp_path, options=TEXT), "good day")
    assert result.messages[0]["content"] == "good day" and not result.done


def test_calls_are_actions_and_bring_the_servers_reward_and_end(url: str, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "act", "arguments": {"message": "win"}}</tool_call>'
    result = step(spec_of(url, tmp_path), call)
    assert result.done and result.reward == 1.0 and result.info["tool_calls"][0]["outcome"] == "ok"


def test_images_of_observations_are_shown(url: str, tmp_path: Path) -> None:
    content = step(spec_of(url, tmp_path, options=TEXT), "image").messages[0]["content"]
    assert [part["type"] for part in content] == ["text", "image"]


def test_an_invalid_action_costs_only_the_turn(url: str, tmp_path: Path) -> None:
    result = step(spec_of(url, tmp_path, options=TEXT), "invalid")
    assert "no such move" in result.messages[0]["content"] and not result.done


@pytest.mark.parametrize(
    "said",
    [
        "garbage",
        "a list",
        "huge",
        "nested",
        "nan",
        "text reward",
        "text done",
        "nothing",
        "bad image",
        "broken",
        "leave",
    ],
)
@pytest.mark.parametrize("way", ["text", "call"])
def test_a_broken_server_is_a_fault_and_no_low_reward(url: str, tmp_path: Path, said: str, way: str) -> None:
    options = {"max_message_mb": 1, **(TEXT if way == "text" else {"images": ["image"]})}
    call = json.dumps({"name": "act", "arguments": {"message": said}})
    text = said if way == "text" else f"<tool_call>{call}</tool_call>"
    with pytest.raises(EnvFault) as caught:
        step(spec_of(url, tmp_path, options=options), text)
    assert type(caught.value) is EnvFault and not caught.value.timed_out


def test_an_episode_waits_for_a_session_of_a_full_server(url: str, tmp_path: Path) -> None:
    REFUSED.extend([True, True])
    assert step(spec_of(url, tmp_path, options=TEXT), "hello").messages and not REFUSED


def test_an_episode_that_waited_too_long_asks_for_no_session_more(url: str, tmp_path: Path) -> None:
    REFUSED.extend([True] * 100)
    try:
        with pytest.raises(EnvFault, match="open took longer"):
            step(spec_of(url, tmp_path, options=TEXT, reset_timeout_s=0.5), "hello")
        left = len(REFUSED)
        threading.Event().wait(1.0)
        assert len(REFUSED) == left
    finally:
        REFUSED.clear()


def test_a_late_answer_is_a_timeout_and_no_low_reward(url: str, tmp_path: Path) -> None:
    with pytest.raises(EnvFault, match=r"longer than 0\.5 s") as caught:
        step(spec_of(url, tmp_path, options=TEXT, step_timeout_s=0.5), "late")
    assert type(caught.value) is EnvFault and caught.value.timed_out


def test_a_field_that_the_server_lacks_is_named_before_the_first_step(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="known: text, image"):
        spec_of(url, tmp_path, options={"texts": ["txt"]}).load_dataset("train", 1, 0)


def test_a_server_that_is_not_there_is_named_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start the server"):
        spec_of("http://127.0.0.1:9", tmp_path).load_dataset("train", 1, 0)


def test_a_server_that_may_hang_is_never_asked_on_the_event_loop(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs isolation: thread or process"):
        spec_of("http://127.0.0.1:9", tmp_path, isolation="inline")


def test_an_image_of_docker_is_answered_with_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="docker run -p 8000:8000"):
        spec_of("echo:latest", tmp_path).load_dataset("train", 1, 0)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from envs import from_openenv

    monkeypatch.setitem(sys.modules, "openenv.core", None)
    monkeypatch.setattr(from_openenv, "_schemas", lambda url: (SCHEMA["action"], SCHEMA["observation"]))
    with pytest.raises(UserError, match=r"trueturn\[openenv\]"):
        from_openenv.FromOpenEnv(Sample("0", ()), EnvArgs(1, options={"id": "http://here"}))
