"""Claims about conversations as streams: those of an episode that said the same, and a mask over the assistant's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rollout.assistant_turn import TurnWriter
from agents.rollout.conversation import ConversationRenderer, ConversationStream
from agents.rollout.episode import Episode, Limits
from agents.rollout.template_check import template_mismatch
from agents.types import SamplingParams, Trajectory
from envs.datasets.conversations import Conversation
from envs.env import EnvArgs
from envs.errors import UserError
from envs.geo3k.env import build_env
from envs.spec import EnvLimits
from envs.tool_calls import ToolCall, detect_format, find_tool_calls
from envs.types import Message, Sample
from tests.agents.rendering.template_cases import OWN_TEMPLATES, QWEN_TEMPLATES, TEXT_ONLY, renderer_for, whole_ids
from tests.prompts import make_image

EVERY = pytest.mark.parametrize("name", OWN_TEMPLATES + QWEN_TEMPLATES)
#: Templates that know `tool_calls`, and write every turn as it was said.
WRITES_CALLS = pytest.mark.parametrize("name", ["starter", "qwen_xml", "qwen3_vl", "qwen2_5", "qwen3_5_nothink"])
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "calc_score",
            "description": "Score an answer.",
            "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
        },
    },
)
QUESTION: Message = {"role": "user", "content": "Find x."}
RESULT: Message = {"role": "tool", "content": "Score 0.0: 70 is wrong."}
ANSWER: Message = {"role": "assistant", "content": "\\boxed{68}"}


def call(answer: Any = "70", as_text: bool = False) -> dict[str, Any]:
    arguments: Any = {"answer": answer}
    return {"function": {"name": "calc_score", "arguments": json.dumps(arguments) if as_text else arguments}}


def calls(text: str = "So 70. ", **others: Any) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": [call()], **others}


def stream(renderer: Renderer, *messages: Message, context_length: int = 4096) -> ConversationStream:
    conversations = ConversationRenderer(renderer, context_length, check_template_every=1)
    return conversations.stream(Conversation("demos.jsonl row 7", messages, TOOLS))


def spans(renderer: Renderer, found: ConversationStream) -> list[tuple[bool, str]]:
    return list(ConversationRenderer(renderer, 4096).spans(found))


# What each template makes of a call, its answer and the end of the conversation.
SHOWN = {
    "starter": [
        '<tool_call>{"name": "calc_score", "arguments": {"answer": "70"}}</tool_call>',
        "\n<|im_start|>user\n<tool_response>Score 0.0: 70 is wrong.</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ],
    "qwen_xml": [
        "\n<tool_call>\n<function=calc_score>\n<parameter=answer>\n70\n</parameter>\n</function>\n</tool_call>",
        "\n<|im_start|>user\n<tool_response>\nScore 0.0: 70 is wrong.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|im_end|>",
    ],
    # No template of these two knows `tool_calls`: the call is written as the system message teaches it.
    "chatml": [
        '\n<tool_call>\n{"name": "calc_score", "arguments": {"answer": "70"}}\n</tool_call>',
        "\n<|im_start|>tool\nScore 0.0: 70 is wrong.<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ],
    "llama_style": [
        '\n<tool_call>\n{"name": "calc_score", "arguments": {"answer": "70"}}\n</tool_call>',
        "<|start_header_id|>ipython<|end_header_id|>\n\n"
        '"Score 0.0: 70 is wrong."<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        "<|eot_id|>",
    ],
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_mask_covers_what_the_assistant_writes_and_what_closes_its_turns(name: str) -> None:
    renderer, (written, between, closer) = renderer_for(name), SHOWN[name]
    found = stream(renderer, QUESTION, calls("So 70."), RESULT, ANSWER)
    runs = spans(renderer, found)
    assert [is_taught for is_taught, _ in runs] == [False, True, False, True]
    assert [text for _, text in runs[1:]] == [f"So 70.{written}{closer}", between, f"\\boxed{{68}}{closer}"]
    assert found.num_taught == sum(len(renderer.encoder.encode(text)) for is_taught, text in runs if is_taught)


def test_masks_token_by_token() -> None:
    renderer = renderer_for("starter")
    found = stream(renderer, QUESTION, {"role": "assistant", "content": "7."}, {"role": "user", "content": "?"}, ANSWER)
    tokens = [renderer.encoder.decode([index]) for index in found.ids_T.tolist()]
    start = found.trajectory.prompt_length
    assert tokens[start:][:12] == [
        "7", ".", "<|im_end|>", "\n", "<|im_start|>", *tokens[start + 5 : start + 9], "<|im_end|>", "\n", "<|im_start|>"
    ]  # fmt: skip
    end = len(tokens) - len(renderer.encoder.encode("\\boxed{68}<|im_end|>"))
    expected = [1] * 3 + [0] * (end - start - 3) + [1] * (len(tokens) - end)
    assert found.mask_T.tolist() == [0] * start + expected
    assert "".join(tokens[end:]) == "\\boxed{68}<|im_end|>"


@WRITES_CALLS
def test_the_stream_is_the_templates_own_rendering_of_the_whole(name: str) -> None:
    renderer = renderer_for(name)
    system: Message = {"role": "system", "content": "Solve it."}
    shown = [] if name in TEXT_ONLY else [{"type": "image", "image": make_image(64, 32)}]
    asked: Message = {"role": "user", "content": [*shown, {"type": "text", "text": "Find x."}] if shown else "Find x."}
    messages = (system, asked, calls("So 70."), RESULT, calls("", tool_calls=[call("68"), call("9")]), RESULT, ANSWER)
    found = stream(renderer, *messages)
    whole = whole_ids(renderer, messages, TOOLS)
    assert found.ids_T.tolist() == list(whole[: len(found.ids_T)])
    assert renderer.encoder.decode(whole[len(found.ids_T) :]) == "\n"  # what stands behind the last closing token


@EVERY
def test_every_template_takes_a_conversation_with_thoughts_and_calls(name: str) -> None:
    """`stream` compares with the template's rendering by itself; here that it does, and finds nothing."""
    renderer = renderer_for(name)
    thought = "<think>\nHm.\n</think>\n\n"
    found = stream(renderer, QUESTION, calls(f"{thought}So 70."), RESULT, {**ANSWER, "content": thought + "68"})
    assert template_mismatch(found.trajectory.streams[0], renderer) is None
    first, last = (turn.text for turn in found.trajectory.turns)
    assert find_tool_calls(first, detect_format(renderer.chat_template)) == [ToolCall("calc_score", {"answer": "70"})]
    assert last.endswith("Hm.\n</think>\n\n68")
    wrong = replace(found.trajectory, ids_T=np.roll(found.ids_T, 1))
    assert template_mismatch(wrong.streams[0], renderer) is not None


