"""Claims about every chat template: what is built turn by turn is what the template writes, whatever the texts hold."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from PIL import Image

from agents.rendering.encoding import Encoder
from agents.rendering.renderer import MAX_PROMPTS, Renderer
from agents.rendering.template import MARK, describe_tools
from agents.rollout.conversation import ConversationRenderer
from agents.rollout.template_check import template_mismatch
from agents.types import EndReason, Trajectory, Turn
from envs.checking.chat_template import ChatTemplate, choose_templates
from envs.datasets.conversations import Conversation
from envs.errors import UserError
from envs.tool_calls import find_tool_calls
from envs.types import Message, message_images
from tests.agents.rendering.template_cases import (
    LLAMA_TOKENS,
    OWN_TEMPLATES,
    QWEN_TEMPLATES,
    REWRITING,
    TEXT_ONLY,
    renderer_for,
    starter_tokenizer,
    whole_ids,
)
from tests.budget import examples
from tests.prompts import make_image

EVERY = pytest.mark.parametrize("name", OWN_TEMPLATES + QWEN_TEMPLATES)
FAITHFUL = pytest.mark.parametrize("name", [n for n in OWN_TEMPLATES + QWEN_TEMPLATES if n not in REWRITING])
MANY = examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "calc_score",
            "description": "Score an <|im_end|> answer.",
            "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
        },
    },
)
IMAGES = (make_image(32, 32, 1), make_image(64, 32, 2), make_image(96, 64, 3))
HOSTILE = (
    "<|im_end|>",
    "<|im_start|>user\n",
    "<|eot_id|>",
    "<|image_pad|>",
    "<think>\n",
    "\n</think>\n\n",
    "<tool_response>",
    "</tool_response>",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    '{"a": "b\\n"}',
    "{{ messages }}{% if",
    MARK,
    "\n\n",
    "  ",
    "\u00a0",
    "e\u0301",
    "\U0001f642",
    "<",
    "|im_end|>",
)
PLAIN = st.text(st.sampled_from("ab 3.,é\n<>{}\"'/"), max_size=20) | st.text(st.characters(codec="utf-8"), max_size=9)
TEXTS = st.lists(st.sampled_from(HOSTILE) | PLAIN, max_size=4).map("".join)
# What a model can have written: no image token, which it is kept from sampling.
TURNS = TEXTS.filter(lambda text: "<|image_pad|>" not in text)


@st.composite
def contents(draw: Callable[..., Any], shows: bool) -> str | list[dict[str, Any]]:
    if draw(st.booleans()):
        return draw(TEXTS)
    pieces: list[Any] = draw(st.lists(TEXTS | st.sampled_from(IMAGES) if shows else TEXTS, max_size=4))
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in pieces]


@st.composite
def conversations(draw: Callable[..., Any], shows: bool) -> tuple[list[Message], list[tuple[str, list[Message]]]]:
    """Return a prompt, and turns of the model, each with what the environment answers."""
    system = draw(st.none() | TEXTS)
    prompt = [] if system is None else [{"role": "system", "content": system}]
    prompt.append({"role": "user", "content": draw(contents(shows))})
    said = st.tuples(st.sampled_from(["tool", "user"]), contents(shows))
    answers = st.lists(said.map(lambda pair: {"role": pair[0], "content": pair[1]}), min_size=1, max_size=3)
    return prompt, draw(st.lists(st.tuples(TURNS, answers), min_size=1, max_size=4))


def canonical(renderer: Renderer, text: str) -> list[int]:
    return [*renderer.encoder.encode(text), renderer.closer_id]


def letters(renderer: Renderer, text: str) -> list[int]:
    """Return ids that no tokenizer gives for a text: one token for each byte."""
    return [index for letter in text for index in renderer.encoder.encode(letter)]


def played(
    renderer: Renderer,
    prompt: Sequence[Message],
    turns: Sequence[tuple[Sequence[int], Sequence[Message]]],
    tools: Sequence[dict[str, Any]] = (),
) -> Trajectory:
    """Return the trajectory that the agent loop makes of sampled ids and answers."""
    rendered = renderer.prompt(prompt, tools)
    ids, images, messages, done = list(rendered.ids), list(rendered.images), list(prompt), []
    for sampled, answers in turns:
        start = len(ids)
        ids += sampled
        text = renderer.decode(sampled)
        done.append(Turn(start, len(ids), text, "stop", ((0, len(sampled)),), 0, tuple(answers), {}, 0.0, 0.0))
        suffix = renderer.suffix(answers, ids[-1])
        ids += suffix.ids
        images += suffix.images
        messages += [{"role": "assistant", "content": text}, *answers]
    mask = np.zeros(len(ids), dtype=np.bool_)
    for turn in done:
        mask[turn.start : turn.end] = True
    return Trajectory(
        sample_id="sample",
        sample_index=0,
        seed=0,
        ids_T=np.array(ids),
        mask_T=mask,
        logprobs_T=np.zeros(len(ids), dtype=np.float32),
        images=tuple(images),
        turns=tuple(done),
        reward=0.0,
        end_reason=EndReason.MAX_TURNS,
        prompt_length=len(rendered.ids),
        messages=tuple(messages),
        tools=tuple(tools),
    )


def shows_images(name: str) -> bool:
    return name not in TEXT_ONLY


@EVERY
@MANY
@given(data=st.data(), tools=st.sampled_from([(), TOOLS]), is_closed=st.booleans())
def test_every_boundary_is_what_the_template_writes_there(
    name: str, data: st.DataObject, tools: tuple[dict[str, Any], ...], is_closed: bool
) -> None:
    renderer = renderer_for(name)
    prompt, turns = data.draw(conversations(shows_images(name)))
    assert renderer.prompt(prompt, tools).ids == whole_ids(renderer, prompt, tools, len(prompt))
    messages = list(prompt)
    for text, answers in turns:
        messages += [{"role": "assistant", "content": text}, *answers]
        suffix = renderer.suffix(answers, renderer.closer_id if is_closed else 0)
        whole = whole_ids(renderer, messages, tools, len(prompt))
        ending = (renderer.closer_id, *suffix.ids) if is_closed else suffix.ids
        assert whole[-len(ending) :] == ending
        assert [i.digest for i in suffix.images] == [renderer.images.process(i).digest for i in message_images(answers)]


@FAITHFUL
@MANY
@given(data=st.data(), tools=st.sampled_from([(), TOOLS]))
def test_canonical_turns_give_the_rendering_of_the_whole_conversation_at_every_boundary(
    name: str, data: st.DataObject, tools: tuple[dict[str, Any], ...]
) -> None:
    renderer = renderer_for(name)
    prompt, turns = data.draw(conversations(shows_images(name)))
    words = data.draw(
        st.lists(st.from_regex(r"[a-z]{1,9}( [a-z0-9.]{1,9}){0,3}", fullmatch=True), min_size=4, max_size=4)
    )
    ids, messages = list(renderer.prompt(prompt, tools).ids), list(prompt)
    for (_, answers), text in zip(turns, words, strict=False):
        ids += canonical(renderer, text)
        ids += renderer.suffix(answers, renderer.closer_id).ids
        messages += [{"role": "assistant", "content": text}, *answers]
        assert tuple(ids) == whole_ids(renderer, messages, tools, len(prompt))


@EVERY
@MANY
@given(data=st.data(), tools=st.sampled_from([(), TOOLS]))
def test_the_check_finds_nothing_in_a_right_stream(
    name: str, data: st.DataObject, tools: tuple[dict[str, Any], ...]
) -> None:
    renderer = renderer_for(name)
    prompt, turns = data.draw(conversations(shows_images(name)))
    for write in (canonical, letters):
        trajectory = played(renderer, prompt, [(write(renderer, text), answers) for text, answers in turns], tools)
        assert template_mismatch(trajectory.streams[0], renderer) is None


@EVERY
@MANY
@given(data=st.data(), change=st.sampled_from(["swap", "drop", "double"]))
def test_the_check_finds_any_token_that_the_template_did_not_write(name: str, data: st.DataObject, change: str) -> None:
    renderer = renderer_for(name)
    prompt, turns = data.draw(conversations(shows_images(name)))
    t = played(renderer, prompt, [(canonical(renderer, text), answers) for text, answers in turns])
    place = int(data.draw(st.sampled_from(np.flatnonzero(~t.mask_T).tolist())))
    assume(t.ids_T[place] != renderer.image_token_id)
    assume(change != "drop" or place < t.turns[-1].end)  # what is last may be missing: the episode ended
    wrong = {"swap": [int(t.ids_T[place]) ^ 1], "drop": [], "double": [int(t.ids_T[place])] * 2}[change]
    shift = len(wrong) - 1
    number = 1 + sum(turn.end <= place for turn in t.turns)
    broken = replace(
        t,
        ids_T=np.array([*t.ids_T[:place], *wrong, *t.ids_T[place + 1 :]]),
        turns=tuple(
            replace(u, start=u.start + shift * (u.start > place), end=u.end + shift * (u.start > place))
            for u in t.turns
        ),
    )
    found = template_mismatch(broken.streams[0], renderer)
    assert (found or "").startswith(f"before turn {number}: the stream has [")


def test_the_check_names_turn_place_and_tokens() -> None:
    renderer = renderer_for("starter")
    prompt = [{"role": "user", "content": "?"}]
    t = played(renderer, prompt, [(canonical(renderer, "a"), [{"role": "tool", "content": "b"}])])
    newline = t.turns[0].end
    assert renderer.decode(t.ids_T[newline : newline + 1].tolist()) == "\n"
    broken = replace(t, ids_T=np.delete(t.ids_T, newline))
    start = renderer.encoder.added["<|im_start|>"]
    assert template_mismatch(broken.streams[0], renderer) == (
        f"before turn 2: the stream has [{start} '<|im_start|>', "
        + ", ".join(f"{i} {renderer.encoder.decode([i])!r}" for i in broken.ids_T[newline + 1 : newline + 6])
        + f", ...] at {newline}, the template writes [{t.ids_T[newline]} '\\n', {start} '<|im_start|>', "
        + ", ".join(f"{i} {renderer.encoder.decode([i])!r}" for i in t.ids_T[newline + 2 : newline + 6])
        + ", ...]"
    )
    assert template_mismatch(replace(t, ids_T=t.ids_T[:0], turns=()).streams[0], renderer) is None
    other = replace(t, messages=(*prompt, {"role": "assistant", "content": "c"}, {"role": "tool", "content": "b"}))
    assert (
        template_mismatch(other.streams[0], renderer) == "before turn 2: message 2 is not the text of the turn before"
    )


def test_the_check_takes_a_cut_turn_an_empty_answer_and_a_stream_that_ends_with_a_turn() -> None:
    renderer = renderer_for("starter")
    silent: Message = {"role": "user", "content": ""}
    turns = [(renderer.encoder.encode("cut"), [silent]), (canonical(renderer, "b"), [silent])]
    t = played(renderer, [{"role": "user", "content": "?"}], turns)
    t = replace(t, turns=tuple(replace(turn, observations=()) for turn in t.turns))
    assert template_mismatch(t.streams[0], renderer) is None
    ended = replace(t, ids_T=t.ids_T[: t.turns[-1].end], messages=t.messages[:-1])
    assert template_mismatch(ended.streams[0], renderer) is None


def test_a_wrong_tokenisation_of_the_right_text_is_found() -> None:
    renderer = renderer_for("starter")
    prompt, answer = [{"role": "user", "content": "?"}], "Score 0.0: the answer is wrong."
    t = played(renderer, prompt, [(canonical(renderer, "a"), [{"role": "tool", "content": answer}])])
    ids = t.ids_T.tolist()
    whole = renderer.encoder.encode(answer)
    place = next(k for k in range(len(ids)) if ids[k : k + len(whole)] == whole)
    split = [*ids[:place], *letters(renderer, answer), *ids[place + len(whole) :]]
    assert renderer.encoder.decode(split) == renderer.encoder.decode(ids)
    assert "before turn 2" in (template_mismatch(replace(t, ids_T=np.array(split)).streams[0], renderer) or "")


@pytest.mark.parametrize("name", REWRITING)
def test_a_thinking_template_opens_each_turn_and_strips_earlier_ones_only_behind_the_stream(name: str) -> None:
    renderer = renderer_for(name)
    prompt = [{"role": "user", "content": "Find x."}]
    thought = "Hm, 70.\n</think>\n\nIs it 70?"
    t = played(
        renderer,
        prompt,
        [
            (canonical(renderer, thought), [{"role": "tool", "content": "no"}, {"role": "tool", "content": "really"}]),
            (canonical(renderer, "68.\n</think>\n\n68!"), [{"role": "user", "content": "Sure?"}]),
        ],
    )
    assert renderer.encoder.decode(t.ids_T.tolist()) == (
        "<|im_start|>user\nFind x.<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "Hm, 70.\n</think>\n\nIs it 70?<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nno\n</tool_response>\n<tool_response>\nreally\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n68.\n</think>\n\n68!<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert "Hm, 70." not in renderer.text(t.messages, (), 1)
    assert template_mismatch(t.streams[0], renderer) is None


@pytest.mark.parametrize(("name", "opening"), [(name, "<think>\n") for name in REWRITING] + [("qwen3", "")])
def test_template_arguments_reach_the_prompt_and_every_suffix(name: str, opening: str) -> None:
    plain, without = renderer_for(name), renderer_for(name, enable_thinking=False)
    for renderer, ending in ((plain, opening), (without, "<think>\n\n</think>\n\n")):
        for rendered in (
            renderer.prompt([{"role": "user", "content": "?"}]),
            renderer.suffix([{"role": "tool", "content": "1"}], renderer.closer_id),
        ):
            assert renderer.encoder.decode(rendered.ids).endswith(f"<|im_start|>assistant\n{ending}")


def test_a_llama_template_is_followed_with_its_headers_its_trimming_and_its_json() -> None:
    renderer = renderer_for("llama_style")
    prompt = [{"role": "system", "content": " Solve. "}, {"role": "user", "content": "\nFind x. "}]
    turn = canonical(renderer, " 70? ")
    t = played(
        renderer, prompt, [(turn, [{"role": "tool", "content": ' "no"\n'}, {"role": "user", "content": " Go. "}])]
    )
    header = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    assert renderer.encoder.decode(t.ids_T.tolist()) == (
        f"<|begin_of_text|>{header('system')}Solve.<|eot_id|>{header('user')}Find x.<|eot_id|>{header('assistant')}"
        f' 70? <|eot_id|>{header("ipython")}" \\"no\\"\\n"<|eot_id|>{header("user")}Go.<|eot_id|>{header("assistant")}'
    )
    assert renderer.closer == "<|eot_id|>"
    assert template_mismatch(t.streams[0], renderer) is None


def build(change: Callable[[str], str], name: str = "chatml", **options: Any) -> Renderer:
    """Return a renderer of one of our templates, changed."""
    tokenizer = starter_tokenizer(name)
    changed = change(tokenizer.chat_template)
    assert changed != tokenizer.chat_template
    tokenizer.chat_template = changed
    return Renderer(tokenizer, options.pop("images", None), **options)


def is_followed(renderer: Renderer, answers: list[Message]) -> bool:
    """Whether the suffix is the end of the whole conversation's rendering."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}, *answers]
    ending = (renderer.closer_id, *renderer.suffix(answers, renderer.closer_id).ids)
    return whole_ids(renderer, messages)[-len(ending) :] == ending


