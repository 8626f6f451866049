"""Checks whether a chat template follows the conventions of the family that the model belongs to.

`Renderer` has already refused a template that cannot be used at all. The invariants of the agent loop compare every
stream with the template at each boundary of a turn.
"""

from __future__ import annotations

from collections.abc import Mapping

from agents.rendering.renderer import Renderer
from envs.checks import Verdict, fault, warning

#: Earlier turns of the model; a template must show them unchanged. They have no thinking, and no blanks at the ends.
_REPLIES = ("First I look at the figure: it has 3 sides.", "So the answer is 12.")
#: What stands between a model's turn and the next one of a role, by the token that closes a turn: ChatML (Qwen's models
#: and many others), and headers (Llama 3 and later).
FAMILIES: Mapping[str, str] = {
    "<|im_end|>": "<|im_end|>\n<|im_start|>{role}\n",
    "<|eot_id|>": "<|eot_id|><|start_header_id|>{role}<|end_header_id|>\n\n",
}


def check_conventions(renderer: Renderer, model_type: str) -> list[Verdict]:
    """Return a verdict for each departure of the template from what models of this type were trained on."""
    fix = "take chat_template.jinja from the model's own repository"
    is_qwen = model_type.startswith("qwen")
    if is_qwen and renderer.closer != "<|im_end|>":
        found = f"the template closes a turn with {renderer.closer}, models of type {model_type} with <|im_end|>"
        # If the tokenizer agrees, others may have trained the model on another form: DeepSeek's distilled Qwen.
        if renderer.closer == renderer.tokenizer.eos_token:
            return [warning(found, fix)]
        return [fault(found, fix)]
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _REPLIES[0]},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": _REPLIES[1]},
        {"role": "user", "content": "Sure?"},
    ]
    text = renderer.template.render(conversation)
    missing = [reply for reply in _REPLIES if reply not in text]
    if missing:
        found = f"the template rewrites what the model said in earlier turns: {missing[0]!r} is not shown again"
        why = "the model would be trained on other text than the template shows it in use; fix chat_template.jinja"
        return [fault(found, why)]
    verdicts = []
    shown = {"user": text.partition(_REPLIES[0])[2].partition("And?")[0], "assistant": text.rpartition("Sure?")[2]}
    for role, found in shown.items():
        wanted = FAMILIES.get(renderer.closer, "").format(role=role)
        if found.startswith(wanted):
            continue
        found = f"the template writes {found!r} before a turn of the {role}, the family {wanted!r}"
        # Models of other families have borrowed ChatML's tokens without its newline.
        if is_qwen or renderer.closer == "<|eot_id|>":
            verdicts.append(fault(found, fix))
        else:
            verdicts.append(warning(found, fix))
    return verdicts