def episode(renderer: Renderer, *turns: str, shows: Image.Image | None = None) -> Trajectory:
    """Return the episode of reinforcement learning in which the model says the turns to the real environment."""
    content: Any = [{"type": "image", "image": shows}, {"type": "text", "text": "Find x."}] if shows else "Find x."
    sample = Sample("0", ({"role": "system", "content": "Solve."}, {"role": "user", "content": content}), "68")
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: turns[turn])
    limits = Limits(max_turns=3, max_new_tokens=1000, env=EnvLimits(inline=True))
    loop = Episode(engine, renderer, limits, SamplingParams(stop_ids=renderer.stop_ids))
    args = EnvArgs(3, tool_format=detect_format(renderer.chat_template))
    return asyncio.run(loop.run(sample, lambda: build_env(sample, args), seed=0))


@WRITES_CALLS
@pytest.mark.parametrize("is_split", [False, True])
def test_a_conversation_is_the_stream_of_an_episode_that_said_the_same(name: str, is_split: bool) -> None:
    """With the calls in the text as the model wrote them, and as `tool_calls` beside what it said before."""
    renderer = renderer_for(name)
    writer = TurnWriter(renderer, detect_format(renderer.chat_template))
    spoken = [calls("So 70."), calls("Or 68?", tool_calls=[call("68")]), ANSWER]
    shows = None if name in TEXT_ONLY else make_image(96, 64)
    played = episode(renderer, *(writer.text(message, "") for message in spoken), shows=shows)
    assert played.reward == 1.0 and len(played.turns) == 3
    waiting = iter(spoken)
    messages = [next(waiting) if is_split and m["role"] == "assistant" else dict(m) for m in played.messages]
    env = build_env(Sample("0", (), "68"), EnvArgs(3))
    conversation = Conversation("row 0", tuple(messages), tuple(env.tools))
    found = ConversationRenderer(renderer, 4096, check_template_every=1).stream(conversation)
    assert found.ids_T.tolist() == played.ids_T.tolist()
    assert found.mask_T.tolist() == played.mask_T.tolist()
    assert found.trajectory.prompt_length == played.prompt_length
    assert [image.digest for image in found.trajectory.images] == [image.digest for image in played.images]
    assert [(t.start, t.end, t.text) for t in found.trajectory.turns] == [
        (t.start, t.end, t.text) for t in played.turns
    ]


