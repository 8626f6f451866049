"""Checks the chat template: its family's conventions, and its rendering of two scripted turns.

`Renderer` itself has already refused a template that cannot be used at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import stop_ids
from agents.rollout.episode import Episode, Limits
from agents.types import EndReason, GenerateRequest, SamplingParams, Trajectory
from envs.checking.error_location import located_line
from envs.checking.hostile import example_arguments, write_call
from envs.checks import Verdict, fault, ok, warning
from envs.config.text_files import read_text
from envs.env import EnvArgs
from envs.execution.runner import last_line
from envs.spec import BuildEnv, EnvLimits
from envs.tool_calls import detect_format
from envs.tool_calls.thinking import Thinking
from trainer.preflight.probe_streams import OpenedProblem

#: Earlier turns of the model; a template must show them unchanged. They have no thinking, and no blanks at the ends.
_REPLIES = ("First I look at the figure: it has 3 sides.", "So the answer is 12.")


@dataclass(frozen=True)
class TemplateFamily:
    """The text that opens and closes a turn in the conversations that a family of models was trained on.

    Example: ChatML opens the model's turn with `<|im_start|>assistant\\n` and closes it with `<|im_end|>\\n`.
    """

    opening: str
    closing: str


#: Families by the token that closes a turn: ChatML (Qwen's models and many others), and headers (Llama 3 and later).
FAMILIES: Mapping[str, TemplateFamily] = {
    "<|im_end|>": TemplateFamily("<|im_start|>{role}\n", "<|im_end|>\n"),
    "<|eot_id|>": TemplateFamily("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
}
#: The token that closes a turn, by the start of `model_type`, if all instruction-tuned checkpoints of it agree.
CLOSERS: Mapping[str, str] = {"qwen": "<|im_end|>"}


def check_conventions(renderer: Renderer, model_type: str) -> list[Verdict]:
    """Return a verdict for each departure of the template from what models of this type were trained on."""
    closer = next((text for start, text in CLOSERS.items() if model_type.startswith(start)), renderer.closer)
    fix = "take chat_template.jinja from the model's own repository"
    is_own = renderer.closer == renderer.tokenizer.eos_token
    if renderer.closer != closer:
        found = f"the template closes a turn with {renderer.closer}, models of type {model_type} with {closer}"
        # If the tokenizer agrees, others may have trained the model on another form: DeepSeek's distilled Qwen.
        return [warning(found, fix) if is_own else fault(found, fix)]
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _REPLIES[0]},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": _REPLIES[1]},
        {"role": "user", "content": "Sure?"},
    ]
    text = renderer.template.render(conversation)
    verdicts = []
    missing = [reply for reply in _REPLIES if reply not in text]
    if missing:
        found = f"the template rewrites what the model said in earlier turns: {missing[0]!r} is not shown again"
        why = "the model would be trained on other text than the template shows it in use; fix chat_template.jinja"
        return [fault(found, why)]
    family = FAMILIES.get(closer)
    if family is None:
        return []
    # Models outside these families have borrowed ChatML's tokens without its newline.
    is_known = closer == "<|eot_id|>" or any(model_type.startswith(start) for start in CLOSERS)
    departs = fault if is_known else warning
    between = text.partition(_REPLIES[0])[2].partition("And?")[0]
    wanted = family.closing + family.opening.format(role="user")
    if between != wanted:
        verdicts.append(departs(f"the template writes {between!r} after a turn, the family {wanted!r}", fix))
    opening, wanted = text.rpartition("Sure?")[2], family.closing + family.opening.format(role="assistant")
    if not opening.startswith(wanted):
        verdicts.append(departs(f"the template opens a turn with {opening!r}, the family with {wanted!r}", fix))
    return verdicts


def check_tokens(renderer: Renderer, path: str | Path) -> list[Verdict]:
    """Return a verdict if generation_config.json lacks the closing token, and one if there is a second template."""
    verdicts = []
    ids = stop_ids(_read(path, "generation_config.json"))
    if ids and renderer.closer_id not in ids:
        found = f"generation_config.json stops at {sorted(ids)}, the template closes a turn with {renderer.closer_id}"
        fix = f"add {renderer.closer_id} ({renderer.closer}) to its eos_token_id: here it is added, elsewhere it is not"
        verdicts.append(warning(found, fix))
    templates = {
        name: found
        for name in ("chat_template.json", "tokenizer_config.json")
        if isinstance(found := _read(path, name).get("chat_template"), str)
    }
    others = [name for name, found in templates.items() if found.strip() != renderer.chat_template.strip()]
    if others:
        fix = "delete the one that does not belong to the model: programs differ in which one they read"
        verdicts.append(warning(f"{', '.join(others)} has another chat template than the one that is used", fix))
    return verdicts


def check_format(renderer: Renderer, args: EnvArgs, has_tools: bool) -> list[Verdict]:
    """Return a verdict if the environment reads tool calls in another form than the template teaches."""
    taught = detect_format(renderer.chat_template)
    if not has_tools or not renderer.teaches_tools or taught == args.tool_format:
        return []
    found = f"the template teaches calls in the form {taught}, the environment reads {args.tool_format}"
    return [warning(found, "set tool_format: auto")]


async def play_scripted(
    problem: OpenedProblem,
    renderer: Renderer,
    build_env: BuildEnv,
    args: EnvArgs,
    limits: EnvLimits,
    thinking: Thinking | None = None,
) -> Trajectory:
    """Play two scripted turns, a tool call and an answer; the agent loop compares each boundary with the template."""
    texts = scripted_texts(problem.tools, args, problem.sample.label)
    if thinking:
        texts = [thinking.without_thought(text) for text in texts]

    def script(turn: int, request: GenerateRequest) -> str:
        return texts[min(turn, len(texts) - 1)]

    engine = ScriptedEngine(renderer.tokenizer, script, context_length=len(problem.prompt.ids) + 8192)
    loop_limits = Limits(min(len(texts), args.max_turns), 8000, limits, check_template_every=1)
    sampling = SamplingParams(stop_ids=renderer.stop_ids)
    episode = Episode(engine, renderer, loop_limits, sampling, thinking=thinking)
    return await episode.run(problem.sample, lambda: build_env(problem.sample, args), seed=0)


def scripted_texts(tools: Sequence[Mapping[str, Any]], args: EnvArgs, label: str | None) -> list[str]:
    """Return the texts of two turns: a tool call (or, without tools, a first thought), and the answer."""
    answer = f"\\boxed{{{label if label is not None else 7}}}"
    if not tools:
        return ["Let me see.", answer]
    name = str(tools[0]["function"]["name"])
    return [f"Let me see.\n{write_call(name, example_arguments(tools[0]), args.tool_format)}", answer]


def check_scripted_episode(trajectory: Trajectory) -> Verdict:
    """Return whether the stream of a scripted episode equals the template's rendering at every boundary."""
    if trajectory.end_reason is EndReason.INVALID_STREAM:
        found = f"a scripted episode breaks the stream: {last_line(trajectory.error):.300}"
        return fault(found, "fix chat_template.jinja, or take the tokenizer that belongs to it")
    if not trajectory.end_reason.is_valid:
        found = f"a scripted episode ended as {trajectory.end_reason.value}: {located_line(trajectory.error):.200}"
        return warning(found, "see envs.check")
    count = len(trajectory.turns)
    return ok(f"{count} scripted turn{'s' * (count != 1)}, {len(trajectory.ids_T)} tokens as the template writes them")


def _read(path: str | Path, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file, or `path` is a hub id."""
    try:
        found = json.loads(read_text(Path(path) / name, name))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    return {}