@pytest.mark.parametrize(
    "written",
    [
        "(message.content | upper)",
        "message.content.split('</think>')[-1]",
        "(message.content or 'nothing')",
        "(message.content | replace('a', 'b'))",
        "(message.content | length) ~ message.content",
    ],
)
def test_a_template_that_changes_texts_in_any_way_is_followed(written: str) -> None:
    renderer = build(lambda source: source.replace("message.content", written))
    for text in ("a", "", " a b\n", "x</think>y", "ab" * 40):
        assert is_followed(renderer, [{"role": "tool", "content": text}])
        assert is_followed(renderer, [{"role": "tool", "content": text}, {"role": "user", "content": text}])


def test_other_fields_of_a_message_reach_the_template() -> None:
    renderer = build(
        lambda source: source.replace("'\\n' ~ message.content", "' ' ~ message.name ~ '\\n' ~ message.content")
    )
    answer = {"role": "tool", "name": "calc<|im_end|>", "content": "1"}
    assert "tool calc<\u200b|im_end|>\n1<|im_end|>" in renderer.encoder.decode(renderer.suffix([answer], 0).ids)
    assert is_followed(renderer, [answer])


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no tools here') }}", ""], ids=["raises", "is silent"])
def test_a_role_that_the_template_does_not_know_becomes_the_users(refusal: str) -> None:
    def change(source: str) -> str:
        loop = "{%- for message in messages -%}"
        return source.replace(loop, loop + "{%- if message.role == 'tool' -%}" + refusal + "{%- else -%}").replace(
            "{%- endfor -%}", "{%- endif -%}{%- endfor -%}"
        )

    renderer = build(change)
    as_tool, as_user = ({"role": role, "content": "Score 1.0"} for role in ("tool", "user"))
    assert renderer.suffix([as_tool], 0).ids == renderer.suffix([as_user], 0).ids
    prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    assert renderer.prompt([*prompt, as_tool]).ids == renderer.prompt([*prompt, as_user]).ids
    assert is_followed(renderer, [as_tool, as_user])


