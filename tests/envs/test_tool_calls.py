"""What a turn's text is read as: a call, an error that tells what is wrong, or no call; never an exception."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.tool_calls import ToolCall, ToolCallError, outside_tool_calls, parse_tool_call

GOOD = '{"name": "calc_score", "arguments": {"answer": "68"}}'
CALL = ToolCall("calc_score", {"answer": "68"})


def block(content: str) -> str:
    return f"<tool_call>\n{content}\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        block(GOOD),
        f"Let me check.\n{block(GOOD)}\nWaiting.",
        f"<tool_call>{GOOD}",
        f"<tool_call>{GOOD}\nand more",
        block('{"name": "f", "arguments": {}}') + block(GOOD),
        block('{"function": ' + GOOD + "}"),
        block('{"name": "calc_score", "arguments": "{\\"answer\\": \\"68\\"}"}'),
        GOOD,
        f"\n{GOOD}\n",
        f"I call {GOOD}",
        f"{GOOD}\n</tool_call>",
        '{"function": ' + GOOD + "}",
    ],
)
def test_every_accepted_form_is_the_same_call(text: str) -> None:
    assert parse_tool_call(text) == CALL


@pytest.mark.parametrize(
    "quoted", ["</tool_call>", "<tool_call>", "<tool_call>5</tool_call>", "<tool_call>" * 8, "{]\n"]
)
def test_a_tag_inside_a_json_string_is_text(quoted: str) -> None:
    call = {"name": "f", "arguments": {"a": quoted}}
    assert parse_tool_call(f"so {block(json.dumps(call))}") == ToolCall("f", {"a": quoted})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "The call is empty."),
        ("calc_score(68)", "Bad JSON: Expecting value."),
        ("[1, 2]", "The call must be a JSON object."),
        ('"calc_score"', "The call must be a JSON object."),
        ("5", "The call must be a JSON object."),
        ("null", "The call must be a JSON object."),
        ("{}", '"name" is missing.'),
        ('{"function": "calc_score"}', '"name" is missing.'),
        ('{"function": {"name": 5}}', '"name" must be a string.'),
        ('{"name": 5}', '"name" must be a string.'),
        ('{"name": "f"}', '"arguments" is missing.'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be a JSON object.'),
        ('{"name": "f", "arguments": "3"}', '"arguments" must be a JSON object.'),
        ('{"name": "f", "arguments": ""}', '"arguments" must be a JSON object.'),
        ('{"name": "f", "arguments": null}', '"arguments" must be a JSON object.'),
        ('{"name": "f", "arguments": {"a": 1}', "The JSON ends too early."),
        ('{"name": "f', "The JSON ends too early."),
        ('{"name": "f", "arguments": {"a": NaN}}', "A number is out of range."),
        ('{"name": "f", "arguments": {"a": 1e999}}', "A number is out of range."),
        ('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}", "A number is out of range."),
        ("[" * 100_000, "The JSON is nested too deeply."),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}", "The JSON is nested too deeply."),
    ],
)
def test_a_broken_call_says_what_is_wrong(content: str, reason: str) -> None:
    assert parse_tool_call(block(content)) == ToolCallError(reason)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is \\boxed{68}.",
        "{68}",
        '{"name": "f"}',
        '{"name": "f", "arguments": {',
        "<tool_call",
        "[" * 100_000,
    ],
)
def test_a_text_without_tags_or_a_whole_call_is_no_call(text: str) -> None:
    assert parse_tool_call(text) is None


def test_a_call_cut_off_by_the_token_limit_is_an_error_and_a_lone_closing_tag_too() -> None:
    assert parse_tool_call('<tool_call>{"name": "f", "argu') == ToolCallError("The JSON ends too early.")
    assert parse_tool_call("f(68)</tool_call>") == ToolCallError("The opening tag is missing.")


def test_the_last_block_counts_even_when_it_is_the_broken_one() -> None:
    assert parse_tool_call(block(GOOD) + block("{}")) == ToolCallError('"name" is missing.')


def test_latex_with_single_backslashes_is_read_as_it_was_meant() -> None:
    text = r'{"name": "f", "arguments": {"a": "8\sqrt{2} \\pi \"q\" \u0041 \underline"}}'
    meant = ToolCall("f", {"a": '8\\sqrt{2} \\pi "q" A \\underline'})
    assert parse_tool_call(block(text)) == parse_tool_call(text) == meant


def test_surrogates_nul_and_line_breaks_in_strings_are_kept() -> None:
    call = parse_tool_call(block('{"name": "f", "arguments": {"a": "\ud800\x00\n\\ud801"}}'))
    assert call == ToolCall("f", {"a": "\ud800\x00\n\ud801"})


def test_what_is_written_outside_the_calls_is_kept() -> None:
    assert outside_tool_calls(f"a{block(GOOD)}b{block(GOOD)}c") == "ac"
    assert outside_tool_calls(f"a<tool_call>{GOOD}\\boxed{{5}}") == "a"
    assert outside_tool_calls(f"a{block(GOOD)}b<tool_call>c") == "a"
    assert outside_tool_calls(f"a {GOOD}") == "a "
    assert outside_tool_calls("a </tool_call> b") == "a </tool_call> b"


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        " ",
        '"name"',
        '"arguments"',
        '"function"',
        "5",
        '"calc_score"',
        "null",
        "NaN",
        "1e999",
        GOOD,
        "\ud800",
        "\x00",
        "\\u",
        "<|im_end|>",
    ]
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=30).map("".join))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    call = parse_tool_call(text)
    assert call is None or isinstance(call, ToolCall | ToolCallError)
    if isinstance(call, ToolCall):
        json.dumps(call.arguments, allow_nan=False)
    assert len(outside_tool_calls(text)) <= len(text)


@settings(max_examples=300, deadline=None)
@given(
    st.text(),
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=8),
    ),
)
def test_any_call_written_as_json_comes_back(name: str, arguments: dict[str, object]) -> None:
    text = json.dumps({"name": name, "arguments": arguments})
    assert parse_tool_call(f"Let me see. {block(text)}") == ToolCall(name, arguments)


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"a":"',
        '<tool_call>"',
        '{"name"',
        '{"name":',
        "</tool_call>",
        "[",
        "{",
        "\\",
        " ",
        '<tool_call>{"a":"\\x',
        '<tool_call>[",',
        '\\"<tool_call>',
        block(GOOD),
    ],
)
@pytest.mark.parametrize("head", ["", "<tool_call>", '<tool_call>{"a":"'])
def test_a_megabyte_is_parsed_in_linear_time(unit: str, head: str) -> None:
    text = head + unit * (1_000_000 // len(unit)) + "}"
    start = time.perf_counter()
    parse_tool_call(text)
    outside_tool_calls(text)
    assert time.perf_counter() - start < 2.0
