"""Reads what slime saves with `--save-debug-rollout-data`: a .pt file in, its samples in a form of our own out.

Such a file holds `{"rollout_id": int, "samples": [...]}`, each sample as slime's `Sample.to_dict()` gives it, in all
versions since July 2025; fields have come on since. It is read with `torch.load(weights_only=True)`, which runs no code
of the file; a stand-in takes the pixels of Pillow's pictures.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from PIL import Image

from agents.recording.schema import MANIFEST
from envs.errors import UserError, did_you_mean
from envs.images import MAX_PIXELS

V = TypeVar("V")

_STATUSES = ("pending", "completed", "truncated", "aborted", "failed")
_MODES = {"1", "L", "P", "RGB", "RGBA", "CMYK", "LA"}
_PICTURES = (
    "PIL.Image.Image",
    "PIL.JpegImagePlugin.JpegImageFile",
    "PIL.PngImagePlugin.PngImageFile",
    "PIL.WebPImagePlugin.WebPImageFile",
)


@dataclass(frozen=True, eq=False)
class DumpedSample:
    """One sample of a dump, checked; `where` names it in errors.

    `mask` and `logprobs` belong to the response, the last tokens; `logprobs` and `reward` are None where the dump has
    none. `pictures` are those of the prompt, then those that the environment has shown.
    """

    where: str
    group: int | None
    prompt: str | Sequence[Mapping[str, Any]]
    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    response: str
    label: str | None
    reward: float | None
    status: str
    metadata: Mapping[str, Any]
    weight_versions: tuple[str, ...]
    pictures: tuple[Image.Image, ...]

    @property
    def prompt_length(self) -> int:
        """How many tokens the prompt has."""
        return len(self.tokens) - len(self.mask)


class _Pickled:
    """Stands in for a picture while a dump is read: keeps what was pickled, and does nothing with it."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def picture(self, where: str) -> Image.Image:
        """Return the picture. Raises `UserError` where what was pickled is none."""
        state: Any = vars(self).get("state")
        try:
            _, mode, size, palette, pixels, *_ = state
            width, height = size
            if mode not in _MODES or not 0 < width * height <= MAX_PIXELS:
                raise ValueError(f"{mode} of {width}x{height} pixels")
            image = Image.frombytes(mode, (width, height), pixels)
            if mode == "P" and palette:
                image.putpalette(palette)
            return image.convert("RGB")
        except (TypeError, ValueError) as error:
            raise UserError(where, "must be a picture", f"{error}"[:100], "take the dump as slime wrote it") from error


def dump_files(path: Path) -> list[Path]:
    """Return the dumps that a path means: a .pt file, or all of a folder that holds no recording; empty where none.

    Example: `dump_files(Path("dumps"))` is `[Path("dumps/rollout_2.pt"), Path("dumps/rollout_10.pt")]`.
    """
    if path.suffix == ".pt":
        return [path]
    if not path.is_dir() or any((folder / MANIFEST).is_file() for folder in (path, path / "episodes")):
        return []
    return sorted(path.glob("*.pt"), key=lambda file: (len(file.name), file.name))


def read_dump(path: Path, reward_key: str = "") -> tuple[int, Iterator[DumpedSample]]:
    """Return the number of the rollout, and its samples; `reward_key` says which reward counts where it has several.

    Raises:
        UserError: the file is no such dump, or holds objects that cannot be read without running code; while samples
            are taken: one of them lacks something, or does not fit together.
    """
    content = _load(path)
    if not isinstance(content, Mapping) or not isinstance(samples := content.get("samples"), list):
        got = ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
        rule = "must be a dump of --save-debug-rollout-data, with rollout_id and samples"
        raise UserError(
            str(path), rule, got, "take one of slime from July 2025 or later, and none of --save-debug-train-data"
        )
    number = content.get("rollout_id")
    where = [f"{path} sample {place}" for place in range(len(samples))]
    pairs = zip(where, samples, strict=True)
    return number if _is_whole(number) else 0, (_sample(name, sample, reward_key) for name, sample in pairs)


