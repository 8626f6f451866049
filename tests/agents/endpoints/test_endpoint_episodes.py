"""A model behind an OpenAI-compatible server plays whole episodes, asked by the real client over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("openai")

from agents.endpoints import client as client_module
from agents.endpoints.chat import EndpointFault
from agents.endpoints.client import EndpointClient
from agents.endpoints.demonstrations import demonstration
from agents.endpoints.episode import EndpointEpisode
from agents.endpoints.settings import Endpoint
from agents.model import STARTER_PATH
from agents.rendering.renderer import Renderer
from agents.rollout.conversation import ConversationRenderer
from agents.types import EndReason, Trajectory
from envs.datasets.conversations import ConversationOptions, open_conversations
from envs.execution.load import load_env
from envs.problems import checked_problems
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.tool_calls.thinking import Thinking
from envs.types import Sample, message_images
from tests.agents.endpoints.server import DRIP, Reply, chat_server, says

KEY = "sk-a-key-that-no-file-may-hold"
CALL = "<tool_call>\n{}\n</tool_call>"


def problem(spec: EnvSpec) -> Sample:
    return checked_problems(spec, "heldout", 1, 0, spec.load_system_prompt())[0]


def play(
    env: str, reply: Reply, max_new_tokens: int = 1000, cache: Path | None = None, **settings: Any
) -> tuple[Trajectory, list[dict[str, Any]]]:
    """Return the episode of problem 0 and what the server was asked."""
    spec = get_spec(env)
    sample = problem(spec)
    with chat_server(reply) as server:
        endpoint = Endpoint(url=server.url, model="m", **{"max_retries": 0, **settings})

        async def episode() -> Trajectory:
            client = EndpointClient(endpoint, "hermes", cache)
            loop = EndpointEpisode(client, spec, spec.max_turns, max_new_tokens)
            try:
                return await loop.run(sample, lambda: load_env(spec)(sample, spec.args()), seed=0)
            finally:
                await client.close()

        return asyncio.run(episode()), server.asked


def in_turn(*replies: Mapping[str, Any] | tuple[int, bytes]) -> Reply:
    """Return a model that gives the k-th reply when it has spoken k times, and then the last one again."""

    def reply(body: dict[str, Any]) -> Mapping[str, Any] | tuple[int, bytes]:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        return replies[min(said, len(replies) - 1)]

    return reply


def roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
    urls = [
        part["image_url"]["url"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    return [Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) for url in urls]


def test_a_native_tool_call_is_run_and_answered_under_its_id() -> None:
    t, asked = play("calculator", in_turn(says(None, [("calculate", '{"expression": "6*7"}')]), says("\\boxed{42}")))
    assert t.end_reason is EndReason.COMPLETED
    assert t.turns[0].text == CALL.format('{"name": "calculate", "arguments": {"expression": "6*7"}}')
    assert asked[0]["tools"][0]["function"]["name"] == "calculate"
    assert asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "id0", "content": "42"}
    assert asked[1]["messages"][-2]["tool_calls"][0]["id"] == "id0"


def test_a_call_in_the_text_works_without_native_tools() -> None:
    text = CALL.format('{"name": "calculate", "arguments": {"expression": "6*7"}}')
    t, asked = play("calculator", in_turn(says(text), says("\\boxed{42}")))
    assert [turn.text for turn in t.turns] == [text, "\\boxed{42}"]
    assert asked[1]["messages"][-1] == {"role": "user", "content": "42"}


def test_geo3k_is_played_with_its_image_and_its_tool() -> None:
    spec = get_spec("geo3k")
    label = problem(spec).label
    call = says("I think so.", [("calc_score", json.dumps({"answer": label}))])
    t, asked = play("geo3k", in_turn(call, says(f"\\boxed{{{label}}}")))
    (image,) = images_of(asked[0]["messages"])
    assert image.size == message_images(t.messages)[0].size
    assert (t.end_reason, t.reward) == (EndReason.COMPLETED, 1.0)
    assert t.turns[0].info["tool_calls"][0]["outcome"] == "ok"


def test_an_image_of_a_tool_follows_its_result_in_a_message_of_the_user() -> None:
    zoom = says(None, [("zoom", '{"left": 0, "top": 0, "right": 40, "bottom": 40}')])
    t, asked = play("geo3k_zoom", in_turn(zoom, says("\\boxed{1}")))
    assert t.turns[0].info["tool_calls"][0]["outcome"] == "ok", t.turns[0]
    assert roles(asked[1]["messages"][-2:]) == ["tool", "user"]
    assert isinstance(asked[1]["messages"][-2]["content"], str)
    assert len(images_of(asked[1]["messages"][-1:])) == 1


def test_a_game_without_tools_goes_on_with_messages_of_the_user() -> None:
    t, asked = play("guess", in_turn(says("1"), says("2"), says("3")))
    assert len(t.turns) > 1 and "tools" not in asked[0]
    assert roles(asked[-1]["messages"][-2:]) == ["assistant", "user"]


@pytest.mark.parametrize(
    "arguments", ['{"expression": ', "[1]", '"x"', "", '{"expression": "</tool_call>"}', "{" * 99999]
)
def test_arguments_that_are_no_call_are_explained_by_the_environment(arguments: str) -> None:
    t, asked = play("calculator", in_turn(says(None, [("calculate", arguments)]), says("\\boxed{1}")))
    assert t.end_reason is EndReason.COMPLETED
    assert len(t.turns[0].info["tool_calls"]) == 1 and t.turns[0].info["tool_calls"][0]["outcome"] != "ok"
    assert asked[1]["messages"][-1]["role"] == "tool"


def test_every_call_of_a_turn_gets_its_own_result() -> None:
    calls = [("calculate", '{"expression": "1+1"}'), ("calculate", '{"expression": "2+2"}')]
    _, asked = play("calculator", in_turn(says(None, calls), says("\\boxed{1}")))
    assert [(m["tool_call_id"], m["content"]) for m in asked[1]["messages"][-2:]] == [("id0", "2"), ("id1", "4")]


def test_thoughts_are_kept_from_the_environment() -> None:
    t, _ = play("calculator", in_turn(says("<think>\\boxed{1}?</think>I pass.")))
    assert t.turns[0].text.startswith("<think>") and t.reward == 0
    assert Thinking("<think>", "</think>").said(t.turns[0].text) == "I pass."


def hangs(body: object) -> Mapping[str, Any]:
    time.sleep(1)
    return says("late")


FAULTS: dict[str, tuple[Reply, str]] = {
    "hang": (hangs, "Timeout"),
    "a byte at a time": (in_turn((200, DRIP * 25)), "takes over 0.3 s"),
    "429": (in_turn((429, b'{"error": {"message": "slow down"}}')), "slow down"),
    "500": (in_turn((500, b"oops")), "InternalServerError"),
    "401": (in_turn((401, b'{"error": {"message": "bad key ' + KEY.encode() + b'"}}')), "bad key [key]"),
    "no JSON": (in_turn((200, b"<html>")), "no chat completion"),
    "nested JSON": (in_turn((200, b"[" * 100_000)), "no chat completion"),
    "no choice": (in_turn({"choices": []}), "no chat completion: choices"),
    "null": (in_turn({"choices": None}), "no chat completion: choices"),
    "wrong types": (in_turn(says(5)), "no chat completion"),  # type: ignore[arg-type]
    "negative counts": (in_turn({**says("1"), "usage": {"prompt_tokens": -1}}), "usage.prompt_tokens"),
    "refusal": (in_turn(says(None, refusal="I cannot help with that.")), "refused: I cannot"),
    "content filter": (in_turn(says("Well,", finish="content_filter")), "content_filter"),
    "huge": (in_turn((200, b" " * (2**20 + 1))), "bytes"),
    "huge error": (in_turn((500, b" " * (2**20 + 1))), "bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_server_ends_the_episode_as_aborted_and_says_why(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_BODY", 2**20)
    monkeypatch.setenv("A_KEY", KEY)
    reply, reason = FAULTS[fault]
    call = in_turn(says(None, [("calculate", '{"expression": "6*7"}')]))
    broken = lambda body: reply(body) if len(body["messages"]) > 2 else call(body)  # noqa: E731
    for model, num_turns in ((reply, 0), (broken, 1)):
        t, _ = play("calculator", model, timeout_s=0.3, key_env="A_KEY")
        assert (t.end_reason, len(t.turns), t.reward) == (EndReason.ABORTED, num_turns, 0.0)
        assert t.error is not None and reason in t.error and KEY not in t.error
        assert not t.end_reason.is_valid


def test_an_answer_that_is_cut_at_the_limit_ends_the_episode_as_token_budget() -> None:
    t, asked = play("calculator", in_turn(says("It is", finish="length")), max_new_tokens=77)
    assert (t.end_reason, t.turns[0].finish) == (EndReason.TOKEN_BUDGET, "length")
    assert asked[0]["max_completion_tokens"] == 77


def test_the_budget_of_an_episode_counts_all_turns() -> None:
    t, asked = play("guess", in_turn(says("1")), max_new_tokens=15)
    assert [body["max_completion_tokens"] for body in asked] == [15, 5]
    assert (t.end_reason, t.num_model_tokens) == (EndReason.TOKEN_BUDGET, 20)


def test_a_request_is_retried_as_the_server_asks() -> None:
    tries: list[object] = []

    def reply(body: dict[str, Any]) -> Mapping[str, Any] | tuple[int, bytes]:
        tries.append(body)
        return (429, b"{}") if len(tries) < 3 else says("\\boxed{1}")

    t, _ = play("calculator", reply, max_retries=3)
    assert (t.end_reason, len(tries)) == (EndReason.COMPLETED, 3)


def test_requests_and_retries_keep_the_rate() -> None:
    times: list[float] = []

    def reply(body: dict[str, Any]) -> Mapping[str, Any] | tuple[int, bytes]:
        times.append(time.monotonic())
        return (429, b"{}") if len(times) == 2 else says("1")

    play("guess", reply, max_retries=3, requests_per_minute=600)
    assert len(times) > 3 and times[-1] - times[0] > 0.09 * (len(times) - 1)


def test_options_change_the_body_and_null_takes_a_field_out() -> None:
    options = {"temperature": None, "reasoning_effort": "low", "messages": None}
    _, asked = play("guess", in_turn(says("1")), options=options)
    assert "temperature" not in asked[0] and asked[0]["reasoning_effort"] == "low" and asked[0]["messages"]


def test_an_image_that_cannot_be_sent_is_a_fault_of_the_environment() -> None:
    spec = get_spec("geo3k")
    file = io.BytesIO()
    message_images(problem(spec).prompt)[0].save(file, "PNG")
    damaged = Image.open(io.BytesIO(file.getvalue()[:200]))
    sample = Sample("0", ({"role": "user", "content": [{"type": "image", "image": damaged}]},), "1")

    async def episode(url: str) -> Trajectory:
        loop = EndpointEpisode(EndpointClient(Endpoint(url=url, model="m"), "hermes"), spec, 3, 100)
        return await loop.run(sample, lambda: load_env(spec)(problem(spec), spec.args()), seed=0)

    with chat_server(in_turn(says("1"))) as server:
        t = asyncio.run(episode(server.url))
    assert t.end_reason is EndReason.ENV_ERROR and str(t.error).startswith("the prompt cannot be rendered")


def test_a_short_key_is_no_secret_that_changes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "EMPTY")
    t, _ = play("calculator", in_turn(says("The set is EMPTY.")), key_env="A_KEY")
    assert t.turns[0].text == "The set is EMPTY."


@pytest.mark.parametrize("content", ["half \ud800", [{"type": "video", "video": object()}], {"a": 1, 2: 3}])
def test_a_message_of_an_environment_that_cannot_be_sent_ends_its_episode(content: Any) -> None:
    async def ask(url: str) -> None:
        client = EndpointClient(Endpoint(url=url, model="m", max_retries=0), "hermes")
        await client.ask({"messages": [{"role": "user", "content": content}]}, seed=0)

    with chat_server(in_turn((400, b"{}"))) as server, pytest.raises(EndpointFault):
        asyncio.run(ask(server.url))


@pytest.mark.parametrize("usage", [None, {}, {"total": 1}])
def test_a_server_that_does_not_count_tokens_is_played_all_the_same(usage: Any) -> None:
    t, _ = play("calculator", in_turn({**says("\\boxed{1}"), "usage": usage}))
    assert (t.end_reason, t.num_model_tokens) == (EndReason.COMPLETED, 0)


def test_the_cache_answers_a_second_run_and_forgets_what_is_damaged(tmp_path: Path) -> None:
    model = in_turn(says(None, [("calculate", '{"expression": "6*7"}')]), says("\\boxed{42}"))
    spec = get_spec("calculator")
    sample = problem(spec)

    async def episode(url: str, seed: int) -> Trajectory:
        client = EndpointClient(Endpoint(url=url, model="m"), "hermes", tmp_path)
        loop = EndpointEpisode(client, spec, 3, 100)
        return await loop.run(sample, lambda: load_env(spec)(sample, spec.args()), seed)

    with chat_server(model) as server:
        first = asyncio.run(episode(server.url, 0))
        again = asyncio.run(episode(server.url, 0))
        assert len(server.asked) == 2 and [t.text for t in first.turns] == [t.text for t in again.turns]
        asyncio.run(episode(server.url, 1))
        assert len(server.asked) == 4, "another seed is another sample"
        for file in tmp_path.glob("*.json"):
            file.write_bytes(file.read_bytes()[:10])
        asyncio.run(episode(server.url, 0))
        assert len(server.asked) == 6


def test_a_success_becomes_a_conversation_that_the_starter_can_learn(tmp_path: Path) -> None:
    label = problem(get_spec("geo3k")).label
    call = says("I think so.", [("calc_score", json.dumps({"answer": label}))])
    t, _ = play("geo3k", in_turn(call, says(f"\\boxed{{{label}}}")))
    (tmp_path / "demos.jsonl").write_text(json.dumps(demonstration(t, "hermes")) + "\n")
    (conversation,) = open_conversations(str(tmp_path / "demos.jsonl"), ConversationOptions())
    renderer = Renderer.from_checkpoint(STARTER_PATH)
    stream = ConversationRenderer(renderer, 4096).stream(conversation)
    learnt = renderer.decode(stream.ids_T[stream.mask_T].tolist())
    assert "calc_score" in learnt and f"\\boxed{{{label}}}" in learnt
    assert len(stream.trajectory.images) == 1


def test_a_broken_call_is_shown_and_not_taught() -> None:
    t, _ = play("calculator", in_turn(says(None, [("calculate", "{")]), says("\\boxed{1}")))
    broken, last = (message for message in demonstration(t, "hermes")["messages"] if message["role"] == "assistant")
    assert broken["train"] is False and "train" not in last
