"""What a turn's text is read as: its calls, errors that tell what is wrong, or no call; never an exception."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tool_calls import (
    ToolCall,
    ToolCallError,
    ToolFormat,
    call_example,
    find_tool_calls,
    outside_tool_calls,
    write_tool_call,
)
from tests.budget import examples
from tests.envs.tool_calls.fuzz import FORMATS, OUTCOMES, UNITS, adversarial, block, outcomes, responses

GOOD = '{"name": "calc_score", "arguments": {"answer": "68"}}'
CALL = ToolCall("calc_score", {"answer": "68"})
TAGS = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")


@pytest.mark.parametrize(
    "text",
    [
        block(GOOD),
        f"Let me check.\n{block(GOOD)}\nWaiting.",
        f"<tool_call>{GOOD}",
        f"<tool_call>{GOOD}\nand more",
        f"<tool_call>{GOOD}</tool_",
        block('{"function": ' + GOOD + "}"),
        block('{"name": "calc_score", "arguments": "{\\"answer\\": \\"68\\"}"}'),
        GOOD,
        f"\n{GOOD}\n",
        f"I call {GOOD}",
        f"{GOOD}\n</tool_call>",
        '{"function": ' + GOOD + "}",
        '{"arguments": {"answer": "68"}, "name": "calc_score"}',
    ],
)
def test_every_accepted_form_is_the_same_call(text: str) -> None:
    assert find_tool_calls(text) == [CALL]


@pytest.mark.parametrize("between", ["", "\n", " and then ", "</tool_call>", 'a 5" one '])
def test_all_calls_of_a_turn_are_found_in_order(between: str) -> None:
    first, last = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {"a": [1]}}'
    found = find_tool_calls(between.join(["So ", block(first), f"<tool_call>{GOOD}", block(last), ""]))
    assert found == [ToolCall("f", {}), CALL, ToolCall("g", {"a": [1]})]


def test_bare_calls_that_end_the_text_are_found_in_order_and_those_in_prose_are_text() -> None:
    first = ToolCall("f", {})
    assert find_tool_calls(f'{{"name": "f", "arguments": {{}}}}\n{GOOD}') == [first, CALL]
    assert find_tool_calls(f'So {{"name": "f", "arguments": {{}}}}</tool_call>\n{GOOD}</tool_call>') == [first, CALL]
    assert find_tool_calls(f'{{"name": "f", "arguments": {{}}}} and {GOOD}') == [CALL]
    assert find_tool_calls(f"{GOOD} is what I would call.") == []


@pytest.mark.parametrize(
    "quoted",
    ["</tool_call>", "<tool_call>", "<tool_call>5</tool_call>", "<tool_call>" * 80, "{]\n", "<tool_call>{} ", *TAGS],
)
def test_a_tag_inside_a_json_string_is_text(quoted: str) -> None:
    text = block(json.dumps({"name": "f", "arguments": {"a": quoted}}))
    call = ToolCall("f", {"a": quoted})
    assert find_tool_calls(f"so {text}") == [call]
    assert find_tool_calls(f"{text}{block(GOOD)}{text}") == [call, CALL, call]
    assert outside_tool_calls(f"a{text}b") == "ab"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "The call is empty."),
        ("calc_score(68)", "Bad JSON: Expecting value."),
        ("[1, 2]", "The call must be a JSON object."),
        ('"calc_score"', "The call must be a JSON object."),
        ("5", "The call must be a JSON object."),
        ("null", "The call must be a JSON object."),
        ("<function=f><parameter=a>1</parameter></function>", "The call must be a JSON object."),
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
        ('{"name": "f", "arguments": {"a": -Infinity}}', "A number is out of range."),
        ('{"name": "f", "arguments": {"a": 1e999}}', "A number is out of range."),
        ('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}", "A number is out of range."),
        ("[" * 10_000, "The JSON is nested too deeply."),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}", "The JSON is nested too deeply."),
    ],
)
def test_a_broken_call_says_what_is_wrong_and_does_not_swallow_its_neighbours(content: str, reason: str) -> None:
    error = ToolCallError(reason)
    assert find_tool_calls(block(content)) == [error]
    assert find_tool_calls(f"{block(GOOD)}{block(content)}") == [CALL, error]
    if not content.endswith('"f'):  # this string's closing quote is the one that opens the next call's first string
        assert find_tool_calls(f"{block(content)}{block(GOOD)}") == [error, CALL]


def test_a_string_that_is_never_closed_costs_no_later_call() -> None:
    broken = '<tool_call>{"name": "f</tool_call>\n'
    assert find_tool_calls(broken + block(GOOD)) == [ToolCallError("Bad JSON: Expecting ',' delimiter."), CALL]
    assert find_tool_calls('<tool_call>"f\n' + block(GOOD)) == [ToolCallError("The call must be a JSON object."), CALL]
    assert find_tool_calls('<tool_call>{"a": 1<tool_call>' + GOOD) == [ToolCallError("The JSON ends too early."), CALL]


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
        "a <function=f> without its end",
    ],
)
def test_a_text_without_tags_or_a_whole_call_is_no_call(text: str) -> None:
    assert find_tool_calls(text) == []
    assert outside_tool_calls(text) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "The call is empty."),
        ("\n", "The call is empty."),
        ("{", "The JSON ends too early."),
        ('{"name": "f", "argu', "The JSON ends too early."),
        ('{"name": "f", "arguments": {"a": "8\\', "The JSON ends too early."),
        ('{"name": "f", "arguments": {"a": "\\u00', "The JSON ends too early."),
        ('{"name": "f", "arguments": {"a": 1}', "The JSON ends too early."),
        ('{"name": "f", "arguments": {"a": tru', "Bad JSON: Expecting value."),
        ('{"name": "f", "arguments": {"a": -', "Bad JSON: Expecting value."),
    ],
)
def test_a_call_that_the_token_limit_cuts_is_truncated_and_a_closed_one_is_malformed(content: str, reason: str) -> None:
    text = f"{block(GOOD)}<tool_call>{content}"
    assert find_tool_calls(text) == [CALL, ToolCallError(reason, "truncated")]
    assert outside_tool_calls(f"a{text}") == "a"
    (closed,) = find_tool_calls(f"<tool_call>{content}</tool_call>")
    assert isinstance(closed, ToolCallError)
    assert closed.kind == "malformed"


def test_a_lone_closing_tag_and_a_call_in_the_other_form_are_attempts() -> None:
    assert find_tool_calls("f(68)</tool_call>") == [ToolCallError("The opening tag is missing.")]
    other = "<function=f><parameter=a>1</parameter></function>"
    assert find_tool_calls(f"a{other}b") == [ToolCallError("The call must be a JSON object.")]
    assert outside_tool_calls(f"a{other}b") == "ab"


def test_latex_with_single_backslashes_is_read_as_it_was_meant() -> None:
    text = r'{"name": "f", "arguments": {"a": "8\sqrt{2} \\pi \\\alpha \"q\" \u0041 \underline"}}'
    meant = ToolCall("f", {"a": '8\\sqrt{2} \\pi \\\\alpha "q" A \\underline'})
    assert find_tool_calls(block(text)) == find_tool_calls(text) == [meant]
    assert find_tool_calls(block(GOOD) + f"\\sqrt{block(text)}\\pi" + block(text)) == [CALL, meant, meant]
    assert outside_tool_calls(f"\\alpha{block(text)}\\pi{block(text)}\\frac") == "\\alpha\\frac"


def test_nul_and_line_breaks_in_strings_are_kept_and_half_a_surrogate_pair_is_replaced() -> None:
    arguments = '{"a": "\ud800\x00\n\\ud801", "\\uDfff": ["\\ud83d\\ude00"]}'
    found = find_tool_calls(block(f'{{"name": "f", "arguments": {arguments}}}'))
    assert found == [ToolCall("f", {"a": "\ufffd\x00\n\ufffd", "\ufffd": ["\U0001f600"]})]


def test_what_is_written_outside_the_calls_is_kept() -> None:
    assert outside_tool_calls(f"a{block(GOOD)}b{block(GOOD)}c") == "ac"
    assert outside_tool_calls(f"a<tool_call>{GOOD}\\boxed{{5}}") == "a"
    assert outside_tool_calls(f"a{block(GOOD)}b<tool_call>c") == "a"
    assert outside_tool_calls(f"a {GOOD}") == "a "
    assert outside_tool_calls(f"a {GOOD}\n{GOOD}\n") == "a "
    assert outside_tool_calls("a </tool_call> b") == "a </tool_call> b"


def test_more_than_64_calls_and_more_than_20_000_values_end_in_an_error() -> None:
    too_many = ToolCallError("Only 64 calls are read in one turn.")
    assert find_tool_calls(block(GOOD) * 64) == [CALL] * 64
    assert find_tool_calls(block(GOOD) * 100) == [*[CALL] * 64, too_many]
    assert find_tool_calls(f"{GOOD}\n" * 100) == [too_many, *[CALL] * 64]
    assert outside_tool_calls("a" + block(GOOD) * 100 + "b") == "ab"
    large = block('{"name": "f", "arguments": {"a": [' + "1," * 30_000 + "1]}}")
    assert find_tool_calls(block(GOOD) + large + block(GOOD)) == [CALL, *[ToolCallError("The call is too large.")] * 2]
    assert find_tool_calls(block(GOOD) + "," * 30_000) == [CALL]
    assert find_tool_calls(block("[" * 100_000)) == [ToolCallError("The JSON is nested too deeply.")]


def test_the_example_of_a_call_is_a_call() -> None:
    example = call_example("calc_score", {"answer": "..."}, "hermes")
    assert example == '{"name": "calc_score", "arguments": {"answer": "..."}}'
    assert find_tool_calls(example) == [ToolCall("calc_score", {"answer": "..."})]
    assert call_example("f", {}, "hermes") == '{"name": "f", "arguments": {}}'


PROSE = st.text().filter(lambda text: not any(tag in text for tag in TAGS))
TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(TAGS)), max_size=4).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(ToolCall, TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3))


@examples(300)
@given(st.lists(st.tuples(CALLS, PROSE), min_size=1, max_size=4), PROSE, st.booleans())
def test_any_calls_written_as_json_come_back_in_order(
    written: list[tuple[ToolCall, str]], before: str, is_ascii: bool
) -> None:
    text, last = before, ""
    for call, last in written:
        content = {"name": call.name, "arguments": call.arguments}
        text += block(json.dumps(content, ensure_ascii=is_ascii)) + last
    assert find_tool_calls(text) == [call for call, _ in written]
    assert outside_tool_calls(text) == before + last


PIECES = st.sampled_from(
    [
        *(*TAGS, "<function=f>", "<parameter=a>", "{", "}", "[", "]", '"', "\\", "\\u", ",", ":", " ", "\n"),
        *('"name"', '"arguments"', '"function"', "5", '"calc_score"', "null", "NaN", "1e999", "9" * 5000, GOOD),
        *("\ud800", "\x00", "<|im_end|>", "[" * 2000, block(GOOD)),
    ]
)


@examples(1000)
@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=30).map("".join), st.sampled_from(FORMATS))
def test_no_text_makes_a_reader_raise(text: str, format: ToolFormat) -> None:
    found: list[Any] = find_tool_calls(text, format)
    assert all(isinstance(call, ToolCall | ToolCallError) for call in found)
    outside = outside_tool_calls(text, format)
    lost = len(text) - len(outside)
    assert any(text[:cut] + text[cut + lost :] == outside for cut in range(len(outside) + 1))
    if not found:
        assert outside == text


def test_mutations_of_valid_responses_never_raise_and_have_every_outcome() -> None:
    seen = {name for text in responses(3000, seed=1) for format in FORMATS for name in outcomes(text, format)}
    assert seen == set(OUTCOMES)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_is_read_in_linear_time(unit: str) -> None:
    for text in list(adversarial(UNITS[unit]))[::7]:
        start = time.thread_time()
        for format in FORMATS:
            find_tool_calls(text, format)
            outside_tool_calls(text, format)
        assert time.thread_time() - start < 2.0, text[:100]


def test_a_written_call_is_the_text_that_the_templates_teach_and_is_read_back() -> None:
    call = ToolCall("f", {"a": "é\n1", "b": [1, "é"], "c": {"d": None}})
    hermes = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n1", "b": [1, "é"], "c": {"d": null}}}\n</tool_call>'
    assert write_tool_call(call, "hermes") == hermes
    assert find_tool_calls(hermes) == [call]
    assert write_tool_call(call, "qwen_xml") == (
        "<tool_call>\n<function=f>\n<parameter=a>\né\n1\n</parameter>\n"
        '<parameter=b>\n[1, "é"]\n</parameter>\n<parameter=c>\n{"d": null}\n</parameter>\n</function>\n</tool_call>'
    )
    text = ToolCall("f", {"a": "68", "b": "x\ny"})
    assert find_tool_calls(write_tool_call(text, "qwen_xml"), "qwen_xml") == [text]
    assert write_tool_call(ToolCall("f", {}), "qwen_xml") == "<tool_call>\n<function=f>\n</function>\n</tool_call>"


def test_of_too_many_bare_calls_the_last_65_are_the_calls() -> None:
    lines = f"{GOOD}\n" * 100
    assert outside_tool_calls("a " + lines) == "a " + f"{GOOD}\n" * 35


@pytest.mark.parametrize(("count", "is_read"), [(20_000, True), (20_001, False)])
def test_20_000_single_backslashes_of_a_turn_are_read_and_no_more(count: int, is_read: bool) -> None:
    (found,) = find_tool_calls(block('{"name": "f", "arguments": {"a": "' + r"\q" * count + '"}}'))
    expected = ToolCall("f", {"a": r"\q" * count})
    assert found == (expected if is_read else ToolCallError(r"Bad JSON: write \\ for a backslash."))
