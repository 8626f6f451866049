"""Claims about the other protocols: a conversation in either of them is the same stream as in chat completions."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from agents.gateway.dialects import DIALECTS
from agents.rendering.renderer import Renderer
from agents.types import EndReason, Trajectory
from envs.config.plugins import give
from envs.errors import UserError
from tests.agents.gateway.playing import TOOL, Ask, as_part, play, post, said
from tests.prompts import make_image

CALL = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
IMAGE = as_part(make_image(64, 64, 3))
URL = IMAGE["image_url"]["url"]
CHAT, RESPONSES, MESSAGES = DIALECTS


def of_chat(renderer: Renderer) -> Trajectory:
    """Play the conversation of this file in chat completions: a call, its result with an image, and an answer."""

    def agent(task: dict[str, Any], ask: Ask) -> None:
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [IMAGE, text("x?")]}]
        call = said(ask(asked, tools=[TOOL]))
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": [text("There."), IMAGE]}
        ask([*asked, call, result], tools=[TOOL])

    return play(renderer, agent, CALL, "done")


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def test_a_conversation_in_responses_is_the_same_stream(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        client = OpenAI(base_url=base_url, api_key=api_key)
        shown = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "x?"}]
        conversation: list[Any] = [{"role": "user", "content": shown}]
        options: Any = {
            "model": "policy",
            "instructions": "Be brief.",
            "tools": [{"type": "function", **TOOL["function"]}],
        }
        first = client.responses.create(input=conversation, **options)
        call = first.output[1]
        assert call.type == "function_call" and call.arguments == '{"at": "x"}'
        given = [{"type": "input_text", "text": "There."}, {"type": "input_image", "image_url": URL}]
        conversation += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": given}]
        with client.responses.stream(input=conversation, **options) as stream:
            kinds = [event.type for event in stream]
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            return stream.get_final_response().output_text

    t = play(renderer, give(agent), CALL, "done")
    assert (t.end_reason, t.turns[-1].info["result"]) == (EndReason.COMPLETED, "done"), t.error
    assert t.ids_T.tolist() == of_chat(renderer).ids_T.tolist()


def test_a_conversation_in_anthropics_messages_is_the_same_stream(renderer: Renderer) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}

    def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        conversation: list[Any] = [{"role": "user", "content": [image, text("x?")]}]
        schema = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
        options = {"model": "policy", "max_tokens": 500, "system": "Be brief.", "tools": [schema]}

        def ask() -> dict[str, Any]:
            body = {**options, "messages": conversation}
            status, answer = post(base_url, "", body, {"x-api-key": api_key}, path="/messages")
            assert status == 200, answer
            return answer

        first = ask()
        assert first["stop_reason"] == "tool_use"
        said, call = first["content"]
        assert (said, call["input"]) == (text("I look."), {"at": "x"})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("There."), image]}
        conversation += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        second = ask()
        assert second["stop_reason"] == "end_turn" and second["usage"]["output_tokens"] > 1
        return second["content"][0]["text"]

    t = play(renderer, give(agent), CALL, "done")
    assert (t.end_reason, t.turns[-1].info["result"]) == (EndReason.COMPLETED, "done"), t.error
    assert t.ids_T.tolist() == of_chat(renderer).ids_T.tolist()


@pytest.mark.parametrize(
    ("dialect", "body", "rule"),
    [
        (RESPONSES, {"input": 5}, "input: must be a text or a list of objects"),
        (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input[0].type: must be a message"),
        (CHAT, {"messages": [{}] * 10_001}, "messages: must be a text or a list of objects, at most 10000"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "content[0].type"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "as base64"),
    ],
)
def test_what_a_dialect_cannot_say_in_chat_is_refused(dialect: Any, body: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError) as caught:
        dialect.read(body)
    assert rule in str(caught.value)


def test_fields_that_are_not_translated_are_checked_as_those_of_chat_completions(renderer: Renderer) -> None:
    statuses = []

    def agent(task: dict[str, Any], base_url: str, api_key: str) -> None:
        for body in ({"temperature": 0.2}, {"previous_response_id": "resp_1"}, {"text": {"format": {"type": "x"}}}, {}):
            statuses.append(post(base_url, api_key, {"input": "x?", **body}, path="/responses"))

    play(renderer, give(agent))
    assert [status for status, _ in statuses] == [400, 400, 400, 200]
    params = [body["error"]["param"] for _, body in statuses[:3]]
    assert params == ["temperature", "previous_response_id", "response_format"]
