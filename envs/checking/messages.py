"""Checks what the model sees: prompts, tools, observations and images, and how a chat template renders them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from envs.checking.chat_template import ChatTemplate
from envs.checking.episodes import PlayedEpisode
from envs.checking.findings import NOT_REACHED, Evidence, call_records, has_text, quoted, refuse, texts, where
from envs.checking.hostile import example_arguments
from envs.checks import NotApplicable
from envs.contract import MAX_IMAGE_PIXELS, EnvFault, checked_messages
from envs.errors import UserError
from envs.images import MAX_RATIO
from envs.types import Message, message_images

#: The image processor of Qwen's vision-language models refuses smaller sides.
MIN_SIDE = 28
MADE_UP = "made up"
ROLES = ("system", "user", "assistant", "tool")
#: About 25,000 tokens: an observation that is longer fills the context of most models by itself.
MAX_CHARACTERS = 100_000

_CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>")
#: Tags between which templates write calls and their results; a prompt may explain them, a result must not hold any.
_TAGS = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?tool_(?:call|response)>")


def check_prompts(evidence: Evidence) -> str:
    """Prompts are messages with known roles and parts, and their images decode."""
    problems = []
    counts = []
    openings = {episode.sample.id: episode.opening for episode in evidence.of("survey") if episode.is_opened}
    for sample in evidence.samples:
        is_opened = sample.id in openings
        try:
            messages = [*checked_messages(list(sample.prompt)), *openings.get(sample.id, ())]
        except (EnvFault, UserError, TypeError) as error:
            rule = str(error).replace("format_observation must return", "a prompt must hold")
            problems.append(f"sample {sample.id}: {rule.replace('observation image', 'image')}")
            continue
        # The first observation, if it is not known, may hold all messages.
        if messages or is_opened:
            problems += [f"sample {sample.id}: {problem}" for problem in _prompt_problems(messages, is_opened)]
            counts.append(len(message_images(messages)))
    ids = Counter(sample.id for sample in evidence.samples)
    problems += [f"{count} samples have the id {each}" for each, count in ids.items() if count > 1]
    refuse(problems)
    if not counts:
        raise NotApplicable(NOT_REACHED)
    return f"{len(counts)} prompts with {sum(counts)} images"


def _prompt_problems(messages: Sequence[Message], is_opened: bool) -> Iterator[str]:
    if not messages:
        yield "neither prompt nor first observation holds a message"
        return
    if messages[-1]["role"] == "assistant" and is_opened:
        yield "the last message is an assistant's, so no turn of the model begins"
    if unknown := [message["role"] for message in messages if message["role"] not in ROLES]:
        yield f"role '{unknown[0]}' is not one of {', '.join(ROLES)}"
    if not has_text(messages) and not message_images(messages):
        yield "the prompt is empty, without text and images"
    if any("<image>" in text for text in texts(messages)):
        yield "a text contains <image>, which stays text; write an image part"


def check_tools(evidence: Evidence) -> str:
    """Tools are schemas in the form that chat templates expect."""
    # Those of one episode stand for all: `check_deterministic` compares them.
    tools = next((episode.tools for episode in evidence.episodes if episode.tools), ())
    if not tools and any(episode.runs_tools for episode in evidence.episodes):
        raise NotApplicable("no method of this ToolEnv is marked with @tool")
    if not tools:
        raise NotApplicable("the environment has no tools")
    problems = list(filter(None, map(schema_problem, tools)))
    names = Counter[str]()
    remarks = []
    for tool in usable(tools):
        function = tool["function"]
        name = function["name"]
        names[name] += 1
        if not str(function.get("description") or "").strip():
            remarks.append(f"{name} has no description, so a model has to guess what it does")
        if _is_silent(evidence, tool):
            problems.append(f"{name} answered nothing in every call; does it return?")
    problems += [f"two tools are called {name}" for name, count in names.items() if count > 1]
    refuse(problems)
    return "; ".join([", ".join(names), *remarks])


def _is_silent(evidence: Evidence, tool: dict[str, Any]) -> bool:
    """Return whether a tool never answered anything.

    It may have no answer to a text that is made up, so that only a call of the solution tells.
    """
    name = tool["function"]["name"]
    is_guessed = MADE_UP in example_arguments(tool, MADE_UP).values()
    num_calls = 0
    for episode in evidence.episodes:
        for step in episode.steps:
            made = [(record.get("name"), record.get("outcome")) for record in call_records(step)]
            if made != [(name, "ok")] or step.done:  # a tool that ends the task need not answer
                continue
            if has_text(step.messages) or message_images(step.messages):
                return False
            num_calls += episode.script.kind == "gold" or not is_guessed
    return num_calls > 0


def usable(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools whose schema is one."""
    return [tool for tool in tools if schema_problem(tool) is None]


class _Parameters(BaseModel):
    type: Literal["object"]
    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []


class _Function(BaseModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]{0,63}$")]
    parameters: _Parameters


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


def schema_problem(tool: Any) -> str | None:
    """Return what is wrong with one tool's schema."""
    try:
        json.dumps(tool, allow_nan=False)
        function = _Tool.model_validate(tool).function
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}"
    except (TypeError, ValueError) as error:
        return f"{tool!r:.80} cannot be written as JSON: {error}"
    parameters = function.parameters
    if unknown := [key for key in parameters.required if key not in parameters.properties]:
        return f"{function.name}: required names {unknown[0]!r}, which is no property"
    return None


def check_rendering(evidence: Evidence) -> str:
    """Every conversation renders: each text verbatim, each image as one placeholder."""
    template = evidence.template
    problems = []
    count = 0
    for episode in evidence.episodes:
        conversation = [*episode.prompt, *episode.opening]
        for text, step in zip(episode.script.texts, episode.steps, strict=False):
            conversation += [{"role": "assistant", "content": text}, *step.messages]
        if not conversation:
            continue
        try:
            rendered = template.render(conversation, episode.tools)
        except TimeoutError as error:  # the other conversations would take as long
            problems.append(f"{where(episode)}: {error}")
            break
        except Exception as error:  # a template is code and may raise anything
            problems.append(f"{where(episode)}: {template.name} refuses it: {error}")
            continue
        count += len(episode.observations)
        problems += [f"{where(episode)}: {problem}" for problem in _too_long(episode)]
        found = _render_problems(template, rendered, conversation, episode)
        problems += [f"{where(episode)}: {problem}" for problem in found]
    refuse(problems)
    return f"{count} observations with {template.name}"


def _too_long(episode: PlayedEpisode) -> Iterator[str]:
    for text in texts(episode.observations):
        # An answer may repeat a long text of a hostile script.
        if len(text) > MAX_CHARACTERS and episode.script.kind != "hostile":
            yield f"an observation has {len(text):,} characters; more than {MAX_CHARACTERS:,} fill a context"


def _render_problems(
    template: ChatTemplate, rendered: str, conversation: Sequence[Message], episode: PlayedEpisode
) -> Iterator[str]:
    if template.placeholder is None and any(message_images(conversation)):
        yield "the template shows no images"
        return
    for text in texts([*episode.prompt, *episode.observations]):
        if text not in rendered:
            yield f"the template leaves out or changes {quoted(text)}"
        if text != text.encode("utf-8", "replace").decode():
            yield f"{quoted(text)} contains half a surrogate pair, which no tokenizer accepts"
    if template.placeholder is None:
        return
    # Texts may spell the placeholder too; `check_control_tokens` judges that.
    spelled = sum(text.count(template.placeholder) for text in texts(conversation))
    found = rendered.count(template.placeholder) - spelled
    images = len(message_images(conversation))
    if found != images:
        yield f"{images} images, but {found} placeholders {template.placeholder}"


def check_control_tokens(evidence: Evidence) -> str:
    """The environment's texts contain no token with which a template marks turns or images."""
    own = []
    echoed = Counter[str]()
    for episode in evidence.episodes:
        written = "".join(episode.script.texts)
        places = [("a prompt", _CONTROL, text) for text in texts(episode.prompt)]
        places += [("a tool's schema", _CONTROL, json.dumps(episode.tools, default=repr, ensure_ascii=False))]
        places += [(f"an observation, {where(episode)}", _TAGS, text) for text in texts(episode.observations)]
        for place, tokens, text in places:
            for token in tokens.findall(text):
                if token in written:  # the model wrote it, and learns nothing new from reading it
                    echoed[token] += 1
                else:
                    own.append(f"{token} in {place}")
    refuse(own)
    if echoed:
        return f"only those that the model wrote before: {', '.join(echoed)} (rendered as plain text)"
    return "none in any text"


def check_images(evidence: Evidence) -> str:
    """Images have a size that a vision-language model accepts."""
    messages = [message for each in evidence.episodes for message in (*each.prompt, *each.observations)]
    sizes = sorted({image.size for image in message_images(messages)}, key=math.prod)
    problems = []
    shown = [f"{width}x{height}" for width, height in sizes]
    for name, (width, height) in zip(shown, sizes, strict=True):
        if width * height > MAX_IMAGE_PIXELS:
            problems.append(f"{name}: an image may have at most {MAX_IMAGE_PIXELS:,} pixels")
        elif min(width, height) < MIN_SIDE:
            problems.append(f"{name}: a side must have at least {MIN_SIDE} pixels")
        elif max(width, height) > MAX_RATIO * min(width, height):
            problems.append(f"{name}: one side may be at most {MAX_RATIO} times as long as the other")
    refuse(problems)
    if not shown:
        raise NotApplicable("there are no images")
    return f"images of {shown[0]} to {shown[-1]}"
