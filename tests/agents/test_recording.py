"""Claims about recorded episodes: nothing is lost, pictures are kept once, and whatever was said stays data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agents.recording import Recorder
from tests.builders import picture, question, trajectory, turn


def recorded(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def test_the_stream_is_read_back_as_it_was(tmp_path: Path) -> None:
    played = trajectory([5, 6, 7, 8], [0, 1, 0, 1], [0, -0.25, 0, -1.5], reward=0.5)
    with Recorder(tmp_path, env="geo3k") as recorder:
        recorder.write(played, step=3, phase="train", advantage=-0.7)
    (line,) = recorded(tmp_path)
    assert line["ids"] == [5, 6, 7, 8] and line["mask"] == [0, 1, 0, 1]
    assert line["logprobs"] == pytest.approx([0, -0.25, 0, -1.5])
    assert (line["env"], line["step"], line["reward"], line["advantage"]) == ("geo3k", 3, 0.5, -0.7)
    assert [(t["start"], t["end"]) for t in line["turns"]] == [(1, 2), (3, 4)]


def test_a_picture_is_kept_once_and_pixel_for_pixel(tmp_path: Path) -> None:
    shown = picture(64, 32, seed=4)
    with Recorder(tmp_path, env="geo3k") as recorder:
        for _ in range(3):
            recorder.write(replace(trajectory(), messages=question("Find x.", shown)), step=1, phase="train")
    (file,) = (tmp_path / "images").iterdir()
    assert np.array_equal(np.asarray(Image.open(file)), np.asarray(shown))
    assert {line["messages"][0]["content"][0]["image"] for line in recorded(tmp_path)} == {f"images/{file.name}"}


def test_a_line_is_on_disk_before_the_recorder_is_closed_and_a_second_recorder_appends(tmp_path: Path) -> None:
    first = Recorder(tmp_path, env="geo3k")
    first.write(trajectory(), step=1, phase="train")
    assert len(recorded(tmp_path)) == 1
    Recorder(tmp_path, env="geo3k").write(trajectory(), step=2, phase="train")
    assert [line["step"] for line in recorded(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    "text", ["line\nbreak\u2028and\x00nul", "\ud800 alone", "<script>alert(1)</script>", "مرحبا" * 99]
)
def test_any_text_is_one_line_of_json(text: str, tmp_path: Path) -> None:
    said = replace(trajectory().turns[0], text=text, info={"raw": text, 3: {1, 2}, "object": object()})
    played = replace(trajectory(), turns=(said,), messages=({"role": "assistant", "content": text},))
    with Recorder(tmp_path, env="geo3k") as recorder:
        recorder.write(played, step=1, phase="train")
    (line,) = recorded(tmp_path)
    assert line["turns"][0]["text"] == line["messages"][0]["content"] == text


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [b"bytes", {1, 2}, np.float32(0.5), {(1, 2): Unshowable()}, nested(600), 10**5000, Unshowable(), {Unshowable(): 1}],
    ids=lambda value: type(value).__name__,
)
def test_whatever_an_environment_puts_in_is_recorded(value: object, tmp_path: Path) -> None:
    message = {"role": "tool", "content": [{"type": "text", "text": "x", "raw": value}], "raw": value}
    played = replace(turn(2, 4), observations=(message,), info={"value": value})
    episode = replace(trajectory(), turns=(played,), messages=(message,), metadata={"value": value})
    with Recorder(tmp_path, env="odd") as recorder:
        recorder.write(episode, step=1, phase="train")
    assert len((tmp_path / "episodes.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("mode", ["CMYK", "F", "RGBA", "L"])
def test_pictures_of_every_mode_are_recorded(mode: str, tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "image", "image": Image.new(mode, (8, 8))}]}
    with Recorder(tmp_path, env="odd") as recorder:
        recorder.write(replace(trajectory(), messages=(message,)), step=1, phase="train")
    (saved,) = (tmp_path / "images").iterdir()
    assert Image.open(saved).mode == "RGB"