@pytest.mark.parametrize("role", ["model", "model "])
def test_a_role_that_the_template_writes_as_the_models_own_becomes_the_users(role: str) -> None:
    def change(source: str) -> str:  # as Gemma's template does
        named = source.replace("message.role", "('model' if message.role == 'assistant' else message.role)")
        return named.replace("<|im_start|>assistant", "<|im_start|>model")

    renderer = build(change)
    as_model, as_user = ({"role": each, "content": "Score 1.0"} for each in (role, "user"))
    assert renderer.suffix([as_model], 0).ids == renderer.suffix([as_user], 0).ids


def test_a_system_message_that_the_template_refuses_is_a_user_error() -> None:
    loop = "{%- for message in messages -%}"
    no_system = "{%- if message.role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}"
    renderer = build(lambda source: source.replace(loop, loop + no_system))
    with pytest.raises(UserError, match="prompt: must not begin with a system message for this model's template"):
        renderer.prompt([{"role": "system", "content": "Solve."}, {"role": "user", "content": "?"}])
    assert renderer.prompt([{"role": "user", "content": "?"}]).ids
    with pytest.raises(UserError, match="--model: must have a chat template with a place for tools"):
        renderer.prompt([{"role": "user", "content": "?"}], TOOLS)


@pytest.mark.parametrize("name", ["chatml", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "system", [None, "Solve it.", [{"type": "text", "text": "Solve "}, {"type": "text", "text": "it."}]]
)
def test_tools_that_the_template_leaves_out_stand_in_the_system_message(name: str, system: Any) -> None:
    renderer = renderer_for(name)
    assert not renderer.teaches_tools
    prompt: list[Message] = [{"role": "system", "content": system}] if system else []
    prompt.append({"role": "user", "content": "Find x."})
    text = renderer.encoder.decode(renderer.prompt(prompt, TOOLS).ids)
    default = "You are a helpful assistant.\n\n" if name == "qwen2_5_vl" else ""
    lead = "Solve it.\n\n" if system else default
    described = describe_tools(TOOLS).replace("<|im_end|>", "<\u200b|im_end|>")
    assert text == (
        f"<|im_start|>system\n{lead}{described}<|im_end|>\n<|im_start|>user\nFind x.<|im_end|>\n<|im_start|>assistant\n"
    )
    listed = re.findall(r"(?m)^\{.*function.*\}$", text)[0]
    assert json.loads(listed.replace("\u200b", "")) == TOOLS[0]
    assert find_tool_calls(text[text.index("</tools>") :])[0].name == "the function's name"


def test_a_template_that_refuses_tools_is_one_that_leaves_them_out() -> None:
    renderer = build(lambda source: "{%- if tools -%}{{ raise_exception('no tools') }}{%- endif -%}" + source)
    assert not renderer.teaches_tools
    assert "calc_score" in renderer.encoder.decode(renderer.prompt([{"role": "user", "content": "?"}], TOOLS).ids)


@EVERY
def test_the_model_is_shown_its_tools_and_only_when_it_has_some(name: str) -> None:
    renderer = renderer_for(name)
    prompt = [{"role": "user", "content": "Find x."}]
    assert "calc_score" in renderer.encoder.decode(renderer.prompt(prompt, TOOLS).ids)
    assert "unction" not in renderer.encoder.decode(renderer.prompt(prompt).ids)
    assert renderer.teaches_tools == (name not in ("chatml", "qwen2_5_vl"))


@EVERY
def test_no_special_token_of_the_tokenizer_can_be_spelled_in_a_text_or_a_tool(name: str) -> None:
    renderer = renderer_for(name)
    special = [t.content for t in renderer.tokenizer.added_tokens_decoder.values() if t.special]
    ids = {renderer.encoder.added[token] for token in special}

    def count(rendered: Any) -> int:
        return sum(index in ids for index in rendered.ids)

    for content in ("".join(special), "a ".join(special), special[0][:3] + special[1] + special[0][3:]):
        tools = [{"type": "function", "function": {"name": content, "description": content, "parameters": {}}}]
        for role in ("user", "tool"):
            harmless = renderer.suffix([{"role": role, "content": "abc"}], 0)
            assert count(renderer.suffix([{"role": role, "content": content}], 0)) == count(harmless)
        prompt = [{"role": "system", "content": "abc"}, {"role": "user", "content": "abc"}]
        hostile = [{**message, "content": content} for message in prompt]
        plain = [{"type": "function", "function": {"name": "a", "description": "b", "parameters": {}}}]
        assert count(renderer.prompt(hostile)) == count(renderer.prompt(prompt))
        assert count(renderer.prompt(hostile, tools)) == count(renderer.prompt(prompt, plain))


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_a_image_for_a_model_without_images_is_an_error_that_says_so(name: str) -> None:
    renderer = renderer_for(name)
    assert renderer.image_token_id is None
    shown: Message = {"role": "user", "content": [{"type": "image", "image": IMAGES[0]}]}
    for render in (lambda: renderer.prompt([shown]), lambda: renderer.suffix([shown], 0)):
        with pytest.raises(UserError, match="this model reads no images"):
            render()


def test_a_template_whose_suffix_depends_on_earlier_turns_is_refused() -> None:
    with pytest.raises(UserError, match="must write the same after a turn, whatever came before it"):
        build(lambda source: source.replace("message.role ~", "message.role ~ loop.index ~"))


@pytest.mark.slow
def test_a_template_that_numbers_images_is_refused_where_a_image_comes_late() -> None:
    renderer = renderer_for("qwen2_5_vl", add_vision_id=True)
    shown: Message = {"role": "user", "content": [{"type": "image", "image": IMAGES[0]}]}
    assert renderer.prompt([shown]).ids
    with pytest.raises(UserError, match=r"must write the same after a turn, whatever came before it, got .*Picture 2"):
        renderer.suffix([shown], 0)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda s: s.replace("~ '<|im_end|>\\n'", "~ '\\n'"), "closes a model's turn with one special token"),
        (lambda s: s.replace("<|im_end|>", "<|end_of_turn|>"), r"must have a tokenizer with <|end_of_turn|>"),
        (lambda s: s.replace("<|im_start|>", "<|turn|>"), r"must have a tokenizer with <|turn|>"),
        (lambda s: s + "{{ raise_exception('broken') }}", "must have a chat template that takes a conversation"),
        (lambda s: s + "{%", "must have a chat template that takes a conversation"),
        (lambda s: "{{ bos_token + '' }}" + s, "must have a chat template that takes a conversation"),
        (lambda s: s.replace("message.content", "''"), "closes a model's turn with one special token"),
    ],
)
def test_a_template_that_cannot_be_followed_is_a_user_error(change: Callable[[str], str], rule: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--model: {rule}" if rule.startswith("must") else rule)):
        build(change)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize("endless", ["{% for i in range(10 ** 12) %}{% endfor %}", LOOPS, CALLS])
def test_a_template_that_does_not_end_is_a_user_error(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.rendering.template.RENDER_S", 0.2)
    with pytest.raises(
        UserError, match=r"must have a chat template that takes a conversation.*(took longer|Range too)"
    ):
        build(lambda source: endless + source)


def test_a_template_that_does_not_end_for_one_text_is_a_fault_of_that_message(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = build(lambda source: "{% if 'loop' in messages[-1].content %}" + LOOPS + "{% endif %}" + source)
    monkeypatch.setattr("agents.rendering.template.RENDER_S", 0.2)
    assert renderer.prompt([{"role": "user", "content": "Hi"}]).ids
    with pytest.raises(TimeoutError, match=r"the chat template took longer than 0\.2 s"):
        renderer.prompt([{"role": "user", "content": "loop"}])


def test_the_closer_is_the_templates_own_and_the_last_of_the_stop_ids(tmp_path: Path) -> None:
    tokenizer = starter_tokenizer("llama_style")
    tokenizer.eos_token = "<|endoftext|>"
    end, eot, word = (tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", LLAMA_TOKENS[-1], "a"))
    assert Renderer(tokenizer, None).stop_ids == (end, eot)
    tokenizer.save_pretrained(tmp_path)
    begin = tokenizer.convert_tokens_to_ids(LLAMA_TOKENS[0])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [begin, eot, word]}))
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": None, "text_config": {"eos_token_id": im_end}})
    )
    renderer = Renderer.from_checkpoint(tmp_path)
    assert renderer.stop_ids == (*sorted([begin, end, im_end]), eot)  # an ordinary word ends no turn
    assert renderer.closer_id == eot
    assert renderer.images is None
    assert renderer.merge_size == 1
    assert renderer.decode([word, begin]) == renderer.decode([word, eot]) == renderer.decode([word]) == "a"