@WRITES_CALLS
def test_arguments_as_an_object_and_as_its_json_are_one_stream(name: str) -> None:
    renderer = renderer_for(name)
    as_text = {**calls(), "tool_calls": [{"id": "c1", "type": "function", **call(as_text=True)}]}
    answer = {**RESULT, "tool_call_id": "c1"}
    one, other = (
        stream(renderer, QUESTION, calls(), RESULT, ANSWER),
        stream(renderer, QUESTION, as_text, answer, ANSWER),
    )
    assert one.ids_T.tolist() == other.ids_T.tolist() and one.mask_T.tolist() == other.mask_T.tolist()


@pytest.mark.parametrize("name", ["starter", "qwen_xml"])
def test_numbers_lists_and_quotes_in_arguments_are_read_back_by_environments(name: str) -> None:
    renderer = renderer_for(name)
    arguments = {"n": 3, "places": [1, {"a": 'q"'}], "text": "5 \\sqrt { 2 }", "flag": True}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    (found,) = stream(renderer, QUESTION, said).trajectory.turns
    (read,) = find_tool_calls(found.text, detect_format(renderer.chat_template))
    assert isinstance(read, ToolCall)
    if name == "starter":
        assert read.arguments == arguments
    else:  # where every value is plain text
        assert read.arguments == {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}


def test_turns_that_are_not_to_be_learnt_are_context() -> None:
    renderer = renderer_for("starter")
    taught = stream(renderer, QUESTION, calls(), RESULT, ANSWER)
    partly = stream(renderer, QUESTION, calls(train=False), RESULT, {**ANSWER, "train": True})
    assert partly.ids_T.tolist() == taught.ids_T.tolist()
    assert spans(renderer, partly)[-1] == (True, "\\boxed{68}<|im_end|>")
    assert [is_taught for is_taught, _ in spans(renderer, partly)] == [False, True]


@pytest.mark.parametrize("mark", [{"train": False}, {"loss": False}, {"loss_scale": 0}, {"weight": 0}, {"weight": 0.0}])
def test_the_marks_of_other_trainers_leave_a_turn_out_too_and_never_reach_the_template(mark: dict[str, Any]) -> None:
    renderer = renderer_for("starter")
    partly = stream(renderer, {**QUESTION, **mark}, calls(**mark), RESULT, ANSWER)
    assert [is_taught for is_taught, _ in spans(renderer, partly)] == [False, True]
    assert partly.ids_T.tolist() == stream(renderer, QUESTION, calls(), RESULT, ANSWER).ids_T.tolist()
    assert all(set(message) <= {"role", "content", "name"} for message in partly.trajectory.messages)


@pytest.mark.parametrize("mark", [{"train": True}, {"loss": True}, {"loss_scale": 1.0}, {"weight": 1}, {"loss": None}])
def test_a_turn_that_is_marked_as_learnt_is_learnt(mark: dict[str, Any]) -> None:
    renderer = renderer_for("starter")
    marked = stream(renderer, QUESTION, calls(**mark), RESULT, ANSWER)
    assert marked.mask_T.tolist() == stream(renderer, QUESTION, calls(), RESULT, ANSWER).mask_T.tolist()


def test_images_of_user_and_tool_stand_in_order_as_often_as_they_have_tokens() -> None:
    renderer = renderer_for("starter")
    assert renderer.images is not None
    shown, zoomed = make_image(64, 64, seed=1), make_image(96, 64, seed=2)
    asked = {"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": "Find x."}]}
    result = {"role": "tool", "content": [{"type": "text", "text": "Here:"}, {"type": "image", "image": zoomed}]}
    found = stream(renderer, asked, calls(), result, ANSWER)
    assert [image.digest for image in found.trajectory.images] == [
        renderer.images.process(p).digest for p in (shown, zoomed)
    ]
    places = (found.ids_T == renderer.image_token_id).nonzero()[0]
    assert (places < found.trajectory.prompt_length).sum() == 4 and len(places) == 4 + 6
    assert not found.mask_T[places].any()


