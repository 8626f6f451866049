"""Finds what the arguments of a started server depend on: GPUs, installed kernels, the checkpoint's longest stream.

SGLang and its kernels are not imported, and GPUs are asked through nvidia-smi: torch takes memory of each to answer.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Host:
    """This host as started servers see it.

    `generations` are the first numbers of the GPUs' compute capabilities, such as 9 for Hopper, where nvidia-smi tells.
    """

    num_gpus: int = 0
    generations: tuple[int, ...] = ()
    has_fa3: bool = False
    has_memory_saver: bool = False

    @classmethod
    @functools.cache
    def here(cls) -> Host:
        """Return what is here; asks once, because nvidia-smi takes up to a second."""
        import torch

        has_memory_saver = importlib.util.find_spec("torch_memory_saver") is not None
        return cls(torch.cuda.device_count(), _generations(), has_fa3(), has_memory_saver)


def text_config(model_path: str) -> dict[str, Any]:
    """Return the configuration of a checkpoint folder's decoder; {} for a hub id."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return {}
    return config.get("text_config", config)


def max_positions(model_path: str) -> int | None:
    """Return the tokens of the longest stream that a checkpoint folder was made for; None for a hub id."""
    return text_config(model_path).get("max_position_embeddings")


def state_bytes(text: Mapping[str, Any]) -> int:
    """Return the bytes of a stream's states in the layers of linear attention; 0 where there are none."""
    layers = (text.get("layer_types") or ()).count("linear_attention")
    if not layers:
        return 0
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    recurrent = 4 * values * text["linear_key_head_dim"]  # SGLang keeps them in float32
    window = 2 * (2 * keys + values) * (text["linear_conv_kernel_dim"] - 1)
    return layers * (recurrent + window)


def token_bytes(text: Mapping[str, Any]) -> int:
    """Return the bytes of a token's keys and values in bfloat16, in the layers with full attention."""
    layers = text["layer_types"].count("full_attention")
    return 2 * 2 * layers * text["num_key_value_heads"] * text["head_dim"]


def has_fa3() -> bool:
    """Return whether sgl_kernel is installed with its FlashAttention-3 kernels; imports nothing of it."""
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None:
        return False
    return any(list(Path(folder).glob("flash_ops*.so")) for folder in spec.submodule_search_locations or ())


def _generations() -> tuple[int, ...]:
    """Return the generations of the GPUs that this process sees; none without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", seen]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return tuple(int(line.partition(".")[0]) for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
