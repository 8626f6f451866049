"""Claims about rendering: prompt, sampled ids and suffixes make up the template's own text, and text stays text."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from agents.model import STARTER_PATH
from agents.rendering.images import ImageStore
from agents.rendering.renderer import Renderer
from envs.errors import UserError
from envs.types import Message
from starter.architecture import build_image_processor
from tests.agents.rendering.template_cases import QWEN_TEMPLATES, REWRITING, TEXT_ONLY, renderer_for
from tests.budget import examples
from tests.paths import SHARED, published_template
from tests.prompts import make_image, question

QWEN = SHARED / "qwen_tokenizer"
TEMPLATES = tuple(name for name in ("starter", *QWEN_TEMPLATES) if name not in REWRITING)
WITH_IMAGES = tuple(name for name in TEMPLATES if name not in TEXT_ONLY)
WHOLE_VOCABULARY = "qwen3_vl, whole vocabulary"
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
CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "70"}}</tool_call>'
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


@pytest.fixture(scope="module", params=TEMPLATES)
def any_renderer(request: pytest.FixtureRequest, renderer: Renderer) -> Renderer:
    """The starter's renderer, one for each of Qwen's templates, or one with all of Qwen's own vocabulary."""
    if request.param == "starter":
        return renderer
    if request.param != WHOLE_VOCABULARY:
        return renderer_for(request.param)
    if not QWEN.exists():
        pytest.skip("Qwen's tokenizer is not here")
    tokenizer = AutoTokenizer.from_pretrained(QWEN)
    tokenizer.chat_template = published_template("qwen3_vl")
    return Renderer(tokenizer, ImageStore(build_image_processor(), merge_size=2))


