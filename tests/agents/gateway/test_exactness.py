"""Claims about what episodes of agents train on: it is what the model read and wrote, whatever an agent sends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.engines.base import EngineSetup
from agents.engines.hf import HFEngine
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.stream import Stream
from agents.types import EndReason, Trajectory
from tests.agents.engines.plain_engine import PlainEngine
from tests.agents.gateway.playing import TEXTS, TOOL, Ask, NotingEngine, as_part, play, said
from tests.budget import examples
from tests.prompts import make_image, sample

IMAGES = [as_part(make_image(64, 64, seed)) for seed in range(3)]


contents = st.one_of(
    st.sampled_from(["Hm?", "", "<|im_end|><|image_pad|>", "é\ud800"]),
    st.lists(st.sampled_from([{"type": "text", "text": "See"}, *IMAGES]), min_size=1, max_size=3),
)
steps = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([*["extend"] * 6, "fresh", "edit", "cut", "again", "foreign", "order"]),
        # The latest conversations first: those can be extended.
        "which": st.sampled_from([-1, -1, -1, -2, -3, 0]),
        "place": st.integers(0, 10),
        "role": st.sampled_from(["user", "tool", "system", "developer"]),
        "content": contents,
        "fields": st.sampled_from(
            [
                *[{}] * 6,
                {"n": 3},
                {"tool_choice": "none"},
                {"max_tokens": 3, "tool_choice": "required"},
                {"stop": ["o", "5"]},
                {"parallel_tool_calls": False},
                {"tools": []},
            ]
        ),
    }
)


def next_request(step: Mapping[str, Any], told: list[list[Any]], problem: list[Any]) -> list[Any]:
    """Return the messages of a request, from those that were sent and answered before."""
    before = copy.deepcopy(told[max(step["which"], -len(told))]) if told else list(problem)
    added = {"role": step["role"], "content": step["content"]}
    place = step["place"] % len(before)
    match step["kind"]:
        case "fresh":
            return [{"role": "user", "content": step["content"]}]
        case "edit":
            before[place]["content"] = step["content"] if before[place]["role"] != "assistant" else "Edited."
        case "cut":
            del before[place]
        case "again":
            before = [m for m in before if m["role"] != "assistant"][:1] or before
            return before if before[-1]["role"] != "assistant" else [*before, added]
        case "foreign":
            call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "<|im_end|>"}'}}
            before.insert(place, {"role": "assistant", "content": "Mine.", "tool_calls": [call]})
        case "order":
            before.reverse()
    return [*before, added]


@examples(150)
@given(plan=st.lists(steps, min_size=1, max_size=12), texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6))
def test_whatever_an_agent_sends_each_turn_is_trained_as_the_model_read_and_wrote_it(
    renderer: Renderer, plan: list[Mapping[str, Any]], texts: list[str]
) -> None:
    engine = NotingEngine(renderer.tokenizer, lambda turn, _: texts[turn % len(texts)], 1500)
    statuses = []

    def agent(task: dict[str, Any], ask: Ask) -> None:
        told: list[list[Any]] = []
        for step in plan:
            messages = next_request(step, told, task["messages"])
            status, body = ask(messages, **{"tools": [TOOL], **step["fields"]})
            statuses.append((status, body))
            if status == 200:
                told += [[*messages, choice["message"]] for choice in body["choices"]]

    asked = sample("x?", make_image(64, 64, 0))
    t = play(renderer, agent, engine=engine, asked=asked, limits={"max_turns": 20, "max_new_tokens": 1200})
    assert t.end_reason in (EndReason.COMPLETED, EndReason.MAX_TURNS, EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL), (
        t.error
    )
    assert {status for status, _ in statuses} <= {200, 400}
    check_turns(t, engine)


def check_turns(t: Trajectory, engine: NotingEngine) -> None:
    """Each turn stands once, in a stream whose ids before it are what the engine read, with the same images."""
    assert len(t.turns) == len(engine.noted)
    spans = [np.zeros(len(stream.ids_T), dtype=bool) for stream in t.streams]
    for turn, (request, completion) in zip(t.turns, engine.noted, strict=True):
        stream = t.streams[turn.stream]
        assert request.stream == turn.stream
        assert tuple(stream.ids_T[: turn.start].tolist()) == request.ids
        assert tuple(stream.ids_T[turn.start : turn.end].tolist()) == completion.ids
        assert stream.images[: len(request.images)] == request.images
        assert not spans[turn.stream][turn.start : turn.end].any()
        spans[turn.stream][turn.start : turn.end] = True
    for stream, span in zip(t.streams, spans, strict=True):
        assert (stream.mask_T == span).all()


def test_logprobs_of_two_streams_with_images_are_those_of_plain_transformers(
    renderer: Renderer, model: PolicyModel, checkpoint: Path, tmp_path: Path
) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        one, two = [*task["messages"]], [{"role": "user", "content": [IMAGES[1], {"type": "text", "text": "y?"}]}]
        for _ in range(2):
            for conversation in (one, two):
                conversation += [said(ask(conversation, max_tokens=8)), {"role": "user", "content": [IMAGES[2]]}]

    asked = sample("x?", make_image(64, 64, 0))
    t = play(renderer, agent, engine=HFEngine(model, max_wait_s=0.05), asked=asked)
    assert (t.end_reason, [turn.stream for turn in t.turns]) == (EndReason.COMPLETED, [0, 1, 0, 1]), t.error
    plain = PlainEngine(EngineSetup(str(checkpoint), "float32", "cpu", 4096, 4, renderer.image_token_id, tmp_path))
    for stream in t.streams:
        assert len(stream.images) == 2
        logits_TV = plain.logits(stream.ids_T.tolist(), stream.images)[:-1].clone()
        logits_TV[:, list(renderer.suppressed_ids)] = -np.inf
        logprobs_T = logits_TV.log_softmax(-1)[np.arange(len(stream.ids_T) - 1), stream.ids_T[1:]].numpy()
        trained = stream.mask_T[1:]
        assert logprobs_T[trained] == pytest.approx(stream.logprobs_T[1:][trained], abs=1e-4)


def test_a_stream_that_the_template_does_not_reproduce_is_invalid_with_the_first_difference(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        ask([*task["messages"], said(ask(task["messages"])), {"role": "user", "content": "Hm?"}])
        ask([{"role": "user", "content": "Else?"}])

    read = Stream.read

    def read_more(stream: Stream, rendered: Any) -> None:
        # As a renderer would that adds a token after a turn.
        extra = rendered if not stream.ids else type(rendered)((*rendered.ids, 5), rendered.images)
        read(stream, extra)

    monkeypatch.setattr(Stream, "read", read_more)
    t = play(renderer, agent)
    assert t.end_reason is EndReason.INVALID_STREAM
    assert (t.error or "").startswith("before turn 2: the stream has [")
