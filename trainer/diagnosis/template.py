"""The chat template: two scripted turns through the agent loop against its own rendering, and its family's habits.

In: a renderer, an opened problem. Out: verdicts. What a template refuses outright, `Renderer` itself has said before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.engines.scripted import ScriptedEngine
from agents.episode import Episode, Limits
from agents.renderer import Renderer
from agents.types import EndReason, GenerateRequest, SamplingParams, Trajectory
from envs.checking.hostile import example_arguments, write_call
from envs.env import EnvArgs
from envs.runner import EnvLimits
from envs.spec import BuildEnv
from envs.tool_calls import detect_format
from trainer.diagnosis.finding import Verdict, fault, ok, warning
from trainer.diagnosis.streams import Opening

#: Said in earlier turns to see whether they are shown as they were written: no thinking, no blanks at the ends.
_SAID = ("First I look at the figure: it has 3 sides.", "So the answer is 12.")


@dataclass(frozen=True)
class Family:
    """How a family of models was shown conversations: what opens a turn of a role, and what closes it.

    Example: ChatML opens the model's turn with `<|im_start|>assistant\\n` and closes it with `<|im_end|>\\n`.
    """

    opening: str
    closing: str


#: By the token that closes a turn. ChatML: Qwen's models and many others; headers: Llama 3 and later.
FAMILIES: Mapping[str, Family] = {
    "<|im_end|>": Family("<|im_start|>{role}\n", "<|im_end|>\n"),
    "<|eot_id|>": Family("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
}
#: What closes a turn, by the beginning of `model_type`, where all instruction-tuned checkpoints agree.
CLOSERS: Mapping[str, str] = {"qwen": "<|im_end|>"}


def check_habits(renderer: Renderer, model_type: str) -> list[Verdict]:
    """Return where the template departs from what models with such a network were trained on."""
    closer = next((text for start, text in CLOSERS.items() if model_type.startswith(start)), renderer.closer)
    fix = "take chat_template.jinja from the model's own repository"
    is_own = renderer.closer == renderer.tokenizer.eos_token
    if renderer.closer != closer:
        found = f"the template closes a turn with {renderer.closer}, models of type {model_type} with {closer}"
        # Where the tokenizer agrees it may be a model of others, taught another form: DeepSeek's distilled Qwen.
        return [warning(found, fix) if is_own else fault(found, fix)]
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _SAID[0]},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": _SAID[1]},
        {"role": "user", "content": "Sure?"},
    ]
    text = renderer.template.render(conversation)
    verdicts = []
    missing = [said for said in _SAID if said not in text]
    if missing:
        found = f"the template rewrites what the model said in earlier turns: {missing[0]!r} is not shown again"
        fix_it = "what is trained is not what the template shows the model when it is used; mend chat_template.jinja"
        verdicts.append(fault(found, fix_it))
    family = FAMILIES.get(closer)
    # Others have borrowed ChatML's tokens without its newline.
    knows = closer == "<|eot_id|>" or any(model_type.startswith(start) for start in CLOSERS)
    departs = fault if knows else warning
    if family is not None and not missing:
        between = text.partition(_SAID[0])[2].partition("And?")[0]
        wanted = family.closing + family.opening.format(role="user")
        if between != wanted:
            verdicts.append(departs(f"the template writes {between!r} after a turn, the family {wanted!r}", fix))
        opening = text.rpartition("Sure?")[2]
        if not opening.startswith(family.closing + family.opening.format(role="assistant")):
            wanted = family.closing + family.opening.format(role="assistant")
            verdicts.append(departs(f"the template opens a turn with {opening!r}, the family with {wanted!r}", fix))
    return verdicts


def check_tokens(renderer: Renderer, path: str | Path) -> list[Verdict]:
    """Return whether what closes a turn is a stop token for others too, and whether there is one template only."""
    verdicts = []
    ids = _eos_ids(_read(path, "generation_config.json"))
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
        fix = "delete the one that does not belong to the model: which is read depends on who reads it"
        verdicts.append(warning(f"{', '.join(others)} has another chat template than the one that is used", fix))
    return verdicts


def check_format(renderer: Renderer, args: EnvArgs, has_tools: bool) -> list[Verdict]:
    """Return whether calls are read as the template teaches them to be written."""
    taught = detect_format(renderer.chat_template)
    if not has_tools or not renderer.teaches_tools or taught == args.tool_format:
        return []
    found = f"the template teaches calls in the form {taught}, the environment reads {args.tool_format}"
    return [warning(found, "give --tool-format auto")]


async def play_scripted(
    opening: Opening, renderer: Renderer, build_env: BuildEnv, args: EnvArgs, limits: EnvLimits
) -> Trajectory:
    """Play a call of a tool where there is one, then an answer; every boundary is held against the template."""
    texts = scripted_texts(opening.tools, args, opening.sample.label)

    def script(turn: int, request: GenerateRequest) -> str:
        return texts[min(turn, len(texts) - 1)]

    length = len(opening.prompt.ids)
    engine = ScriptedEngine(renderer.tokenizer, script, context_length=length + 8192)
    own = Limits(min(len(texts), args.max_turns), 8000, limits, check_template_every=1)
    episode = Episode(engine, renderer, own, SamplingParams(stop_ids=renderer.stop_ids))
    return await episode.run(opening.sample, lambda: build_env(opening.sample, args), seed=0)


def scripted_texts(tools: Sequence[Mapping[str, Any]], args: EnvArgs, label: str | None) -> list[str]:
    """Return what is said: a call, or a first try, and then the answer."""
    answer = f"\\boxed{{{label if label is not None else 7}}}"
    if not tools:
        return ["Let me see.", answer]
    name = str(tools[0]["function"]["name"])
    return [f"Let me see.\n{write_call(name, example_arguments(tools[0]), args.tool_format)}", answer]


def check_played(trajectory: Trajectory) -> Verdict:
    """Return whether the stream of a scripted episode was the template's own at every boundary."""
    if trajectory.end_reason is EndReason.INVALID_STREAM:
        found = f"a scripted episode breaks the stream: {(trajectory.error or '').strip().splitlines()[-1]:.300}"
        return fault(found, "mend chat_template.jinja, or take the tokenizer that belongs to it")
    if not trajectory.end_reason.is_valid:
        last = (trajectory.error or "no reason").strip().splitlines()[-1]
        return warning(f"a scripted episode ended as {trajectory.end_reason.value}: {last:.200}", "see envs.check")
    count = len(trajectory.turns)
    return ok(f"{count} scripted turn{'s' * (count != 1)}, {len(trajectory.ids_T)} tokens as the template writes them")


def _eos_ids(config: Mapping[str, Any]) -> set[int]:
    value = config.get("eos_token_id")
    return set(value) if isinstance(value, list) else set() if value is None else {int(value)}


def _read(path: str | Path, name: str, parse: Callable[[str], Any] = json.loads) -> Mapping[str, Any]:
    """Return a file's object; an empty one where there is none, also for a hub id that is not a folder."""
    try:
        found = parse((Path(path) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
