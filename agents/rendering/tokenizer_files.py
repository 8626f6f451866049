"""Reads what a renderer needs from a model folder or hub id: tokenizer, template, image processor, stop ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.model import STARTER_PATH
from agents.rendering.images import ImageStore
from envs.datasets.hub import check_is_there
from envs.errors import UserError, first_line


@dataclass(frozen=True, eq=False)
class TokenizerFiles:
    """What a renderer needs from a checkpoint; `images` is None for a language model."""

    tokenizer: Any
    images: ImageStore | None
    image_token: str
    stop_ids: tuple[int, ...]


def model_folder(name: str) -> str:
    """Return the model folder that a name stands for.

    "starter" is the model in the package, a run's folder stands for its weights, any other name is returned unchanged.

    Raises:
        UserError: the model in the package is missing.
    """
    if name != "starter":
        weights = Path(name) / "model"
        if (weights / "config.json").is_file():
            return str(weights)
        return name
    if STARTER_PATH.is_dir():
        return str(STARTER_PATH)
    raise UserError("--model", "the bundled starter model is missing", "starter", "give a checkpoint folder")


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Read tokenizer, chat template, image processor settings and end-of-turn ids.

    The ids are those of `generation_config.json` and `config.json` (its `text_config` too), the image token is that of
    `config.json`. A vision-language model's own `chat_template.json`, which older checkpoints have, takes precedence
    over the template of its tokenizer.

    Raises:
        UserError: there is no such model, no tokenizer, no chat template, no image processor though the model has a
            vision part, or one that cuts images in another way than the vision part reads them.
    """
    from transformers import AutoTokenizer

    check_is_there(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # None would ask on the terminal
        tokenizer("", add_special_tokens=False)  # settings such as a model_max_length of "4k" fail only here
    except Exception as error:  # Transformers raises OSError, ValueError, KeyError or TypeError for a missing file
        fix = f"add tokenizer.json ({first_line(error)})"
        raise UserError("--model", "must have a tokenizer", str(path), fix) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # Transformers silently makes an empty one
        raise UserError("--model", "must have a tokenizer", str(path), "add tokenizer.json")
    config = _read_json(path, "config.json")
    generation = _read_json(path, "generation_config.json")
    images = ImageStore.find(path)
    if images is not None:
        images.check_fits(config.get("vision_config"))
    elif "vision_config" in config:
        rule = "must have preprocessor_config.json, because it is a vision-language model"
        raise UserError("--model", rule, str(path), "add the file from the model's repository")
    # Transformers reads this file for a processor, not for a tokenizer alone.
    if images is not None and not _find(path, "chat_template.jinja"):
        tokenizer.chat_template = _read_json(path, "chat_template.json").get("chat_template") or tokenizer.chat_template
    if not isinstance(tokenizer.chat_template, str | dict) or not tokenizer.chat_template:
        raise UserError("--model", "must have a chat template", str(path), "add chat_template.jinja")
    return TokenizerFiles(tokenizer, images, _image_token(tokenizer, config), stop_ids(generation, config))


def _image_token(tokenizer: Any, config: Mapping[str, Any]) -> str:
    index = config.get("image_token_id")
    if not isinstance(index, int):
        return "<|image_pad|>"
    if not 0 <= index < len(tokenizer):
        rule = "must have a tokenizer with the image_token_id of its config.json"
        fix = "take both files of the model's repository"
        raise UserError("--model", rule, index, fix)
    return tokenizer.convert_ids_to_tokens(index) or "<|image_pad|>"


def stop_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return every `eos_token_id`, each of which may be an id, a list of ids or null.

    Raises:
        UserError: one is anything else.
    """
    found: list[Any] = []
    for config in configs:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                value = part.get("eos_token_id")
            else:
                value = None
            found.extend(value if isinstance(value, list) else [] if value is None else [value])
    for value in found:
        if type(value) is not int:
            fix = "take generation_config.json and config.json of the model's repository"
            raise UserError("--model", "must have token ids as its eos_token_id", value, fix)
    return tuple(dict.fromkeys(found))


def _find(path: str | Path, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    return cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def _read_json(path: str | Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no such file."""
    file = _find(path, name)
    if file is None:
        return {}
    try:
        value = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("--model", f"must have a readable {name}", str(path), f"fix it ({error})") from error
    if not isinstance(value, dict):
        raise UserError("--model", f"{name} must hold an object", str(path), "take the file of the model's repository")
    return value