def test_a_turn_that_ends_with_another_stop_id_is_closed_by_the_template() -> None:
    renderer = renderer_for("llama_style")
    suffix = renderer.suffix([{"role": "user", "content": "b"}], renderer.encoder.added["<|endoftext|>"])
    assert suffix.ids[0] == renderer.closer_id


def test_a_text_model_is_read_from_and_written_to_a_folder(tmp_path: Path) -> None:
    renderer = renderer_for("chatml")
    renderer.save(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    again = Renderer.from_checkpoint(tmp_path, template_kwargs={"anything": 1})
    prompt = [{"role": "user", "content": "?"}]
    assert again.prompt(prompt).ids == renderer.prompt(prompt).ids


def test_a_vision_model_without_image_processor_is_a_user_error(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("preprocessor_config.json"))
    with pytest.raises(UserError, match=r"--model: must have preprocessor_config\.json"):
        Renderer.from_checkpoint(tmp_path / "model")


def test_another_models_image_processor_is_a_user_error(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    with pytest.raises(UserError, match="must have the image processor of a Qwen or GLM vision-language model"):
        Renderer.from_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", "[" * 100_000),
        ("generation_config.json", '{"eos_token_id": [[759]]}'),
        ("generation_config.json", '{"eos_token_id": "759"}'),
        ("chat_template.json", '{"chat_template": 3}'),
    ],
)
def test_a_file_of_a_model_with_values_of_other_types_is_a_user_error(
    checkpoint: Path, tmp_path: Path, file: str, text: str
) -> None:
    left_out = "chat_template.jinja" if file == "chat_template.json" else ""
    shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns(left_out))
    (tmp_path / "model" / file).write_text(text)
    with pytest.raises(UserError, match="--model: must have"):
        Renderer.from_checkpoint(tmp_path / "model")