def test_a_thought_goes_on_from_what_the_template_opens_a_turn_with() -> None:
    renderer = renderer_for("chatml_thinking")  # opens with <think>
    thinks = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n68"}
    for content in ("<think>\nHm.\n</think>\n\n68", "Hm.\n</think>\n\n68"):
        found = stream(renderer, QUESTION, {"role": "assistant", "content": content})
        assert spans(renderer, found)[-1] == (True, "Hm.\n</think>\n\n68<|im_end|>")
    with pytest.raises(UserError, match=r"must continue '<think>\\n'"):
        stream(renderer, QUESTION, ANSWER)
    without = renderer_for("chatml_thinking", enable_thinking=False)
    assert spans(without, stream(without, QUESTION, ANSWER))[-1] == (True, "\\boxed{68}<|im_end|>")
    # An earlier thought, which the template would drop by now, stays: the model saw it when it went on.
    asks: Message = {"role": "user", "content": "Sure?"}
    both = spans(renderer, stream(renderer, QUESTION, thinks, asks, thinks))
    assert [text for is_taught, text in both if is_taught] == ["Hm.\n</think>\n\n68<|im_end|>"] * 2


def test_a_template_that_writes_an_empty_thought_has_the_model_close_the_one_that_it_opened() -> None:
    thinks = {**ANSWER, "content": "<think>\nHm.\n</think>\n\n68"}
    renderer = renderer_for("qwen3_5_think")
    assert spans(renderer, stream(renderer, QUESTION, ANSWER))[-1] == (True, "\n</think>\n\n\\boxed{68}<|im_end|>")
    assert spans(renderer, stream(renderer, QUESTION, thinks))[-1] == (True, "Hm.\n</think>\n\n68<|im_end|>")
    without = renderer_for("qwen3_5_think", enable_thinking=False)
    assert spans(without, stream(without, QUESTION, ANSWER))[-1] == (True, "\\boxed{68}<|im_end|>")
    with pytest.raises(UserError, match="fix the message, or let the template open thoughts with --template-options"):
        stream(without, QUESTION, thinks)


def test_a_thought_may_speak_of_a_call_that_the_turn_does_not_make() -> None:
    renderer = renderer_for("qwen3")
    thinks = calls(reasoning_content="Write <tool_call>{...}</tool_call>.", tool_calls=[call()])
    (_, taught), *_ = [span for span in spans(renderer, stream(renderer, QUESTION, thinks, RESULT, ANSWER)) if span[0]]
    assert taught.count("<tool_call>") == 2 and taught.startswith(
        "<think>\nWrite <tool_call>{...}</tool_call>.\n</think>"
    )


def test_where_the_environment_keeps_thinking_a_call_in_a_thought_is_a_call() -> None:
    renderer, other = (
        renderer_for("qwen3"),
        '<tool_call>{"name": "calc_score", "arguments": {"answer": "1"}}</tool_call>',
    )
    thinks = calls(reasoning_content=other, tool_calls=[call()])
    assert other in TurnWriter(renderer, "hermes", "auto").text(thinks, "row 7")
    with pytest.raises(UserError, match="must have tool_calls that a model can write"):
        TurnWriter(renderer, "hermes", "keep").text(thinks, "row 7")


def test_an_empty_thought_is_learnt_where_the_template_writes_one() -> None:
    renderer = renderer_for("qwen3")
    assert spans(renderer, stream(renderer, QUESTION, ANSWER))[-1] == (
        True,
        "<think>\n\n</think>\n\n\\boxed{68}<|im_end|>",
    )
    given = {"role": "assistant", "content": "68", "reasoning_content": "Hm."}
    assert spans(renderer, stream(renderer, QUESTION, given))[-1][1] == "<think>\nHm.\n</think>\n\n68<|im_end|>"


