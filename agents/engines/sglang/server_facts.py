"""Finds what the arguments of a started server depend on: GPUs, installed kernels, the checkpoint's sizes.

SGLang and its kernels are not imported, and GPUs are asked through nvidia-smi: torch takes memory of each to answer.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: By the names that config.json uses.
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it. Example: `Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_520_809_984)`."""

    name: str
    capability: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True)
class Host:
    """This host as started servers see it: its GPUs, as far as they are known, and the packages that are installed."""

    num_gpus: int = 0
    gpus: tuple[Gpu, ...] = ()
    has_fa3: bool = False
    has_memory_saver: bool = False

    @classmethod
    @functools.cache
    def here(cls) -> Host:
        """Return what is here; asks once, because nvidia-smi takes up to a second."""
        import torch

        count = torch.cuda.device_count()
        if count:
            gpus = _list_gpus() or tuple(map(_ask_torch, range(count)))
        else:
            gpus = ()
        return cls(count, gpus, has_fa3(), importlib.util.find_spec("torch_memory_saver") is not None)


@dataclass(frozen=True)
class ServedModel:
    """What config.json and the weight files say: whether the model reads images, and its sizes as it is served."""

    reads_images: bool
    max_positions: int
    weight_bytes: int
    token_bytes: int

    @classmethod
    def read(cls, path: str | Path, dtype: str) -> ServedModel | None:
        """Return the facts of a checkpoint folder served in `dtype`; None where they are not known (a hub id)."""
        folder = Path(path)
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            text: dict[str, Any] = config.get("text_config") or config
            heads = int(text["num_attention_heads"])
            head_dim = int(text.get("head_dim") or text["hidden_size"] // heads)
            values = 2 * int(text["num_hidden_layers"]) * int(text.get("num_key_value_heads") or heads) * head_dim
            names = [text.get("dtype"), text.get("torch_dtype"), config.get("dtype"), config.get("torch_dtype")]
            stored = next((VALUE_BYTES[name] for name in names if name in VALUE_BYTES), 2)
            file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            return cls(
                reads_images="vision_config" in config,
                max_positions=int(text["max_position_embeddings"]),
                weight_bytes=file_bytes * VALUE_BYTES[dtype] // stored,
                token_bytes=values * VALUE_BYTES[dtype],
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None


def has_fa3() -> bool:
    """Return whether sgl_kernel is installed with its FlashAttention-3 kernels; imports nothing of it."""
    spec = importlib.util.find_spec("sgl_kernel")
    if spec:
        folders = spec.submodule_search_locations
    else:
        folders = None
    return any(list(Path(folder).glob("flash_ops*.so")) for folder in folders or ())


def _list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees; none without nvidia-smi."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, *(["-i", seen] if seen else [])], capture_output=True, text=True, timeout=20, check=True
        )
        return tuple(parse_gpu(line) for line in done.stdout.strip().splitlines())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _ask_torch(index: int) -> Gpu:
    """Return a GPU as torch describes it, which takes some hundred MiB of it."""
    import torch

    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, (found.major, found.minor), found.total_memory)


def parse_gpu(line: str) -> Gpu:
    """Parse a line of nvidia-smi.

    >>> parse_gpu("NVIDIA H100 80GB HBM3, 9.0, 81559")
    Gpu(name='NVIDIA H100 80GB HBM3', capability=(9, 0), num_bytes=85520809984)
    """
    name, capability, mebibytes = (part.strip() for part in line.split(","))
    major, minor = capability.split(".")
    return Gpu(name, (int(major), int(minor)), int(mebibytes) * 2**20)
