"""Loads a checkpoint into a sharded network: each rank reads only the rows that it keeps.

`empty_model` makes the network without values. The learner shards it. `load_weights` then fills it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agents.model.architectures import read_config
from agents.model.policy import PolicyModel
from envs.config.text_files import MODEL_BYTES, read_text
from envs.errors import UserError, first_line
from trainer.learner.lora import initial_adapter, is_adapter, plain_name

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def empty_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """Return the network of a checkpoint, with parameters of `dtype` on the meta device and real buffers.

    After `load_weights` it equals `PolicyModel.load(path, dtype)`.

    Raises:
        UserError: the path is no checkpoint, or its architecture is not supported.
    """
    from transformers import GenerationConfig

    config = read_config(path)
    model = meta_model(config, dtype)
    backbone: Any = model.backbone
    config.name_or_path = str(path)
    with contextlib.suppress(OSError):  # without the file, the default of the network's configuration stays
        backbone.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def meta_model(config: Any, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """Return the network of a Transformers configuration, with parameters on the meta device: it takes no memory.

    Raises `UserError` if its architecture is not supported.
    """
    from accelerate import init_empty_weights

    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = dtype
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # networks create parameters in the default dtype, but for explicit float32 ones
    try:
        with init_empty_weights(include_buffers=False):
            model = PolicyModel.from_config(config)
    finally:
        torch.set_default_dtype(default)
    backbone: Any = model.backbone
    backbone.tie_weights()  # the move to the meta device has split a shared parameter in two
    return model


def load_weights(
    model: PolicyModel,
    path: str | Path,
    device: torch.device | str,
    weights_device: torch.device | str | None = None,
    seed: int = 0,
) -> None:
    """Fill every parameter of a network, sharded by `fully_shard` or not, from a checkpoint's safetensors files.

    Parameters on the meta device get memory on `weights_device`, which is `device` unless a `CPUOffloadPolicy` keeps
    shards on the CPU; other parameters are filled where they are. Buffers move to `device`. Values are cast to the
    parameter's dtype. The adapters of `trainer.learner.lora`, which no checkpoint has, get their first values from
    `seed`.

    A rank reads only the rows of its own shards, straight from the mapped files.

    Raises:
        UserError: there are no safetensors files, or a parameter is missing or has another shape.
    """
    _materialise(model, torch.device(device if weights_device is None else weights_device), torch.device(device))
    source = CheckpointTensors(path)
    with torch.no_grad():
        for names, parameter in _named(model):
            if isinstance(parameter, DTensor):
                rows = parameter.to_local()
            else:
                rows = parameter
            start, end = local_rows(parameter)
            if is_adapter(names[0]):
                rows.copy_(initial_adapter(names[0], parameter.shape, seed)[start:end])
                continue
            own = [plain_name(name).removeprefix("backbone.") for name in names]
            saved = [model.architecture.saved_name(name) for name in own]
            # A tied weight has two names, and a checkpoint holds it under either; some have the names of the network.
            name = next((name for name in (*saved, *own) if name in source), None)
            rule = f"must hold a tensor {saved[0]} of shape {tuple(parameter.shape)}"
            fix = "give a complete checkpoint of the network that its config.json describes"
            if name is None:
                raise UserError("--model", rule, f"none in {source.folder}", fix)
            found = model.as_in_memory(name, torch.empty(source.shape(name), device="meta"))
            if found.shape != parameter.shape:
                raise UserError("--model", rule, f"shape {source.shape(name)} in {source.folder}", fix)
            # A small tensor has fewer rows than there are ranks.
            if start < end or not parameter.dim():
                rows.copy_(model.as_in_memory(name, source.rows(name, start, end)))


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """Return the rows of this rank's shard, from first to last + 1; shards are cut as `torch.chunk` cuts.

    A tensor of 5 rows on 4 ranks: (0, 2), (2, 4), (4, 5), (5, 5). A scalar has one row.
    """
    count = parameter.shape[0] if parameter.dim() else 1
    if not isinstance(parameter, DTensor):
        return 0, count
    [chunk] = parameter.__create_chunk_list__()  # torch's own checkpoints ask for it
    shape = tuple(parameter.shape)
    assert chunk.sizes[1:] == shape[1:], f"sharded by rows only: {chunk} of {shape}"
    if not parameter.dim():
        return 0, count
    return chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]


def _named(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Return each parameter once, with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [(each, parameter) for parameter, each in names.items()]


def _materialise(model: nn.Module, weights_device: torch.device, device: torch.device) -> None:
    """Replace parameters on the meta device by uninitialised ones, keep sharing, and move buffers.

    `nn.Module.to_empty` would lose the values of buffers, and the sharing of a parameter by two modules.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=weights_device)
                    made[parameter] = nn.Parameter(empty, parameter.requires_grad)
                # Modules that shared a parameter share the new one.
                setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to(device))


