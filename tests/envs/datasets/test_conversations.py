"""Claims about conversations read from rows: every form that a row may have, and what is said of a bad one."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from envs.datasets.conversations import AnsweredSamples, Conversation, ConversationOptions, open_conversations
from envs.datasets.prompts import DataKeys
from envs.errors import UserError
from envs.types import Sample, content_parts

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
DEFAULTS = ConversationOptions()
SAID = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def make_image(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), "red")


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def uri(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def read(
    folder: Path, rows: Sequence[Mapping[str, Any]], options: ConversationOptions = DEFAULTS
) -> list[Conversation]:
    file = folder / "demos.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = open_conversations(str(file), options)
    return [found[index] for index in range(len(found))]


def one(folder: Path, row: Mapping[str, Any], options: ConversationOptions = DEFAULTS) -> Conversation:
    return read(folder, [row], options)[0]


def make_images(conversation: Conversation) -> list[list[tuple[int, int]]]:
    """Return the sizes of each message's images."""
    return [[p["image"].size for p in content_parts(m) if p["type"] == "image"] for m in conversation.messages]


def test_a_geometry_row_becomes_question_and_answer_as_slime_formats_it(tmp_path: Path) -> None:
    r"""slime, examples/geo3k_vlm/README.md: f"Answer: \\boxed{{{sample['answer']}}}" to the user's problem."""
    row = {"problem": "<image>Find x.", "answer": "5 \\sqrt { 2 }", "images": [uri(make_image(64, 32))]}
    found = one(tmp_path, row)
    assert found.where == "demos.jsonl row 0"
    assert found.messages[-1] == {"role": "assistant", "content": "Answer: \\boxed{5 \\sqrt { 2 }}"}
    (asked,) = found.messages[:-1]
    assert asked["role"] == "user" and asked["content"][1] == {"type": "text", "text": "Find x."}
    assert make_images(found) == [[(64, 32)], []]


def test_the_answer_format_and_the_columns_are_settings(tmp_path: Path) -> None:
    options = ConversationOptions(
        keys=DataKeys("question", "label", "image"), answer_format="It is ANSWER: \\x{ANSWER}"
    )
    found = one(tmp_path, {"question": "?", "label": 7, "image": None}, options)
    assert found.messages[-1]["content"] == "It is 7: \\x{7}"
    renamed = ConversationOptions(messages_key="chat", tools_key="functions")
    found = one(tmp_path, {"chat": SAID, "functions": TOOLS}, renamed)
    assert (list(found.messages), list(found.tools)) == (SAID, TOOLS)


def test_messages_keep_their_calls_marks_and_other_fields(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}], "train": False},
        {"role": "tool", "content": "4", "tool_call_id": "a"},
        {"role": "assistant", "content": "4", "reasoning_content": "Hm."},
    ]
    found = one(tmp_path, {"messages": messages, "answer": "not read"})
    assert found.messages == (
        {"role": "user", "content": "2 + 2?"}, {**messages[1], "content": ""}, messages[2], messages[3]
    )  # fmt: skip


@pytest.mark.parametrize(
    "place", [{"type": "image", "image": None}, {"type": "image_url", "image_url": {"url": None}}, {"type": "image"}]
)
def test_images_stand_in_a_column_with_places_in_any_message(place: dict[str, Any], tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": [place, {"type": "text", "text": "Find x."}]},
        {"role": "assistant", "content": "Zoom."},
        {"role": "user", "content": "Here: <image>"},
        {"role": "assistant", "content": "4"},
    ]
    (tmp_path / "a.png").write_bytes(png(make_image(96, 32)))
    found = one(tmp_path, {"messages": messages, "images": [uri(make_image(64, 32)), "a.png"]})
    assert make_images(found) == [[(64, 32)], [], [(96, 32)], []]


