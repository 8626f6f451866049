"""What tests need of slime: dumps with exactly the structure that its `--save-debug-rollout-data` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agents.rendering.renderer import Renderer
from agents.types import EndReason, Trajectory
from envs.types import message_images

_STATUS = {
    EndReason.COMPLETED: "completed",
    EndReason.MAX_TURNS: "completed",
    EndReason.TOKEN_BUDGET: "truncated",
    EndReason.ABORTED: "aborted",
}


def slime_sample(t: Trajectory, renderer: Renderer, prompt: Any = None, **changes: Any) -> dict[str, Any]:
    """Return what `Sample.to_dict()` gives, as of August 2026, of a sample that went as our episode went.

    The prompt is the text that slime renders with --apply-chat-template, unless another is given.
    """
    response = t.ids_T[t.prompt_length :].tolist()
    if prompt is None:
        prompt = renderer.text([dict(m) for m in t.messages[: t.num_prompt_messages]], t.tools, t.num_prompt_messages)
    pictures = list(message_images([dict(message) for message in t.messages]))
    return {
        "group_index": t.group,
        "index": t.group * 8 + t.sample_index,
        "rollout_id": None,
        "prompt": prompt,
        "tokens": t.ids_T.tolist(),
        "multimodal_inputs": {"images": pictures, "videos": None} if pictures else None,
        "multimodal_train_inputs": {"pixel_values": torch.zeros(4, 8), "image_grid_thw": torch.tensor([[1, 2, 2]])},
        "multimodal_train_input_id": None,
        "apply_chat_template_kwargs": {},
        "response": renderer.tokenizer.decode(response, skip_special_tokens=False),
        "response_length": len(response),
        "label": t.label,
        "reward": t.reward,
        "loss_mask": t.mask_T[t.prompt_length :].astype(int).tolist(),
        "weight_versions": ["3"] * len(t.turns),
        "rollout_log_probs": t.logprobs_T[t.prompt_length :].tolist(),
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None,
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": _STATUS[t.end_reason],
        "metadata": dict(t.metadata),
        "generate_function_path": None,
        "custom_rm_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {
            "spec_accept_token_num": 0,
            "spec_draft_token_num": 0,
            "spec_verify_ct": 0,
            "completion_token_num": 0,
        },
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
        **changes,
    }


#: The fields of a sample in October 2025.
OLD_FIELDS = (
    "group_index", "index", "prompt", "tokens", "response", "response_length", "label", "reward", "loss_mask",
    "weight_versions", "rollout_log_probs", "status", "metadata", "train_metadata",
)  # fmt: skip


def save_dump(path: Path, samples: list[Any], rollout_id: int = 0) -> Path:
    """Write a dump; return its path."""
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path
