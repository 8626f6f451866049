"""Claims about model folders of strangers: a strange file is one error that names it, or changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.model import STARTER_PATH
from agents.model.architectures import ModelFacts
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from envs.errors import UserError
from trainer.learner.weights_io import empty_model, load_weights

CONFIG, GENERATION, PROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"
WEIGHTS, INDEX, TEMPLATE = "model.safetensors", "model.safetensors.index.json", "chat_template.jinja"
DEEP = "[" * 100_000
Change = Callable[[Path], Any]


def edited(name: str, *keys: str, to: object) -> Change:
    """Return a change of one value of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        section = content
        for key in keys[:-1]:
            section = section[key]
        section[keys[-1]] = to
        written(name, json.dumps(content))(folder)

    return change


def written(name: str, text: str | bytes) -> Change:
    """Return a change that replaces a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def piped(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def several(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder with links to the files of the starter."""
    for file in STARTER_PATH.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def read_all(folder: Path) -> None:
    """Read a checkpoint as evaluations and runs do."""
    ModelFacts.load(folder)
    Renderer.from_checkpoint(folder)
    PolicyModel.load(folder)
    load_weights(empty_model(folder), folder, torch.device("cpu"))


text = partial(edited, CONFIG, "text_config")
vision = partial(edited, CONFIG, "vision_config")
processor = partial(edited, PROCESSOR)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (written(CONFIG, "null"), "Transformers can read"),
        (text("vocab_size", to=-1), "Transformers can read"),
        (text("vocab_size", to="768"), "vocab_size' expected int"),
        (text("num_hidden_layers", to=10**9), "at most 10000 layers, got 1000000006"),
        (text("num_hidden_layers", to=5), "none named model.language_model.layers.4"),
        (text("num_attention_heads", to=0), "ZeroDivisionError"),
        (text("hidden_act", to="__import__"), "KeyError: '__import__'"),
        (text("rope_parameters", "rope_theta", to="x"), "Transformers can read"),
        (text("rms_norm_eps", to=0), "rms_norm_eps' expected float"),
        (edited(CONFIG, "text_config", to=[]), "Transformers can read"),
        (edited(CONFIG, "architectures", to=5), "Transformers can read"),
        (edited(CONFIG, "dtype", to="float99"), "Transformers can read"),
        (edited(CONFIG, "image_token_id", to=-3), "image_token_id -3"),
        (edited(CONFIG, "image_token_id", to=10**6), "image_token_id of its config.json, got 1000000"),
        (vision("patch_size", to=14), "patch_size of its config.json, 14"),
        (vision("spatial_merge_size", to=4), "spatial_merge_size of its config.json, 4"),
        (edited(GENERATION, "eos_token_id", to=[[759]]), "token ids as its eos_token_id, got [759]"),
        (edited(GENERATION, "eos_token_id", to=["x"]), "token ids as its eos_token_id, got x"),
        (written(GENERATION, DEEP), "readable generation_config.json"),
        (written(PROCESSOR, DEEP), "readable preprocessor_config.json"),
        (written(PROCESSOR, b"\xff\xfe"), "readable preprocessor_config.json"),
        (processor("patch_size", to=14), "patch_size of its config.json, 16"),
        (processor("merge_size", to=1), "spatial_merge_size of its config.json, 2"),
        (processor("temporal_patch_size", to=3), "temporal_patch_size of its config.json, 2"),
        (processor("image_std", to=[0, 0, 0]), "numbers that are not finite"),
        (processor("image_mean", to=[float("nan")] * 3), "numbers that are not finite"),
        (processor("rescale_factor", to=1e300), "numbers that are not finite"),
        (edited("tokenizer_config.json", "model_max_length", to="4k"), "must have a tokenizer"),
        (several(removed(TEMPLATE), written("chat_template.json", '{"chat_template": 5}')), "have a chat template"),
        (written(WEIGHTS, (10**15).to_bytes(8, "little") + b"{}"), "header too large"),
        (several(removed(WEIGHTS), written("pytorch_model.bin", b"cos\nsystem\n(S'true'\ntR.")), "UnpicklingError"),
        (several(removed(WEIGHTS), written(INDEX, '{"weight_map": {"a": "../../x"}}')), "Transformers can read"),
    ],
)  # fmt: skip
def test_a_strange_file_of_a_model_is_one_error(change: Change, words: str, model: Path) -> None:
    change(model)
    with pytest.raises(UserError) as caught:
        read_all(model)
    assert str(caught.value).startswith("--model: ")
    assert words in str(caught.value)


def test_a_pipe_in_place_of_a_file_that_may_be_missing_changes_nothing(model: Path) -> None:
    piped(GENERATION, model)
    read_all(model)
    assert Renderer.from_checkpoint(model).stop_ids == Renderer.from_checkpoint(STARTER_PATH).stop_ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (partial(piped, WEIGHTS), "must hold model.safetensors"),
        (several(removed(WEIGHTS), written(INDEX, '{"weight_map": 5}')), "readable model.safetensors.index.json"),
        (several(removed(WEIGHTS), written(INDEX, DEEP)), "readable model.safetensors.index.json"),
    ],
)
def test_the_weights_that_a_run_reads_are_regular_files(change: Change, words: str, model: Path) -> None:
    change(model)
    with pytest.raises(UserError, match=words):
        load_weights(empty_model(model), model, torch.device("cpu"))
