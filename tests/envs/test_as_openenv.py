"""Claims about environments served to clients of OpenEnv: episodes with images, limits, no message that breaks it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from envs.problems import ProblemsConfig, open_problems
from envs.registry import get_spec
from tests.listening import listening, open_to_others
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(60)
starlette = pytest.importorskip("starlette")
testclient = pytest.importorskip("starlette.testclient")

from envs.as_openenv import Served, to_openai  # noqa: E402

WRONG = '<tool_call>{"name": "calc_score", "arguments": {"answer": "-1"}}</tool_call>'


def served(env_id: str = "geo3k", **limits: Any) -> Served:
    spec = get_spec(env_id)
    return Served(spec, open_problems(spec, ProblemsConfig(), 4), "secret", **limits)


@pytest.fixture
def client() -> Iterator[Any]:
    with testclient.TestClient(served().app()) as client:
        yield client


def ask(socket: Any, type: str, **data: Any) -> dict[str, Any]:
    """Send a message; return the answer's data."""
    socket.send_text(json.dumps({"type": type, "data": data}))
    return json.loads(socket.receive_text())["data"]


def test_an_episode_is_played_as_the_loop_plays_it(client: Any) -> None:
    problems = open_problems(get_spec("geo3k"), ProblemsConfig(), 4)
    with client.websocket_connect("/secret/ws") as socket:
        opened = ask(socket, "reset", index=2)
        assert opened["observation"]["messages"] == json.loads(json.dumps(to_openai(problems[2].prompt)))
        assert opened["observation"]["tools"][0]["function"]["name"] == "calc_score"
        told = ask(socket, "step", text=WRONG)
        assert told["done"] is False
        assert "wrong" in told["observation"]["messages"][0]["content"]
        ended = ask(socket, "step", text=f"\\boxed{{{problems[2].label}}}")
        assert (ended["reward"], ended["done"], ended["observation"]["end"]) == (1.0, True, "completed")
        socket.send_text('{"type": "state"}')
        state = json.loads(socket.receive_text())["data"]
        assert (state["step_count"], state["sample_id"]) == (2, problems[2].id)


def test_images_are_those_of_the_problem(client: Any) -> None:
    with client.websocket_connect("/secret/ws") as socket:
        (_, user) = ask(socket, "reset", seed=5)["observation"]["messages"]
    url = next(part["image_url"]["url"] for part in user["content"] if part["type"] == "image_url")
    shown = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    problem = open_problems(get_spec("geo3k"), ProblemsConfig(), 4)[1]
    assert shown.tobytes() == next(p["image"] for p in problem.prompt[-1]["content"] if p["type"] == "image").tobytes()


def test_the_turn_limit_ends_an_episode(client: Any) -> None:
    with client.websocket_connect("/secret/ws") as socket:
        ask(socket, "reset")
        ends = [ask(socket, "step", text=WRONG)["observation"]["end"] for _ in range(3)]
    assert ends == ["", "", "max_turns"]


def test_rewards_of_steps_add_up_to_that_of_the_episode() -> None:
    with testclient.TestClient(served("coins").app()) as client, client.websocket_connect("/secret/ws") as socket:
        ask(socket, "reset")
        steps = [ask(socket, "step", text=str(coin)) for coin in range(1, 6)]
    assert [step["done"] for step in steps] == [False, False, False, False, True]
    assert [step["reward"] for step in steps] == pytest.approx([s["observation"]["info"]["reward"] for s in steps])
    assert sum(step["reward"] for step in steps) > 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("3", "UNKNOWN_TYPE"),
        ('{"type": ["reset"]}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": {"index": 4}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": [3]}', "VALIDATION_ERROR"),
        ('{"type": "step"}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": ["a"]}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": "a"}}', "EXECUTION_ERROR"),
    ],
)
def test_a_wrong_message_is_answered_and_the_session_goes_on(client: Any, text: str, code: str) -> None:
    with client.websocket_connect("/secret/ws") as socket:
        socket.send_text(text)
        assert json.loads(socket.receive_text())["data"]["code"] == code
        socket.send_bytes(b"bytes")
        assert json.loads(socket.receive_text())["data"]["code"] == "INVALID_JSON"
        assert ask(socket, "reset")["done"] is False


def test_a_wrong_token_gets_nothing(client: Any) -> None:
    assert client.get("/secret/health").json() == {"status": "healthy"}
    assert client.get("/secret/schema").json()["action"]["required"] == ["text"]
    assert client.get("/wrong/health").status_code == client.get("/secret/other").status_code == 404
    with pytest.raises(starlette.websockets.WebSocketDisconnect), client.websocket_connect("/wrong/ws"):
        pass


def test_sessions_are_limited_in_number_and_in_idle_time() -> None:
    with testclient.TestClient(served(max_sessions=1, idle_s=0.2).app()) as client:
        with client.websocket_connect("/secret/ws") as first:
            with client.websocket_connect("/secret/ws") as second:
                assert json.loads(second.receive_text())["data"]["code"] == "CAPACITY_REACHED"
            with pytest.raises(starlette.websockets.WebSocketDisconnect):
                first.receive_text()
        with client.websocket_connect("/secret/ws") as later:
            assert ask(later, "reset")["done"] is False


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "envs.serve", "geo3k_zoom", "--port", "0", "--size", "4", "--max-message-mib", "1"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
        assert open_to_others(listening(server.pid)) == set()
    finally:
        server.terminate()
        server.communicate()


def test_a_message_that_is_too_large_ends_its_session_alone(address: str) -> None:
    websockets = pytest.importorskip("websockets.sync.client")
    url = f"{address.replace('http', 'ws')}/ws"
    with websockets.connect(url) as other, websockets.connect(url) as one:
        one.send("x" * 2**21)
        with pytest.raises(Exception, match="1009"):
            one.recv()
        other.send('{"type": "reset"}')
        assert json.loads(other.recv())["type"] == "observation"


def test_openenvs_own_client_plays_with_images(address: str) -> None:
    openenv = pytest.importorskip("openenv")
    call = '<tool_call>{"name": "zoom", "arguments": {"left": 0, "top": 0, "right": 500, "bottom": 500}}</tool_call>'

    async def play() -> list[Any]:
        async with openenv.GenericEnvClient(address) as env:
            return [await env.reset(index=1), await env.step({"text": call}), await env.step({"text": "none"})]

    opened, zoomed, ended = asyncio.run(play())
    for result in (opened, zoomed):
        parts = result.observation["messages"][-1]["content"]
        assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert (opened.done, zoomed.done, ended.done, ended.reward) == (False, False, True, 0.0)


def test_a_missing_package_is_one_line_with_the_extra() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from trueturn.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "serve", "geo3k"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'trueturn[serve]'")