def _load(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        fix = "install it, or convert the dump on a machine that has it (--convert)"
        raise UserError(str(path), "needs torch to be read", "none", fix) from error
    if not zipfile.is_zipfile(path):
        got = "another file" if path.is_file() else "no such file"
        raise UserError(str(path), "must be a file of torch.save", got, "give a dump of --save-debug-rollout-data")
    stand_ins: list[Any] = [(_Pickled, name) for name in _PICTURES]
    with torch.serialization.safe_globals(stand_ins):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            needed = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
            if not needed:
                raise UserError(str(path), "must be a dump of slime", str(error)[:100], "take a whole file") from error
            rule = "must hold plain values, tensors and pictures only, so that reading it runs no code of its own"
            fix = "where slime wrote it, load it and save it again without them"
            raise UserError(str(path), rule, ", ".join(needed), fix) from error
        except (RuntimeError, EOFError, ValueError, OSError) as error:
            first = f"{error}".split("\n")[0][:100]
            raise UserError(str(path), "must be a whole file of torch.save", first, "copy it again") from error


def _sample(where: str, given: Any, reward_key: str) -> DumpedSample:
    if not isinstance(given, Mapping):
        raise UserError(where, "must be what Sample.to_dict() gives", type(given).__name__, "take slime's own dump")
    missing = [name for name in ("prompt", "tokens", "response_length", "status") if name not in given]
    if missing:
        fix = did_you_mean(missing[0], map(str, given))
        raise UserError(where, f"must have {' and '.join(missing)}", ", ".join(map(str, list(given)[:8])), fix)
    tokens = _numbers(given["tokens"], _token, f"{where} tokens")
    length = given["response_length"]
    if not isinstance(length, int) or not 0 <= length <= len(tokens):
        rule = f"must be from 0 to the {len(tokens)} tokens"
        raise UserError(f"{where} response_length", rule, length, "take slime's own dump")
    mask = _numbers(given.get("loss_mask"), int, f"{where} loss_mask") if given.get("loss_mask") else (1,) * length
    logprobs = given.get("rollout_log_probs")
    logprobs = _numbers(logprobs, float, f"{where} rollout_log_probs") if logprobs else None
    for name, values in (("loss_mask", mask), ("rollout_log_probs", logprobs)):
        if values is not None and len(values) != length:
            rule = f"must have one for each of the {length} tokens of the response"
            raise UserError(f"{where} {name}", rule, len(values), "take slime's own dump")
    if given["status"] not in _STATUSES:
        raise UserError(
            f"{where} status", f"must be one of {', '.join(_STATUSES)}", given["status"], "take slime's own dump"
        )
    prompt, metadata, label = given["prompt"], given.get("metadata"), given.get("label")
    group, versions = given.get("group_index"), given.get("weight_versions")
    inputs = given.get("multimodal_inputs")
    images = inputs.get("images") if isinstance(inputs, Mapping) else None
    return DumpedSample(
        where=where,
        group=group if _is_whole(group) else None,
        prompt=prompt if isinstance(prompt, str) else _messages(prompt, where),
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        response=str(given.get("response") or ""),
        label=label if label is None or isinstance(label, str) else str(label),
        reward=_reward(given.get("reward"), reward_key, f"{where} reward"),
        status=given["status"],
        metadata=metadata if isinstance(metadata, Mapping) else {},
        weight_versions=tuple(map(str, versions)) if isinstance(versions, list | tuple) else (),
        pictures=tuple(each.picture(f"{where} multimodal_inputs") for each in _pickled(images)),
    )


def _pickled(value: Any) -> Iterator[_Pickled]:
    """Yield the pictures of a list, a message or any other plain value, in order."""
    if isinstance(value, _Pickled):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _pickled(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pickled(item)


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages with the pictures in them that the dump has."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in value
    ):
        raise UserError(
            f"{where} prompt", "must be a text or a list of messages", repr(value)[:100], "take slime's own dump"
        )

    def whole(item: Any) -> Any:
        if isinstance(item, _Pickled):
            return item.picture(f"{where} prompt")
        if isinstance(item, Mapping):
            return {key: whole(each) for key, each in item.items()}
        return [whole(each) for each in item] if isinstance(item, list | tuple) else item

    return [whole(each) for each in value]


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and abs(value) < 2**63


def _token(value: Any) -> int:
    if not _is_whole(number := int(value)):
        raise OverflowError(f"{number} is no token")
    return number


def _numbers(value: Any, kind: Callable[[Any], V], where: str) -> tuple[V, ...]:
    """Return a list or tensor of numbers, or a list of tensors of one number each."""
    try:
        return tuple(map(kind, value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(where, "must be a list of numbers", repr(value)[:100], "take slime's own dump") from error


def _reward(value: Any, key: str, where: str) -> float | None:
    """Return a sample's reward: the number, or the one that a key names; None where the sample has none."""
    if isinstance(value, Mapping):
        names = [str(name) for name, each in value.items() if _is_number(each)]
        chosen = key or (names[0] if len(names) == 1 else "")
        if chosen not in names:
            fix = f"name one with --reward-key, as slime was told: {', '.join(names) or 'there is none'}"
            raise UserError(where, "must be a number, or have one under --reward-key", key or ", ".join(names), fix)
        value = value[chosen]
    if value is None:
        return None
    if not _is_number(value):
        raise UserError(where, "must be a number", repr(value)[:100], "take slime's own dump")
    return float(value)


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, Real) or (type(value).__name__ == "Tensor" and value.numel() == 1)
    return is_scalar and abs(float(value)) < float("inf")
