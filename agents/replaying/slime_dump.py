"""Reads the .pt files that slime saves with `--save-debug-rollout-data`.

Such a file holds `{"rollout_id": int, "samples": [...]}`; each sample is the output of slime's `Sample.to_dict()`, in
any version since July 2025 (later versions have more fields). `torch.load(weights_only=True)` reads it, which runs no
code from the file. Pillow's pictures are read through a stand-in class that takes only their pixels.
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
from envs.errors import UserError, did_you_mean, first_line
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
    """One valid sample of a dump; `where` names it in errors.

    `mask` and `logprobs` belong to the response, which is the end of `tokens`. `logprobs` and `reward` are None if the
    dump has none. `pictures` holds those of the prompt, then those of the environment's answers.
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


class _PickledPicture:
    """Stands in for Pillow's classes while a dump is read; it only keeps the pickled state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def picture(self, where: str) -> Image.Image:
        """Return the picture. Raises `UserError` if the pickled state is not a picture."""
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
    """Return the dumps at a path: a .pt file, or those in a folder; empty if the folder holds a recording.

    Example: `dump_files(Path("dumps"))` is `[Path("dumps/rollout_2.pt"), Path("dumps/rollout_10.pt")]`.
    """
    if path.suffix == ".pt":
        return [path]
    if not path.is_dir() or any((folder / MANIFEST).is_file() for folder in (path, path / "episodes")):
        return []
    return sorted(path.glob("*.pt"), key=lambda file: (len(file.name), file.name))


def read_dump(path: Path, reward_key: str = "") -> tuple[int, Iterator[DumpedSample]]:
    """Return the number of the rollout, and its samples; `reward_key` selects one of several rewards.

    Raises:
        UserError: the file is not such a dump, or holds objects that only code from the file could read. The iterator
            raises it for a sample that lacks a field or has lengths that do not match.
    """
    content = _load(path)
    if not isinstance(content, Mapping) or not isinstance(samples := content.get("samples"), list):
        got = ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
        rule = "must be a dump of --save-debug-rollout-data, with rollout_id and samples"
        raise UserError(
            str(path), rule, got, "give one from slime of July 2025 or later, and not of --save-debug-train-data"
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
    stand_ins: list[Any] = [(_PickledPicture, name) for name in _PICTURES]
    with torch.serialization.safe_globals(stand_ins):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            needed = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
            if not needed:
                raise UserError(str(path), "must be a dump of slime", str(error)[:100], "take a whole file") from error
            rule = "must hold plain values, tensors and pictures only, so that reading it runs no code from it"
            fix = "load it where slime wrote it, and save it again without them"
            raise UserError(str(path), rule, ", ".join(needed), fix) from error
        except (RuntimeError, EOFError, ValueError, OSError) as error:
            got = first_line(error)[:100]
            raise UserError(str(path), "must be a whole file of torch.save", got, "copy it again") from error


def _sample(where: str, given: Any, reward_key: str) -> DumpedSample:
    if not isinstance(given, Mapping):
        raise _invalid(where, "must be what Sample.to_dict() gives", type(given).__name__)
    missing = [name for name in ("prompt", "tokens", "response_length", "status") if name not in given]
    if missing:
        fix = did_you_mean(missing[0], map(str, given))
        raise UserError(where, f"must have {' and '.join(missing)}", ", ".join(map(str, list(given)[:8])), fix)
    tokens = _numbers(given["tokens"], _token, f"{where} tokens")
    length = given["response_length"]
    if not isinstance(length, int) or not 0 <= length <= len(tokens):
        raise _invalid(f"{where} response_length", f"must be from 0 to the {len(tokens)} tokens", length)
    mask = _numbers(given.get("loss_mask"), int, f"{where} loss_mask") if given.get("loss_mask") else (1,) * length
    logprobs = given.get("rollout_log_probs")
    logprobs = _numbers(logprobs, float, f"{where} rollout_log_probs") if logprobs else None
    for name, values in (("loss_mask", mask), ("rollout_log_probs", logprobs)):
        if values is not None and len(values) != length:
            rule = f"must have one for each of the {length} tokens of the response"
            raise _invalid(f"{where} {name}", rule, len(values))
    if given["status"] not in _STATUSES:
        raise _invalid(f"{where} status", f"must be one of {', '.join(_STATUSES)}", given["status"])
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
        pictures=tuple(each.picture(f"{where} multimodal_inputs") for each in _pickled_pictures(images)),
    )


def _pickled_pictures(value: Any) -> Iterator[_PickledPicture]:
    """Yield the pictures in a list, a message or another plain value, in order."""
    if isinstance(value, _PickledPicture):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _pickled_pictures(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pickled_pictures(item)


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages with their pictures decoded."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in value
    ):
        raise _invalid(f"{where} prompt", "must be a text or a list of messages", repr(value)[:100])

    def whole(item: Any) -> Any:
        if isinstance(item, _PickledPicture):
            return item.picture(f"{where} prompt")
        if isinstance(item, Mapping):
            return {key: whole(each) for key, each in item.items()}
        return [whole(each) for each in item] if isinstance(item, list | tuple) else item

    return [whole(each) for each in value]


def _invalid(field: str, rule: str, got: object) -> UserError:
    return UserError(field, rule, got, "take slime's own dump")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and abs(value) < 2**63


def _token(value: Any) -> int:
    if not _is_whole(number := int(value)):
        raise OverflowError(f"{number} is not a token id")
    return number


def _numbers(value: Any, kind: Callable[[Any], V], where: str) -> tuple[V, ...]:
    """Convert a list or tensor of numbers, or a list of tensors with one number each."""
    try:
        return tuple(map(kind, value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _invalid(where, "must be a list of numbers", repr(value)[:100]) from error


def _reward(value: Any, key: str, where: str) -> float | None:
    """Return a sample's reward: the number, or the one that `key` names; None if the sample has none."""
    if isinstance(value, Mapping):
        names = [str(name) for name, each in value.items() if _is_number(each)]
        chosen = key or (names[0] if len(names) == 1 else "")
        if chosen not in names:
            fix = f"name one with --reward-key, as in slime's own: {', '.join(names) or 'there is none'}"
            raise UserError(where, "must be a number, or have one under --reward-key", key or ", ".join(names), fix)
        value = value[chosen]
    if value is None:
        return None
    if not _is_number(value):
        raise _invalid(where, "must be a number", repr(value)[:100])
    return float(value)


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, Real) or (type(value).__name__ == "Tensor" and value.numel() == 1)
    return is_scalar and abs(float(value)) < float("inf")