class CheckpointTensors:
    """Reads rows of the tensors in a checkpoint's safetensors files, without loading the rest.

    A tensor of all experts of a layer may lie there whole, or as tensors of each expert, which are put together here:
    Transformers 5 writes Qwen3.5's mixtures so.

    Example::

        tensors = CheckpointTensors(Path("path/to/checkpoint"))
        tensors.rows("model.visual.patch_embed.proj.bias", 0, 8)
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = str(path)
        self._file_of: dict[str, Any] = {}
        for file in weight_files(path):
            try:
                # Opening maps the file: only rows that are asked for are read.
                opened = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                rule = "must be a folder of whole safetensors files"
                raise UserError("--model", rule, f"{file} ({error})", "copy the file again") from error
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def __contains__(self, name: str) -> bool:
        parts = _parts_of_expert(name, 0)
        return name in self._file_of or (bool(parts) and self._file_of.keys() >= set(parts))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; of experts, only those before the first that lacks a part are counted."""
        if name in self._file_of:
            return self._shape(name)
        parts = _parts_of_expert(name, 0)
        shape = self._shape(parts[0])
        count = 0
        while all(part in self._file_of and self._shape(part) == shape for part in _parts_of_expert(name, count)):
            count += 1
        num_rows = [len(parts) * size for size in shape[:1]]  # none of a scalar, which only a damaged file has
        return (count, *num_rows, *shape[1:])

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Return rows of a tensor; a scalar is returned whole."""
        if name not in self._file_of:
            experts = (_parts_of_expert(name, number) for number in range(start, end))
            return torch.stack([torch.cat([self._slice(part)[:] for part in parts]) for parts in experts])
        if self._shape(name):
            return self._slice(name)[start:end]
        return self._file_of[name].get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._file_of[name].get_slice(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())


def _parts_of_expert(name: str, number: int) -> Sequence[str]:
    """Return the tensors of one expert in a tensor of all experts, one above the other; none for another tensor.

    >>> _parts_of_expert("layers.0.mlp.experts.gate_up_proj", 7)
    ['layers.0.mlp.experts.7.gate_proj.weight', 'layers.0.mlp.experts.7.up_proj.weight']
    """
    experts, _, kind = name.rpartition(".")
    if not experts.endswith(".experts"):
        return []
    parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(kind, [])
    return [f"{experts}.{number}.{part}.weight" for part in parts]


def weight_files(path: str | Path) -> Sequence[Path]:
    """Return the safetensors files of a folder or hub id: the single file, or the files that the index names."""
    from huggingface_hub import snapshot_download

    folder = Path(path)
    if not folder.is_dir():
        # Not the pickles of a repository: they could run code.
        folder = Path(snapshot_download(str(path), allow_patterns=["model*.safetensors", _INDEX]))
    files = [folder / _WEIGHTS]
    if not files[0].exists() and (folder / _INDEX).exists():
        try:
            index = json.loads(read_text(folder / _INDEX, _INDEX, MODEL_BYTES))
            files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            rule, fix = f"must have a readable {_INDEX}", "take the file of the model's repository"
            raise UserError("--model", rule, first_line(error), fix) from error
    for file in files:
        if not file.is_file():
            fix = "give a checkpoint in safetensors files"
            raise UserError("--model", f"must hold {file.name}", f"no such file in {folder}", fix)
    return files