def test_images_may_stand_in_the_parts_themselves(tmp_path: Path) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": uri(make_image(64, 32))}},
        {"type": "image", "image": uri(make_image(32, 64))},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": parts}, SAID[1]]
    assert make_images(one(tmp_path, {"messages": messages})) == [[(64, 32), (32, 64)], []]
    with pytest.raises(UserError, match="row 0: must have its images in the messages or under 'images', got both"):
        one(tmp_path, {"messages": messages, "images": [uri(make_image(32, 32))]})


def test_a_system_prompt_goes_before_the_rows_own_and_an_environments_only_where_there_is_none(tmp_path: Path) -> None:
    bare, own = {"messages": SAID}, {"messages": [{"role": "system", "content": "Own."}, *SAID]}

    def systems(**settings: str) -> list[str]:
        rows = read(tmp_path, [bare, own], ConversationOptions(**settings))
        return [str(found.messages[0]["content"]) for found in rows]

    assert systems() == ["2 + 2?", "Own."]
    assert systems(system_prompt="Ours.") == ["Ours.", "Ours.\n\nOwn."]
    assert systems(default_system_prompt="Env's.") == ["Env's.", "Own."]
    assert systems(system_prompt="Ours.", default_system_prompt="Env's.") == ["Ours.", "Ours.\n\nOwn."]


def test_tools_are_the_rows_own_or_the_environments(tmp_path: Path) -> None:
    other = ({"type": "function", "function": {"name": "g"}},)
    rows = [{"messages": SAID, "tools": TOOLS}, {"messages": SAID, "tools": json.dumps(TOOLS)}, {"messages": SAID}]
    rows += [{"problem": "?", "answer": "1"}]
    found = read(tmp_path, rows, ConversationOptions(default_tools=other))
    assert [list(each.tools) for each in found] == [TOOLS, TOOLS, list(other), list(other)]


def test_a_parquet_file_gives_each_call_its_own_arguments_alone(tmp_path: Path) -> None:
    def says(arguments: dict[str, Any]) -> list[dict[str, Any]]:
        made = [{"function": {"name": "f", "arguments": arguments}}]
        return [SAID[0], {"role": "assistant", "content": "", "tool_calls": made}]

    file = tmp_path / "demos.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": says({"a": 1})}, {"messages": says({"b": "2"})}]), file
    )
    found = open_conversations(str(file), ConversationOptions())
    asked, said = found[1].messages
    assert asked == SAID[0]  # and no tool_calls
    assert said["tool_calls"] == [{"function": {"name": "f", "arguments": {"b": "2"}}}]


def test_an_environments_own_problems_are_answered(tmp_path: Path) -> None:
    samples = AnsweredSamples((Sample("a", (SAID[0],), "4"), Sample("b", (SAID[0],))), "ANSWER.", tuple(TOOLS))
    assert samples[0] == Conversation("sample a", (SAID[0], {"role": "assistant", "content": "4."}), tuple(TOOLS))
    with pytest.raises(UserError, match="sample b: must have an answer"):
        samples[1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "?"}, "must hold messages under 'messages', or a problem under 'problem', got keys text"),
        ({"problem": "?"}, "must hold an answer under 'answer'"),
        ({"messages": "?", "images": ["a"]}, "images[0]: "),
        ({"messages": []}, "row 1 messages: must be a text or a list of messages"),
        ({"messages": [{"role": "critic", "content": "?"}]}, "messages[0]: must be a message with a role of"),
        ({"messages": [{"role": "user", "content": "<image>"}], "images": []}, "1 placeholders and 0 images"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0] content: must be a text or a list of parts"),
        ({"messages": SAID, "tools": "[{"}, "row 1 tools: must be a list of tool schemas, or its JSON"),
        ({"messages": SAID, "tools": {"name": "f"}}, "row 1 tools: must be a list of tool schemas, or its JSON"),
    ],
)  # fmt: skip
def test_a_bad_row_names_itself_its_rule_and_what_was_got(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, [{"messages": SAID}, row])
    assert str(caught.value).startswith("demos.jsonl row 1") and words in str(caught.value)
