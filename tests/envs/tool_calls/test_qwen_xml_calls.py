"""Calls in the form of Qwen3-Coder, and which form a chat template teaches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tool_calls import (
    TOOL_FORMATS,
    ToolCall,
    ToolCallError,
    call_example,
    detect_format,
    find_tool_calls,
    outside_tool_calls,
)
from tests.budget import examples
from tests.envs.tool_calls.fuzz import block
from tests.paths import published_template

GOOD = "<function=calc_score>\n<parameter=answer>\n68\n</parameter>\n</function>"
CALL = ToolCall("calc_score", {"answer": "68"})
EARLY = "The call ends too early."
NO_FUNCTION = "A call starts with <function=NAME>."
NO_NAME = "A name is missing or lacks its >."
NO_JSON = "Write no JSON but <function=NAME><parameter=KEY>VALUE</parameter></function>."


def find(text: str) -> list[ToolCall | ToolCallError]:
    return find_tool_calls(text, "qwen_xml")


def outside(text: str) -> str:
    return outside_tool_calls(text, "qwen_xml")


@pytest.mark.parametrize(
    "text",
    [
        block(GOOD),
        f"Let me check.\n{block(GOOD)}\nWaiting.",
        GOOD,
        f"<tool_call>{GOOD}",
        f"{GOOD}</tool_call>",
        f"<tool_call>I call {GOOD}",
        "<function=calc_score><parameter=answer>68</parameter></function>",
        "<function= calc_score ><parameter= answer >68</parameter></function>",
        "<function=calc_score><parameter=answer>68</function>",
        "<tool_call><function=calc_score><parameter=answer>68</parameter></tool_call>",
        "<tool_call><function=calc_score><parameter=answer>\n68\n</tool_call>",
        "<function=calc_score>stray<parameter=answer>68</parameter>stray</function>",
    ],
)
def test_every_accepted_form_is_the_same_call(text: str) -> None:
    assert find(text) == [CALL]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("68", "68"),
        ("\n68\n", "68"),
        ("\n\n68\n\n", "\n68\n"),
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
        (" 68 ", " 68 "),
        ('{"a": [1, "b"]}', '{"a": [1, "b"]}'),
        ("if a < b > c:\n\treturn '</x>'", "if a < b > c:\n\treturn '</x>'"),
        ("8\\sqrt{2}\\n", "8\\sqrt{2}\\n"),
        ("a <tool_call> b </tool_call> c <function=g>", "a <tool_call> b </tool_call> c <function=g>"),
        ("\ud800\x00", "\ufffd\x00"),
    ],
)
def test_a_value_is_text_without_one_line_break_at_either_end(written: str, value: str) -> None:
    text = f"<tool_call><function=f><parameter=a>{written}</parameter><parameter=b>1</parameter></function></tool_call>"
    assert find(text) == [ToolCall("f", {"a": value, "b": "1"})]
    assert find(text + block(GOOD)) == [ToolCall("f", {"a": value, "b": "1"}), CALL]
    assert outside(f"x{text}y") == "xy"


def test_a_value_that_is_not_closed_ends_at_the_next_tag() -> None:
    assert find("<function=f><parameter=a>1\n<parameter=b>\n2\n</function>") == [ToolCall("f", {"a": "1", "b": "2"})]
    assert find("<function=f><parameter=a>x</parameter>y</parameter></function>") == [ToolCall("f", {"a": "x"})]
    unclosed = "<tool_call><function=f><parameter=a>1</tool_call>"
    assert find(unclosed + block("<function=g></function>")) == [ToolCall("f", {"a": "1"}), ToolCall("g", {})]
    assert find(unclosed + block(GOOD)) == [ToolCall("f", {"a": "1"}), CALL]


@pytest.mark.parametrize("between", ["", "\n", " and then ", "</tool_call>", "</parameter>"])
def test_all_calls_of_a_turn_are_found_in_order(between: str) -> None:
    text = between.join(["So ", block("<function=f></function>"), GOOD, block(GOOD), ""])
    assert find(text) == [ToolCall("f", {}), CALL, CALL]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "The call is empty."),
        ("calc_score(68)", NO_FUNCTION),
        ('{"name": "calc_score", "arguments": {"answer": "68"}}', NO_JSON),
        ('{"name": "f", "arguments": {"a": "<function=g></function>"}}', NO_JSON),
        ("{", NO_JSON),
        ("<function=></function>", NO_NAME),
        ("<function= ></function>", NO_NAME),
        ("<function=f</function>", NO_NAME),
        ("<function=f\n<parameter=a>1</parameter></function>", NO_NAME),
        ("<function=f><parameter=>1</parameter></function>", NO_NAME),
        ("<function=f><parameter=a\n1</parameter></function>", NO_NAME),
        ("<function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>", "A parameter is given twice."),
        ('<function=f>{"a": 1}</function>', "Write each argument as <parameter=KEY>VALUE</parameter>."),
        (
            "<function=f>" + "".join(f"<parameter=a{n}>1</parameter>" for n in range(65)) + "</function>",
            "A call has at most 64 parameters.",
        ),
    ],
)
def test_a_broken_call_says_what_is_wrong_and_does_not_swallow_its_neighbours(content: str, reason: str) -> None:
    error = ToolCallError(reason)
    assert find(block(content)) == [error]
    assert find(f"{block(GOOD)}{block(content)}\n{block(GOOD)}") == [CALL, error, CALL]
    assert outside(f"a{block(content)}b") == "ab"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>", "The call is empty."),
        ("<tool_call>\n<func", NO_FUNCTION),
        ("<function=", EARLY),
        ("<function=calc_", EARLY),
        ("<function=f>", EARLY),
        ("<tool_call><function=f><parameter=", EARLY),
        ("<function=f><parameter=a>6", EARLY),
        ("<function=f><parameter=a>68</param", EARLY),
        ("<function=f><parameter=a>68</parameter>", EARLY),
        ("<tool_call><function=f><parameter=a>68</parameter></functio", EARLY),
    ],
)
def test_a_call_that_the_token_limit_cuts_is_truncated(text: str, reason: str) -> None:
    assert find(block(GOOD) + text) == [CALL, ToolCallError(reason, "truncated")]
    assert outside(f"a{text}") == "a"


def test_a_call_that_the_next_one_interrupts_is_malformed() -> None:
    assert find(f"<function=f>{GOOD}") == [ToolCallError(EARLY), CALL]
    assert find(f"<tool_call><function=f><parameter=a>1</parameter>{block(GOOD)}") == [ToolCallError(EARLY), CALL]
    assert find(f"<tool_call>{block(GOOD)}") == [ToolCallError("The call is empty."), CALL]


def test_closing_tags_alone_and_bare_json_are_attempts_and_other_text_is_none() -> None:
    for tag in ("</tool_call>", "</function>", "</parameter>"):
        assert find(f"a 68{tag}") == [ToolCallError(NO_FUNCTION)]
        assert outside(f"a 68{tag}") == f"a 68{tag}"
    json_call = '{"name": "f", "arguments": {}}'
    assert find(f"a {json_call}\n{json_call}") == [ToolCallError(NO_JSON)] * 2
    assert outside(f"a {json_call}\n{json_call}") == "a "
    for text in ("", "The answer is \\boxed{68}.", "<tool_call", "<function", '{"name": "f"}'):
        assert find(text) == []
        assert outside(text) == text


def test_what_is_written_outside_the_calls_is_kept() -> None:
    assert outside(f"a{block(GOOD)}b{block(GOOD)}c") == "ac"
    assert outside(f"a{GOOD}b") == "ab"
    assert outside(f"a<tool_call>{GOOD}b") == "ab"
    assert outside(f"a{block(GOOD)}b<tool_call>c") == "a"
    assert outside("a" + block(GOOD) * 100 + "b") == "ab"
    assert outside("a" + GOOD * 100) == "a"


def test_more_than_64_calls_end_in_an_error() -> None:
    assert find(block(GOOD) * 64) == [CALL] * 64
    assert find(GOOD * 100) == [*[CALL] * 64, ToolCallError("Only 64 calls are read in one turn.")]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="<>\n"), min_size=1).map(str.strip).filter(bool)
TAGS = ["<tool_call>", "</tool_call>", "<function=f>", "<parameter", "</parameter", "</function", "<", ">", "\n", '"']
PROSE = st.text().filter(lambda text: "<" not in text)
TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(TAGS)), max_size=4).map("".join)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(NAMES, TEXTS, max_size=4))


def ends_early(value: object) -> bool:
    return any(tag in str(value) for tag in ("<parameter=", "</parameter>", "</function>"))


@examples(300)
@given(st.lists(st.tuples(CALLS, PROSE, st.booleans()), min_size=1, max_size=4), PROSE)
def test_any_calls_written_in_tags_come_back_in_order(written: list[tuple[ToolCall, str, bool]], before: str) -> None:
    text, last, meant = before, "", []
    for call, last, is_tagged in written:
        arguments = {key: value for key, value in call.arguments.items() if not ends_early(value)}
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        function = f"<function={call.name}>\n{parameters}</function>"
        text += (block(function) if is_tagged else function) + last
        meant.append(ToolCall(call.name, arguments))
    assert find(text) == meant
    assert outside(text) == before + last


def test_the_example_of_a_call_is_a_call() -> None:
    example = call_example("calc_score", {"answer": "..."}, "qwen_xml")
    assert example == "<function=calc_score><parameter=answer>...</parameter></function>"
    assert find(example) == [ToolCall("calc_score", {"answer": "..."})]
    assert call_example("f", {}, "qwen_xml") == "<function=f></function>"


def test_the_format_is_what_the_chat_template_teaches() -> None:
    teaches_xml = (
        "{% if tools %}Reply in this form:\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
        "</function>\n</tool_call>{% endif %}{% for m in messages %}{{ m.role }}\n{{ m.content }}{% endfor %}"
    )
    teaches_json = '{% if tools %}<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>{% endif %}'
    assert TOOL_FORMATS == ("hermes", "qwen_xml")
    assert detect_format(teaches_xml) == "qwen_xml"
    assert detect_format(teaches_json) == "hermes"
    assert detect_format("") == "hermes"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_vl", "qwen3_vl_training"])
def test_qwens_chat_templates_teach_hermes(name: str) -> None:
    assert detect_format(published_template(name)) == "hermes"


def test_the_chat_template_of_qwen3_5_teaches_its_own_form() -> None:
    assert detect_format(published_template("qwen3_5_think")) == "qwen_xml"
