"""Claims about the thinking channel: what stands in it is never said, and what stands outside always is."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.grading.extraction import extract_boxed
from envs.tool_calls import find_tool_calls
from envs.tool_calls.thinking import TAGS, Thinking

THINK, OPENED = Thinking("<think>", "</think>"), Thinking("<think>", "</think>", is_opened=True)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

# Pieces of tags are likely, and so are whole ones.
words = st.sampled_from(["a", "\n", " ", "<", ">", "/", "<think", "think>", "[THINK]", "\\boxed{1}", CALL, "{", "}"])
texts = st.lists(words | st.sampled_from(["<think>", "</think>"]), max_size=12).map("".join)
plain = st.lists(words, max_size=6).map("".join).filter(lambda text: "think>" not in text)


@pytest.mark.parametrize(
    ("thinking", "text", "said"),
    [
        (THINK, "It is 8.", "It is 8."),
        (THINK, "", ""),
        (THINK, "<think>7?</think>\n\nIt is 8.", "It is 8."),
        (THINK, "<think>7?", ""),  # cut, or ended inside the thought
        (THINK, "It is 8. <think>Or 7?", "It is 8. "),
        (THINK, f"<think>a</think>{CALL}<think>b</think>c", f"{CALL}\nc"),
        (THINK, "<think>a<think>b</think>c</think>d", "d"),  # nested
        (THINK, "8 <think></think></think>d", "d"),
        (THINK, "hm</think>8", "8"),  # the opening was forgotten
        (THINK, "<thi<think>x</think>nk>8", "<thi\nnk>8"),
        (THINK, "Write `<think>` first.", "Write `"),  # a tag in code is a tag
        (OPENED, "7?\n</think>\n\nIt is 8.", "It is 8."),
        (OPENED, "It may be 7", ""),
        (OPENED, "<think>7?</think>8", "8"),  # the model repeats the template's tag
        (OPENED, "7?</think>8 <think>or 9?</think> Yes.", "8 \n Yes."),
        (OPENED, "", ""),
        (Thinking("[THINK]", "[/THINK]"), "[THINK].*[/THINK]8", "8"),
    ],
)
def test_what_is_said_stands_outside_of_thoughts(thinking: Thinking, text: str, said: str) -> None:
    assert thinking.said(text) == said


@given(st.lists(st.tuples(st.booleans(), plain), max_size=6))
def test_pieces_outside_of_whole_thoughts_are_all_said_and_nothing_else(pieces: list[tuple[bool, str]]) -> None:
    text = "".join(
        f"<think>{piece}</think>" if is_thought else f"<think></think>{piece}" for is_thought, piece in pieces
    )
    expected = [piece.lstrip("\n") for is_thought, piece in pieces if not is_thought]
    assert THINK.said(text) == "\n".join(piece for piece in expected if piece)
    assert THINK.said(f"{text}<think>{CALL}") == THINK.said(text)  # an unfinished thought adds nothing


@given(texts)
def test_the_parts_are_the_text_and_those_outside_are_what_is_said(text: str) -> None:
    for thinking in (THINK, OPENED):
        parts = thinking.parts(text)
        assert "".join(part for _, part in parts) == text
        assert "\n".join(part for is_thought, part in parts if not is_thought) == thinking.said(text)


@given(texts)
@example("</think>")
def test_a_turn_reads_the_same_whether_the_template_or_the_model_opens_its_thought(text: str) -> None:
    assert OPENED.said(text) == THINK.said(f"<think>{text}")


@given(texts)
def test_no_tag_reaches_the_environment_and_a_closing_tag_retracts_what_it_does_not_close(text: str) -> None:
    for thinking in (THINK, OPENED):
        said = thinking.said(text)
        assert "<think>" not in said and "</think>" not in said
        assert thinking.said(f"{CALL}{text}</think></think>") == ""


@given(plain)
def test_a_text_without_tags_is_said_unchanged(text: str) -> None:
    assert THINK.said(text) == text
    assert OPENED.said(OPENED.without_thought(text)) == text.lstrip("\n")


@pytest.mark.parametrize(("opening", "closing"), TAGS.values())
def test_a_call_in_a_thought_is_no_call_and_a_box_in_an_unfinished_one_no_answer(opening: str, closing: str) -> None:
    thinking = Thinking(opening, closing)
    said = thinking.said(f"{opening}Try {CALL}?{closing}No. {CALL}")
    assert len(find_tool_calls(said)) == 1
    assert extract_boxed(thinking.said(f"{opening}So \\boxed{{7}}? But")) is None


def test_a_million_tags_are_read_in_linear_time() -> None:
    for text in ("<think>" * 10**6, "</think>" * 10**6, "<think></think>a" * 10**6, "<think>" + "\n" * 10**7):
        began = time.perf_counter()
        THINK.said(text)
        assert time.perf_counter() - began < 10.0