def test_control_tokens_in_a_question_stay_text_and_in_an_answer_are_refused() -> None:
    renderer = renderer_for("starter")
    hostile: Message = {"role": "user", "content": "Find <|im_end|> and <|image_pad|>."}
    found = stream(renderer, hostile, ANSWER)
    assert renderer.image_token_id not in found.ids_T and (found.ids_T == renderer.closer_id).sum() == 3
    with pytest.raises(UserError, match=r"row 7 messages\[1\]: must hold no control token"):
        stream(renderer, QUESTION, {"role": "assistant", "content": "68<|im_end|>"})


BAD = {
    "ends with a user": ((QUESTION, ANSWER, QUESTION), "must end with an assistant's turn"),
    "ends with a result": ((QUESTION, calls(), RESULT), "must end with an assistant's turn"),
    "no assistant": ((QUESTION,), "must have an assistant's turn"),
    "nothing": ((), "must have an assistant's turn"),
    "no question": (({"role": "system", "content": "Be."}, ANSWER), "must have a user's message before"),
    "unknown role": ((QUESTION, {"role": "critic", "content": "No."}, ANSWER), "must have roles among"),
    "two turns": ((QUESTION, ANSWER, ANSWER), "must have an answer between two turns"),
    "result without call": ((QUESTION, ANSWER, RESULT, ANSWER), "must answer a tool call"),
    "result after a question": ((QUESTION, RESULT, ANSWER), "must answer a tool call"),
    "two results": ((QUESTION, calls(), RESULT, RESULT, ANSWER), "must answer a tool call"),
    "result of another call": (
        (QUESTION, {**calls(), "tool_calls": [{"id": "a", **call()}]}, {**RESULT, "tool_call_id": "b"}, ANSWER),
        "must answer a tool call",
    ),
    "no call": ((QUESTION, {**calls(), "tool_calls": [{"function": {"name": 5}}]}, RESULT, ANSWER), "must be a tool"),
    "call twice": (
        (QUESTION, calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>'), RESULT, ANSWER),
        "must have tool_calls that a model can write",
    ),
    "says nothing": ((QUESTION, {"role": "assistant", "content": ""}), "must say something"),
    "shows an image": (
        (QUESTION, {"role": "assistant", "content": [{"type": "image", "image": make_image(32, 32)}]}),
        "must be text where the assistant speaks",
    ),
    "nothing to learn": ((QUESTION, {**ANSWER, "train": False}), "must have a turn to learn from"),
    "nothing has weight": ((QUESTION, {**ANSWER, "weight": 0}), "must have a turn to learn from"),
    "train is a word": ((QUESTION, {**ANSWER, "train": "no"}), "must be true or false"),
    "loss is a number": ((QUESTION, {**ANSWER, "loss": 0}), "must be true or false"),
    "half a weight": ((QUESTION, {**ANSWER, "weight": 0.5}), "must be 0 or 1"),
    "weights of tokens": ((QUESTION, {**ANSWER, "loss_scale": [0, 1]}), "must be 0 or 1"),
    "marks that disagree": ((QUESTION, {**ANSWER, "loss": False, "weight": 1}), "must agree in loss and weight"),
    "a user to learn from": (({**QUESTION, "loss": True}, ANSWER), "must not be learnt unless it is the assistant's"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_refused_with_its_row_and_rule(name: str) -> None:
    messages, rule = BAD[name]
    with pytest.raises(UserError) as caught:
        stream(renderer_for("starter"), *messages)
    assert caught.value.field.startswith("demos.jsonl row 7") and caught.value.rule.startswith(rule)


def test_a_conversation_over_the_context_length_is_refused_and_never_cut() -> None:
    renderer = renderer_for("starter")
    length = len(stream(renderer, QUESTION, ANSWER).ids_T)
    assert len(stream(renderer, QUESTION, ANSWER, context_length=length).ids_T) == length
    with pytest.raises(UserError, match=f"row 7: must have at most {length - 1} tokens, got {length}"):
        stream(renderer, QUESTION, ANSWER, context_length=length - 1)


def test_what_a_template_or_a_model_without_eyes_refuses_is_an_error_of_the_row() -> None:
    shows: Message = {"role": "user", "content": [{"type": "image", "image": make_image(32, 32)}]}
    with pytest.raises(UserError, match="row 7: --model: must read images"):
        stream(renderer_for("chatml"), shows, ANSWER)
    with pytest.raises(UserError, match="row 7: must be a conversation that the model's chat template can write"):
        stream(renderer_for("starter"), {"role": "user", "content": [{"type": "text"}]}, ANSWER)