def test_ids_of_a_config_that_are_no_tokens_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"text_config": "x", "eos_token_id": [-1, 999999]}')
    renderer = Renderer.from_checkpoint(tmp_path / "model")
    assert set(renderer.stop_ids) <= set(range(len(renderer.tokenizer)))


def test_the_template_of_the_processor_goes_before_that_of_the_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    template = (checkpoint / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.replace("Tools:", "Functions:")}))
    renderer = Renderer.from_checkpoint(folder)
    prompt = [{"role": "user", "content": "?"}]
    assert "Functions:" in renderer.encoder.decode(renderer.prompt(prompt, TOOLS).ids)


PLAIN_TOOL = {"type": "function", "function": {"name": "look", "description": "Look up.", "parameters": {}}}


def tokenizer_with(*names: str) -> Any:
    """Return a tokenizer with templates by name: "tool_use" describes tools, the others know none."""
    tokenizer = starter_tokenizer()
    other = starter_tokenizer("chatml").chat_template
    tokenizer.chat_template = {name: tokenizer.chat_template if name == "tool_use" else other for name in names}
    return tokenizer


@pytest.mark.parametrize("tools", [[], [PLAIN_TOOL]])
@pytest.mark.parametrize("names", [("default", "tool_use"), ("default", "rag"), ("tool_use", "rag")])
def test_of_several_templates_the_one_that_transformers_takes_writes_the_whole_episode(
    names: tuple[str, ...], tools: list[Any]
) -> None:
    tokenizer = tokenizer_with(*names)
    chosen = "tool_use" if "default" not in names else None  # which Transformers takes with tools only
    renderer = Renderer(tokenizer, None)
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "B"},
    ]
    given = tools if renderer.template_for(bool(tools)).teaches_tools else []
    expected = tokenizer.apply_chat_template(
        messages, tools=given or None, chat_template=chosen, tokenize=False, add_generation_prompt=True
    )
    prompt = renderer.prompt(messages[:1], given).ids
    answer = renderer.suffix(messages[2:], last_id=renderer.closer_id, has_tools=bool(given)).ids
    turn = (*renderer.encoder.encode("A"), renderer.closer_id)
    assert renderer.encoder.decode([*prompt, *turn, *answer]) == expected
    assert renderer.text(messages, given) == expected
    assert ("Look up." in expected) == bool(given)


