"""Claims about finding a chat template's thinking channel: it is found by what the template renders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.rendering.renderer import Renderer
from agents.rendering.thinking import find_thinking
from envs.tool_calls.thinking import TAGS, Thinking, ThinkingSetting
from tests.agents.rendering.template_cases import OWN_TEMPLATES, QWEN_TEMPLATES, renderer_for, starter_tokenizer

THINK = Thinking("<think>", "</think>")
#: ChatML in which `THOUGHT` stands for how a message's thought is written.
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\\n' -}}"
    "THOUGHT{{- message.content ~ '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def channel_of(template: str, setting: ThinkingSetting = "auto") -> Thinking | None:
    tokenizer = starter_tokenizer()
    tokenizer.chat_template = template
    return find_thinking(Renderer(tokenizer, None).template, setting)


@pytest.mark.parametrize("name", OWN_TEMPLATES + QWEN_TEMPLATES)
def test_of_the_known_templates_only_those_that_treat_thoughts_have_a_channel(name: str) -> None:
    opened = replace(THINK, is_opened=True)
    expected = {"chatml_thinking": opened, "qwen3": THINK, "qwen3_5_think": opened}
    assert find_thinking(renderer_for(name).template) == expected.get(name)


@pytest.mark.parametrize("name", ["chatml_thinking", "qwen3", "qwen3_5_think", "qwen3_5_nothink"])
def test_a_template_that_closes_an_empty_thought_itself_has_a_channel_that_is_not_open(name: str) -> None:
    assert find_thinking(renderer_for(name, enable_thinking=False).template) == THINK


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("tags", TAGS.values())
def test_the_tags_around_a_thought_in_a_field_of_its_own_are_found(field: str, tags: tuple[str, str]) -> None:
    opening, closing = tags
    thought = f"{{{{- '{opening}\\n' ~ message.{field} ~ '\\n{closing}\\n\\n' -}}}}"
    written = f"{{%- if message.{field} -%}}{thought}{{%- endif -%}}"
    assert channel_of(CHATML.replace("THOUGHT", written)) == Thinking(opening, closing)


def test_the_tags_around_a_part_that_is_a_thought_are_found() -> None:
    parts = (
        "{%- if message.content is not string -%}{%- for part in message.content -%}"
        "{{- '[THINK]' ~ part.thinking ~ '[/THINK]' if part.type == 'thinking' else part.text -}}"
        "{%- endfor -%}{%- else -%}{{- message.content -}}{%- endif -%}{{- '<|im_end|>\\n' -}}"
    )
    template = CHATML.replace("THOUGHT{{- message.content ~ '<|im_end|>\\n' -}}", parts)
    assert channel_of(template) == Thinking("[THINK]", "[/THINK]")


def test_a_template_that_opens_a_thought_only_for_a_user_opens_none() -> None:
    opening = "{{- '' if messages[-1].role == 'tool' else '<think>\\n' -}}"
    template = CHATML.replace("THOUGHT", "").replace(
        "assistant\\n' -}}{%- endif", f"assistant\\n' -}}}}{opening}{{%- endif"
    )
    assert channel_of(template) == THINK
    always = template.replace("messages[-1].role == 'tool'", "false")
    assert channel_of(always) == Thinking("<think>", "</think>", is_opened=True)


def test_a_field_that_is_written_without_tags_is_no_channel() -> None:
    assert channel_of(CHATML.replace("THOUGHT", "{{- message.reasoning_content or '' -}}")) is None


def test_the_setting_keeps_all_or_names_tags_that_the_template_does_not_know() -> None:
    plain = CHATML.replace("THOUGHT", "")
    assert (channel_of(plain), channel_of(plain, "think")) == (None, THINK)
    assert find_thinking(renderer_for("chatml_thinking").template, "keep") is None
    assert find_thinking(renderer_for("chatml_thinking").template, "mistral") == Thinking("[THINK]", "[/THINK]")