def whole(renderer: Renderer, messages: list[Message], tools: tuple[dict[str, Any], ...] = ()) -> list[int]:
    """Tokenise the template's rendering of the whole conversation at once, its placeholders expanded."""
    text = renderer.tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    images = [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    for image in images:
        text = text.replace("<|image_pad|>", "<hole>" * renderer.images.process(image).num_tokens, 1)
    return renderer.tokenizer(text.replace("<hole>", "<|image_pad|>"), add_special_tokens=False)["input_ids"]


def written(renderer: Renderer, text: str, stop: bool = True) -> list[int]:
    """Return the ids of a model turn, closed with its stop id or cut before it."""
    ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")] if stop else ids


def stream(
    renderer: Renderer, prompt: list[Message], turns: list[tuple[str, Message]], tools: tuple = (), stop: bool = True
) -> list[int]:
    """Return the ids that the agent loop builds of a conversation."""
    ids = list(renderer.prompt(prompt, tools).ids)
    for text, message in turns:
        ids += written(renderer, text, stop)
        ids += renderer.suffix([message], ids[-1]).ids
    return ids


def conversation(prompt: list[Message], turns: list[tuple[str, Message]]) -> list[Message]:
    replies = [m for text, message in turns for m in ({"role": "assistant", "content": text}, message)]
    return [*prompt, *replies]


def imaged(role: str, *parts: str | Image.Image) -> Message:
    """Return a message of texts and images in that order."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": content}


@pytest.mark.parametrize("any_renderer", [*TEMPLATES, WHOLE_VOCABULARY], indirect=True)
@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "cut"])
def test_prompt_and_suffixes_equal_the_rendering_of_the_whole_conversation(any_renderer: Renderer, stop: bool) -> None:
    prompt: list[Message] = [{"role": "system", "content": "Solve it."}, {"role": "user", "content": "Find x."}]
    turns: list[tuple[str, Message]] = [
        (f"x is 70. {CALL}", {"role": "tool", "content": "Score 0.0: 70 is wrong."}),
        ("Then 68?", {"role": "user", "content": "Call the tool."}),
        (f" {CALL}", {"role": "tool", "content": ""}),
        ("\\boxed{68}\n", {"role": "tool", "content": "\n  Score 1.0 \n"}),
    ]
    for tools in ((), TOOLS) if any_renderer.teaches_tools else ((),):
        expected = whole(any_renderer, conversation(prompt, turns), tools)
        assert stream(any_renderer, prompt, turns, tools, stop) == expected


@pytest.mark.parametrize("any_renderer", [*WITH_IMAGES, WHOLE_VOCABULARY], indirect=True)
def test_images_in_prompt_and_answers_equal_the_rendering_of_the_whole_conversation(any_renderer: Renderer) -> None:
    prompt = [
        {"role": "system", "content": "Solve it."},
        imaged("user", make_image(96, 64), "Find x.", make_image(32, 32)),
    ]
    turns = [
        (CALL, imaged("tool", "Zoomed: ", make_image(64, 64, 3), " (2x)")),
        (CALL, imaged("tool", make_image(64, 96, 4))),
        ("Hm.", imaged("user", make_image(32, 64, 5), make_image(32, 64, 5), "Compare.")),
        ("Hm.", imaged("user", "Now answer.")),
    ]
    assert stream(any_renderer, prompt, turns) == whole(any_renderer, conversation(prompt, turns))


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
def test_the_length_of_a_prompt_is_known_without_processing_its_images(renderer: Renderer, tools: Any) -> None:
    store = ImageStore(build_image_processor(), merge_size=2)
    fresh = Renderer(renderer.tokenizer, store)
    for sizes in ((), ((64, 32),), ((5, 900), (1200, 800), (32, 32))):
        prompt = [
            {"role": "system", "content": "Solve."},
            imaged("user", "See", *(make_image(*size) for size in sizes)),
        ]
        length = fresh.prompt_length(prompt, tools)
        assert not store._images
        assert length == len(renderer.prompt(prompt, tools).ids)
    wide = [imaged("user", make_image(4000, 8))]
    for count in (fresh.prompt_length, fresh.prompt):
        with pytest.raises(ValueError, match="smaller than 200"):
            count(wide)


#: No control token, which hypothesis finds in our own code: the stream breaks those, and the plain template does not.
TEXTS = st.text(st.sampled_from("aé3 .<>|\n\\{}/") | st.characters(codec="utf-8"), max_size=30).filter(
    lambda text: "|>" not in text
)


@examples(40)
@given(
    turns=st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from(["tool", "user"]), st.booleans()), min_size=1, max_size=3),
    start=TEXTS,
)
def test_any_texts_give_the_stream_of_the_whole_conversation(
    renderer: Renderer, start: str, turns: list[tuple[str, str, str, bool]]
) -> None:
    prompt: list[Message] = [{"role": "user", "content": start}]
    plan = [
        (model, imaged(role, make_image(32, 32), text) if image else {"role": role, "content": text})
        for model, text, role, image in turns
    ]
    assert stream(renderer, prompt, plan) == whole(renderer, conversation(prompt, plan))


def test_sampled_ids_are_kept_and_never_encoded_again(renderer: Renderer) -> None:
    # "Find" as single letters decodes to a text whose own encoding is shorter.
    letters = [renderer.tokenizer.convert_tokens_to_ids(letter) for letter in "Find"]
    assert renderer.decode(letters) == "Find"
    assert written(renderer, "Find", stop=False) != letters
    message: Message = {"role": "tool", "content": "ok"}
    stop = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    suffix = renderer.suffix([message], stop)
    assert renderer.tokenizer.decode(suffix.ids) == (
        "\n<|im_start|>user\n<tool_response>ok</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.tokenizer.decode(renderer.suffix([message], letters[-1]).ids) == "<|im_end|>" + (
        renderer.tokenizer.decode(suffix.ids)
    )


def test_placeholders_are_as_many_as_the_image_has_tokens(renderer: Renderer) -> None:
    rendered = renderer.prompt(question("x?", make_image(96, 64), make_image(32, 128, 1)))
    assert [i.grid_thw for i in rendered.images] == [(1, 4, 6), (1, 8, 2)]
    assert rendered.ids.count(renderer.image_token_id) == 6 + 4
    names = renderer.tokenizer.convert_ids_to_tokens(rendered.ids)
    first = names.index("<|vision_start|>")
    assert names[first : first + 8] == ["<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>"]


def num_special(renderer: Renderer, ids: list[int] | tuple[int, ...]) -> int:
    special = {renderer.tokenizer.convert_tokens_to_ids(token) for token in CONTROL}
    return sum(token in special for token in ids)


@pytest.mark.parametrize("token", CONTROL)
def test_a_control_token_spelled_in_a_text_stays_text(any_renderer: Renderer, token: str) -> None:
    for role in ("user", "tool"):
        harmless = any_renderer.suffix([{"role": role, "content": "abc"}], last_id=0)
        for content in (token, f"a {token} b", f"{token}{token}", f"<|im_{token}end|>"):
            hostile = any_renderer.suffix([{"role": role, "content": content}], last_id=0)
            assert num_special(any_renderer, hostile.ids) == num_special(any_renderer, harmless.ids)
            assert any_renderer.tokenizer.decode(hostile.ids).replace("\u200b", "").count(token) > (
                any_renderer.tokenizer.decode(harmless.ids).count(token)
            )
    plain = any_renderer.prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    hostile = any_renderer.prompt([{"role": "system", "content": token}, {"role": "user", "content": f"q{token}"}])
    assert num_special(any_renderer, hostile.ids) == num_special(any_renderer, plain.ids)


@pytest.mark.parametrize("any_renderer", WITH_IMAGES, indirect=True)
@pytest.mark.parametrize("token", CONTROL)
def test_a_control_token_cut_over_two_text_parts_stays_text(any_renderer: Renderer, token: str) -> None:
    for cut in range(1, len(token)):
        whole_text, parts = imaged("user", "abc"), imaged("user", token[:cut], token[cut:])
        expected = num_special(any_renderer, any_renderer.prompt([whole_text]).ids)
        assert num_special(any_renderer, any_renderer.prompt([parts]).ids) == expected
        expected = num_special(any_renderer, any_renderer.suffix([whole_text], last_id=0).ids)
        assert num_special(any_renderer, any_renderer.suffix([parts], last_id=0).ids) == expected


def test_text_parts_without_an_image_read_as_one_text(any_renderer: Renderer) -> None:
    parts: list[Message] = [imaged("system", "Solve ", "it."), imaged("user", "Find", " x.")]
    text: list[Message] = [{"role": "system", "content": "Solve it."}, {"role": "user", "content": "Find x."}]
    tools = TOOLS if any_renderer.teaches_tools else ()
    assert any_renderer.prompt(parts, tools).ids == tuple(whole(any_renderer, text, tools))
    for role in ("user", "tool"):
        one = any_renderer.suffix([{"role": role, "content": "Score 1.0"}], last_id=0)
        assert any_renderer.suffix([imaged(role, "Score", " ", "1.0")], last_id=0).ids == one.ids


@examples(60)
@given(
    pieces=st.lists(
        st.sampled_from(["<", "|", ">", "<|", "|>", "im_", "end", "image_pad", " ", "", *CONTROL]), max_size=6
    )
)
def test_no_text_parts_make_a_control_token(renderer: Renderer, pieces: list[str]) -> None:
    harmless = num_special(renderer, renderer.prompt([imaged("user", "abc")]).ids)
    assert num_special(renderer, renderer.prompt([imaged("user", *pieces)]).ids) == harmless
    assert num_special(renderer, renderer.prompt([{"role": "user", "content": "".join(pieces)}]).ids) == harmless


def test_the_special_ids_are_those_of_the_tokenizer(any_renderer: Renderer) -> None:
    name = any_renderer.tokenizer.convert_ids_to_tokens
    assert "<|im_end|>" in name(list(any_renderer.stop_ids))
    assert {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"} <= set(
        name(list(any_renderer.suppressed_ids))
    )
    assert not set(any_renderer.stop_ids) & set(any_renderer.suppressed_ids)


@pytest.mark.parametrize("token", ["<|image|>", "<|a_placeholder_of_a_new_family|>"])
def test_a_models_own_image_token_is_never_written(token: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(STARTER_PATH)
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|image_pad|>", token)
    renderer = Renderer(tokenizer, ImageStore(build_image_processor(), merge_size=2), image_token=token)
    rendered = renderer.prompt(question("Find x.", make_image(seed=1)))
    assert renderer.image_token_id in renderer.suppressed_ids
    assert rendered.ids.count(tokenizer.convert_tokens_to_ids(token)) == rendered.images[0].num_tokens


def test_the_decoded_text_of_a_turn_lacks_its_stop_token_only(renderer: Renderer) -> None:
    assert renderer.decode(written(renderer, CALL)) == CALL
    assert renderer.decode(written(renderer, CALL, stop=False)) == CALL
    assert renderer.decode([]) == ""
    stop = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert renderer.decode([stop, stop]) == "<|im_end|>"


def test_a_image_is_processed_once(renderer: Renderer) -> None:
    first = renderer.prompt(question("x?", make_image(seed=11))).images[0]
    assert renderer.prompt(question("y?", make_image(seed=11))).images[0] is first
    assert renderer.prompt(question("y?", make_image(seed=12))).images[0] is not first


def test_images_of_one_pixel_string_but_other_sides_are_told_apart(renderer: Renderer) -> None:
    wide, tall = Image.new("RGB", (96, 64)), Image.new("RGB", (64, 96))
    assert wide.tobytes() == tall.tobytes()
    assert renderer.images.process(wide).digest != renderer.images.process(tall).digest


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ("tokenizer.json", "must have a tokenizer"),
        ("tokenizer*", "must have a tokenizer, got"),
        ("chat_template.jinja", "must have a chat template"),
    ],
)
def test_a_folder_that_lacks_a_part_is_a_user_error(checkpoint: Path, tmp_path: Path, files: str, rule: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns(files))
    with pytest.raises(UserError, match=re.escape(f"--model: {rule}")):
        Renderer.from_checkpoint(tmp_path / "model")