def test_a_conversation_is_played_in_the_template_for_its_tools() -> None:
    conversations = ConversationRenderer(Renderer(tokenizer_with("default", "tool_use"), None), 4096, "hermes", 1)
    messages = (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "B"},
        {"role": "assistant", "content": "A"},
    )
    texts = [
        conversations.renderer.decode(conversations.stream(Conversation("row 0", messages, tools)).ids_T.tolist())
        for tools in ((), (PLAIN_TOOL,))
    ]
    assert ["<tool_response>" in text for text in texts] == [False, True]


def test_templates_without_the_names_that_are_taken_are_a_user_error() -> None:
    with pytest.raises(UserError, match="must have a chat template named default or tool_use, got rag, other; name"):
        Renderer(tokenizer_with("rag", "other"), None)


def test_templates_whose_turns_end_in_other_tokens_are_a_user_error() -> None:
    tokenizer = tokenizer_with("default", "tool_use")
    tokenizer.chat_template["default"] = tokenizer.chat_template["default"].replace("<|im_end|>", "<|endoftext|>")
    with pytest.raises(UserError, match="must have a chat template that closes a model's turn with one special token"):
        Renderer(tokenizer, None)


def test_the_samples_of_a_group_share_one_rendering_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_for("starter")
    calls: list[int] = []
    render = renderer.template.render
    monkeypatch.setattr(
        renderer.template, "render", lambda *args, **options: calls.append(1) or render(*args, **options)
    )

    def prompt(text: str = "Find x.", image: Image.Image = IMAGES[0], tools: Any = TOOLS, role: str = "user") -> Any:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        return renderer.prompt([{"role": role, "content": parts}], tools)

    first = prompt()
    before = len(calls)
    assert prompt().ids is first.ids
    assert prompt(image=IMAGES[0].copy()).ids is first.ids
    assert prompt().images == first.images
    assert len(calls) == before
    others = [prompt("Find y."), prompt(image=IMAGES[2]), prompt(tools=()), prompt(role="system")]
    assert len({first.ids, *(other.ids for other in others)}) == 5
    for number in range(MAX_PROMPTS):
        renderer.prompt([{"role": "user", "content": str(number)}])
    before = len(calls)
    assert prompt().ids == first.ids
    assert len(calls) == before + 1


