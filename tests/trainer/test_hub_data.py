r"""Claims about the data sets that slime, RLinf and verl train geometry on: their rows load, pass the check and train.

The files here are small and in the form that those projects' scripts, pages and loaders describe: slime's
`geo3k_imgurl` (images as data URIs) and `geo3k_imgurl_processed` (messages, with tools in the metadata), RLinf's
`geo3k` (images as bytes, labels in `\boxed{}`), and what verl's preprocessing writes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from envs.check import run as check
from envs.datasets.prompts import DataKeys
from envs.datasets.samples import load_samples
from envs.geo3k.procedural import ProceduralGeo3k
from envs.types import message_images, plain_text
from tests.recordings import episodes_in, lines_of
from trainer.run import run

PROBLEMS = [ProceduralGeo3k("train", 4, seed=11)[index] for index in range(4)]
TOOL = {
    "type": "function",
    "function": {
        "name": "calc_score",
        "description": "Score an answer.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}


def problem(index: int) -> tuple[str, str, bytes]:
    """Return text, label and image of a problem as those data sets have them."""
    sample = PROBLEMS[index]
    (image,) = message_images(sample.prompt)
    buffer = BytesIO()
    image.save(buffer, "PNG")
    text = "".join(plain_text(message) for message in sample.prompt if message["role"] == "user")
    return text, str(sample.label), buffer.getvalue()


def imgurl(index: int) -> dict[str, Any]:
    text, label, image = problem(index)
    return {"problem": text, "answer": label, "images": [data_uri(image)]}


def imgurl_processed(index: int) -> dict[str, Any]:
    text, label, image = problem(index)
    messages = [{"role": "system", "content": "Think step by step."}, {"role": "user", "content": text}]
    metadata = {"tools": [TOOL], "source": "geo3k"}
    return {"problem": messages, "answer": label, "images": [data_uri(image)], "metadata": metadata}


def rlinf(index: int) -> dict[str, Any]:
    text, label, image = problem(index)
    return {"problem": text, "images": [image], "answer": rf"\boxed{{{label}}}"}


def verl(index: int) -> dict[str, Any]:
    text, label, image = problem(index)
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": text}],
        "images": [{"bytes": image, "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": label},
        "extra_info": {"split": "train", "index": index, "answer": label, "question": text},
    }


def data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


FORMS: dict[str, tuple[Callable[[int], dict[str, Any]], DataKeys]] = {
    "imgurl": (imgurl, DataKeys()),
    "imgurl_processed": (imgurl_processed, DataKeys()),
    "rlinf": (rlinf, DataKeys()),
    "verl": (verl, DataKeys(prompt="prompt", answer="reward_model.ground_truth")),
}


def parquet(folder: Path, make: Callable[[int], dict[str, Any]]) -> str:
    """Write four rows; return the file."""
    rows = [make(index) for index in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return str(folder / "train.parquet")


def train(env: str, checkpoint: Path, folder: Path, *argv: str) -> None:
    """Train a step of two problems, two episodes each; check what it leaves."""
    small = ["--steps", "1", "--problems-per-step", "2", "--group-size", "2", "--max-new-tokens", "16"]
    lengths = ["--max-prompt-tokens", "3000", "--tracker", "", "--doctor", "off"]
    place = ["--out", str(folder), "--name", "run", "--model", str(checkpoint)]
    assert run(["--env", env, *argv, *small, *lengths, *place]) == 0
    (step,) = lines_of(folder / "run" / "metrics.jsonl")
    assert step["num_tokens"] > 0 and step["rollout_train_kl"] < 1e-6
    episodes = episodes_in(folder / "run")
    assert len(episodes) == 4
    assert {episode["label"] for episode in episodes} <= {sample.label for sample in PROBLEMS}


@pytest.mark.parametrize("form", FORMS)
def test_the_rows_of_the_seeds_data_sets_load_pass_the_check_and_train_a_step(
    form: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, keys = FORMS[form]
    source = parquet(tmp_path, make)
    env = "geo3k_single" if form == "imgurl" else "geo3k"
    columns = ["--data", source, "--prompt-key", keys.prompt, "--answer-key", keys.answer]

    samples = [*load_samples(source, keys=keys)]
    assert [sample.label for sample in samples] == [sample.label for sample in PROBLEMS]
    for sample, made in zip(samples, PROBLEMS, strict=True):
        (mine,), (theirs,) = message_images(sample.prompt), message_images(made.prompt)
        assert mine.tobytes() == theirs.convert("RGB").tobytes()
        assert plain_text(sample.prompt[-1]).startswith("<image>")

    assert check([env, *columns, "--samples", "2"]) == 0, capsys.readouterr().out
    train(env, checkpoint, tmp_path, *columns)


def test_tools_in_the_metadata_of_slimes_rows_reach_the_environment_as_a_list(tmp_path: Path) -> None:
    (sample, *_) = load_samples(parquet(tmp_path, imgurl_processed))
    assert sample.metadata == {"tools": [TOOL], "source": "geo3k"}
    assert [message["role"] for message in sample.prompt] == ["system", "user"]


def test_labels_in_a_box_are_unwrapped(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "answer": answer}
        for answer in (r"\boxed{\frac{1}{2}}", r"\boxed{1} or \boxed{2}", r"\boxed{ 3 }")
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    labels = [sample.label for sample in load_samples(str(tmp_path / "rows.json"))]
    assert labels == [r"\frac{1}{2}", r"\boxed{1} or \boxed{2}", "3"]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "IMAGE"},
        {"type": "image", "url": "IMAGE"},
        {"type": "image_url", "image_url": {"url": "IMAGE"}},
        {"type": "image", "image": {"bytes": "BYTES", "path": None}},
    ],
)
def test_images_in_the_parts_of_a_chat_prompt_load_from_every_file_format(
    part: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    buffer = BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    filled = json.loads(json.dumps(part).replace("IMAGE", data_uri(buffer.getvalue())).replace("BYTES", encoded))
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, filled, {"type": "text", "text": " What?"}]},
    ]
    file, rows = tmp_path / f"rows.{suffix}", [{"problem": messages, "answer": "1"}]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows[0] if suffix == "jsonl" else rows))
    (sample,) = load_samples(str(file), system_prompt="Ours.")
    assert sample.prompt[0] == {"role": "system", "content": "Ours.\n\nBe brief."}
    before, image, after = sample.prompt[1]["content"]
    assert (before["text"], image["image"].getpixel((0, 0)), after["text"]) == ("Look: ", (255, 0, 0), " What?")