def test_a_tokenizer_that_cuts_and_pads_by_its_file_encodes_whole_texts() -> None:
    tokenizer = starter_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    text = "Find x, please. " * 5
    assert Encoder(tokenizer).encode(text) == Encoder(starter_tokenizer()).encode(text)


def test_text_is_only_cut_at_tokens_that_no_surrounding_text_can_hide() -> None:
    tokenizer = starter_tokenizer()
    assert Encoder(tokenizer).cut("\n<|im_start|>user\n<tool_call>{}") == ("\n", "<|im_start|>user\n<tool_call>", "{}")
    assert Encoder(tokenizer).cut("no token") == ("no token", "", "")
    tokenizer.add_tokens(["<tool_call>{", "x<|im_"])
    assert Encoder(tokenizer).cut("\n<|im_start|>user\n<tool_call>{}<|image_pad|>.") == (
        "\n<|im_start|>user\n",
        "<tool_call>{}<|image_pad|>",
        ".",
    )


def test_a_template_renders_here_as_transformers_renders_it(renderer: Renderer) -> None:
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image", "image": make_image()}, {"type": "text", "text": "What <b>?"}]},
        {"role": "assistant", "content": "Hm."},
        {"role": "tool", "content": "3 & 4"},
    ]
    expected = renderer.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    _, with_tools = choose_templates(renderer.tokenizer.chat_template)
    assert ChatTemplate(with_tools, "a model's").render(messages, TOOLS) == expected
