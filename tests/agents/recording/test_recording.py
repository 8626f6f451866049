"""Claims about recorded episodes: nothing is lost, images are kept once, and whatever was said stays data."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agents.recording import EPISODES, Manifest, Recorder, Recording, WayRecord
from agents.recording.gzip_lines import GzipLines, num_skipped, read_gzip_lines
from agents.recording.recorder import rewind_recording
from agents.replay import run as replay
from agents.types import EndReason, Trajectory
from envs.config.cli import exit_code
from envs.errors import UserError
from envs.registry import get_spec
from tests.builders import trajectory, turn
from tests.prompts import make_image, question
from tests.recordings import lines_of

WAY = WayRecord(max_turns=3, use_tools=True, max_new_tokens=256, context_length=4096, temperature=1.0)
MANIFEST = Manifest(created="2026-01-02T03:04:05+00:00", env=get_spec("geo3k"), ways={"train": WAY})


def spell(token: int) -> bytes:
    """Spell id 300 as the first byte of a character, all others as a letter."""
    return b"\xe4" if token == 300 else bytes([97 + token % 26])


def recorder_in(folder: Path, share: float = 1.0) -> Recorder:
    return Recorder(folder, MANIFEST, spell, share)


def recorded(folder: Path) -> list[dict]:
    return lines_of(folder / EPISODES)


def test_the_stream_is_read_back_as_it_was(tmp_path: Path) -> None:
    played = trajectory([5, 6, 7, 8], [0, 1, 0, 1], [0, -0.25, 0, -1.5], reward=0.5)
    with recorder_in(tmp_path) as recorder:
        recorder.write(replace(played, group=12, sample_index=3), step=3)
        recorder.write_outcome(replace(played, group=12, sample_index=3), step=3, fate="train", advantage=-0.7)
        recorder.write_scores(replace(played, group=12, sample_index=3), 3, np.array([-0.5, -1.0], dtype=np.float32))
    (line,) = recorded(tmp_path)
    assert line["ids"] == [5, 6, 7, 8] and line["mask"] == [0, 1, 0, 1]
    assert line["logprobs"] == [-0.25, -1.5]
    assert (line["id"], line["env"], line["env_version"]) == ("train-12-3", "geo3k", "1")
    assert (line["phase"], line["step"], line["reward"]) == ("train", 3, 0.5)
    assert [(t["start"], t["end"]) for t in line["turns"]] == [(1, 2), (3, 4)]
    recording = Recording.open(tmp_path)
    (episode,) = recording.episodes()
    assert episode.streams[0].logprobs_T.tolist() == [0, -0.25, 0, -1.5]
    outcome, score = recording.outcomes()["train-12-3"], recording.scores()["train-12-3"]
    assert (outcome.step, outcome.fate, outcome.advantage) == (3, "train", -0.7)
    assert (score.step, score.logprobs) == (3, (-0.5, -1.0))
    assert recording.tokens() == {5: b"f", 6: b"g", 7: b"h", 8: b"i"}


def same(first: Trajectory, second: Trajectory) -> bool:
    arrays = ("ids_T", "mask_T", "logprobs_T")
    others = ("key", "seed", "reward", "end_reason", "prompt_length", "error", "label", "num_prompt_messages", "timing")
    return all(np.array_equal(vars(first)[name], vars(second)[name]) for name in arrays) and all(
        getattr(first, name) == getattr(second, name) for name in others
    )


def test_a_recorded_episode_becomes_the_trajectory_that_it_was(tmp_path: Path) -> None:
    logprobs = np.random.default_rng(0).normal(-1, 1, 4).astype(np.float32)
    played = replace(trajectory(logprobs=logprobs), label="68", error="odd", seed=2**47 + 1)
    with recorder_in(tmp_path) as recorder:
        recorder.write(played, step=1)
    recording = Recording.open(tmp_path)
    (episode,) = recording.episodes()
    expected = replace(played, logprobs_T=np.where(played.mask_T, logprobs, np.float32(0)))
    assert same(recording.trajectory(episode), expected)
    assert not same(recording.trajectory(episode), replace(expected, seed=7))


def test_the_ids_that_a_token_was_drawn_from_are_read_back(tmp_path: Path) -> None:
    kept_NK = np.array([[7, 6, 6], [151_642, 8, 0]], dtype=np.int32)
    with recorder_in(tmp_path) as recorder:
        recorder.write(replace(trajectory([5, 6, 7, 8], [0, 1, 0, 1]), kept_NK=kept_NK), step=1)
        recorder.write(trajectory([5, 6, 7, 8], [0, 1, 0, 1]), step=1)
    recording = Recording.open(tmp_path)
    cut, whole = map(recording.trajectory, recording.episodes())
    assert cut.kept_NK is not None and np.array_equal(cut.kept_NK, kept_NK)
    assert whole.kept_NK is None
    assert "kept" not in recorded(tmp_path)[1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_experts_of_tokens_are_recorded_on_demand_and_read_back(dtype: type, tmp_path: Path) -> None:
    routes_RLK = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (3, 5, 2)).astype(dtype)
    played = replace(trajectory([5, 6, 7, 8], [0, 1, 0, 1]), routes_RLK=routes_RLK)
    with Recorder(tmp_path, MANIFEST, spell, with_routes=True) as recorder:
        recorder.write(played, step=1)
        recorder.write(trajectory([5, 6, 7, 8], [0, 1, 0, 1]), step=1)
    recorder_in(tmp_path).write(replace(played, group=1), step=1)
    recording = Recording.open(tmp_path)
    with_routes, *others = map(recording.trajectory, recording.episodes())
    found = with_routes.routes_RLK
    assert found is not None and found.dtype == dtype and np.array_equal(found, routes_RLK)
    assert [other.routes_RLK for other in others] == [None, None]
    assert ["routes" in line for line in recorded(tmp_path)] == [True, False, False]


def test_experts_that_would_make_a_line_too_long_are_left_out_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.recording.recorder.MAX_LINE", 100_000)
    played = replace(trajectory([5, 6, 7, 8], [0, 1, 0, 1]), routes_RLK=np.zeros((3, 8000, 4), np.uint8))
    with Recorder(tmp_path, MANIFEST, spell, with_routes=True) as recorder:
        recorder.write(played, step=1)
    (episode,) = Recording.open(tmp_path).episodes()
    assert (episode.routes, episode.is_exact, episode.ids) == (None, True, (5, 6, 7, 8))


def test_log_probs_keep_every_bit_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(-3, 5, 1000).astype(np.float32)
    with recorder_in(tmp_path) as recorder:
        recorder.write(trajectory(logprobs=[0, 0, np.nan, -1], end_reason=EndReason.INVALID_STREAM), step=1)
        recorder.write_scores(trajectory(), 1, values)
        recorder.write_scores(replace(trajectory(), group=1), 1, np.array([np.nan, -np.inf, -0.1], dtype=np.float32))
    (episode,) = Recording.open(tmp_path).episodes()
    assert episode.logprobs == (None, -1.0)
    first, second = Recording.open(tmp_path).scores().values()
    assert np.array_equal(np.array(first.logprobs, dtype=np.float32), values)
    assert second.logprobs == (None, None, -0.1)


def test_a_image_is_kept_once_and_pixel_for_pixel(tmp_path: Path) -> None:
    shown = make_image(64, 32, seed=4)
    with recorder_in(tmp_path) as recorder:
        for group in range(3):
            recorder.write(replace(trajectory(), messages=question("Find x.", shown), group=group), step=1)
    (file,) = (tmp_path / "images").iterdir()
    assert np.array_equal(np.asarray(Image.open(file)), np.asarray(shown))
    assert {line["messages"][0]["content"][0]["image"] for line in recorded(tmp_path)} == {f"images/{file.name}"}


def test_a_line_is_on_disk_before_the_recorder_is_closed_and_a_second_recorder_appends(tmp_path: Path) -> None:
    first = recorder_in(tmp_path)
    first.write(trajectory(), step=1)
    assert len(recorded(tmp_path)) == 1
    recorder_in(tmp_path).write(replace(trajectory([300, 6, 7, 8]), group=1), step=2)
    assert [line["step"] for line in recorded(tmp_path)] == [1, 2]
    assert Recording.open(tmp_path).tokens()[300] == b"\xe4"


@pytest.mark.parametrize("cut", [1, 9, 30, 200])
def test_half_a_line_at_the_end_is_passed_over_and_moved_aside(cut: int, tmp_path: Path) -> None:
    with recorder_in(tmp_path) as recorder:
        for group in range(3):
            recorder.write(replace(trajectory(), group=group), step=1)
    path = tmp_path / EPISODES
    path.write_bytes(path.read_bytes()[:-cut])
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_bytes(tokens.read_bytes()[:-5])
    assert [e.group for e in Recording.open(tmp_path).episodes()] == [0, 1]
    with recorder_in(tmp_path) as recorder:
        recorder.write(replace(trajectory(), group=7), step=2)
    assert [e["group"] for e in recorded(tmp_path)] == [0, 1, 7]  # by gzip itself, which takes no half a member
    assert set(Recording.open(tmp_path).tokens()) == {5, 6, 7, 8}
    assert list((tmp_path / "abandoned").glob("episodes.jsonl-*.gz"))


def test_a_damaged_file_is_told_from_one_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("tests/golden/guess", tmp_path / "x")
    path = tmp_path / "x" / EPISODES
    whole, ends = path.read_bytes(), [end for end, _ in read_gzip_lines(path)]
    for content, damaged in (
        (whole, False),
        (whole[:-3], False),
        (whole[: ends[1] + 20] + b"????" + whole[ends[1] + 24 :], True),
        (whole + bytes(100), True),
    ):
        path.write_bytes(content)
        assert num_skipped(path) == damaged
        assert replay([str(tmp_path / "x")]) == (3 if damaged else 0)
        assert ("episodes.jsonl.gz is damaged" in " ".join(capsys.readouterr().out.split())) is damaged


def test_a_recording_is_taken_back_to_an_earlier_moment(tmp_path: Path) -> None:
    with recorder_in(tmp_path) as recorder:
        recorder.write(trajectory(), step=1)
        sizes = recorder.sizes()
        recorder.write(replace(trajectory([50, 60, 70, 80]), group=1), step=2)
        recorder.write_outcome(trajectory(), 2, "train", 1.0)
    assert rewind_recording(tmp_path, sizes) == []
    recording = Recording.open(tmp_path)
    assert [e.step for e in recording.episodes()] == [1] and not recording.outcomes()
    assert set(recording.tokens()) == {5, 6, 7, 8}
    assert rewind_recording(tmp_path, {EPISODES: sizes[EPISODES] + 1}) == [EPISODES]


def test_a_share_of_the_groups_is_recorded_whole(tmp_path: Path) -> None:
    with recorder_in(tmp_path, share=0.25) as recorder:
        for group in range(400):
            for sample_index in range(2):
                played = replace(trajectory(), group=group, sample_index=sample_index)
                recorder.write(played, step=1)
                recorder.write_outcome(played, 1, "train", 0.0)
    episodes = list(Recording.open(tmp_path).episodes())
    groups = {e.group for e in episodes}
    assert 70 < len(groups) < 130 and len(episodes) == 2 * len(groups)
    assert set(Recording.open(tmp_path).outcomes()) == {e.id for e in episodes}


def test_a_place_in_the_file_is_gone_on_from(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.write(trajectory(), step=1)
    ((place, _),) = Recording.open(tmp_path).episodes_from(0)
    assert list(Recording.open(tmp_path).episodes_from(place)) == []
    recorder.write(replace(trajectory(), group=1), step=1)
    ((end, later),) = Recording.open(tmp_path).episodes_from(place)
    assert later.id == "train-1-0"
    assert Recording.open(tmp_path).episode(start=place, end=end) == later


def test_a_reward_that_is_no_number_leaves_the_recording_readable(tmp_path: Path) -> None:
    with recorder_in(tmp_path) as recorder:
        recorder.write(trajectory(reward=float("nan")), step=1)
    (episode,) = Recording.open(tmp_path).episodes()
    assert (episode.reward, episode.error) == (0.0, "the reward was nan")


def test_another_environment_is_not_recorded_into_the_same_folder(tmp_path: Path) -> None:
    recorder_in(tmp_path).close()
    other = MANIFEST.model_copy(update={"env": get_spec("guess")})
    with pytest.raises(UserError, match=r"must hold a recording of schema 5 of 'guess', or none, got .* 'geo3k'"):
        Recorder(tmp_path, other)


@pytest.mark.parametrize(
    ("manifest", "rule"),
    [
        (None, "must hold a recording"),
        ('{"schema_version": 3}', "schema 4 or 5, got 3"),
        ('{"schema_version": 4}', "must hold a whole recording.json"),
        ("[]", "must hold a whole recording.json"),
        ("{", "must hold a whole recording.json"),
    ],
)
def test_what_is_no_recording_is_refused(manifest: str | None, rule: str, tmp_path: Path) -> None:
    if manifest is not None:
        (tmp_path / "recording.json").write_text(manifest)
    with pytest.raises(UserError, match=rule):
        Recording.open(tmp_path)


@pytest.mark.parametrize("name", ["../../secret.png", "images/../x.png", "/etc/passwd", "images/zz.png"])
def test_a_image_is_read_from_the_recording_alone(name: str, tmp_path: Path) -> None:
    recorder_in(tmp_path).close()
    with pytest.raises(UserError, match="must name an image"):
        Recording.open(tmp_path).image(name)


def test_a_line_that_is_no_record_and_a_manifest_that_is_no_text_are_named(tmp_path: Path) -> None:
    recorder_in(tmp_path).close()
    recording = Recording.open(tmp_path)
    for name, read in (
        ("episodes.jsonl.gz", recording.episodes),
        ("outcomes.jsonl.gz", recording.outcomes),
        ("scores.jsonl.gz", recording.scores),
    ):
        GzipLines(tmp_path / name).append(b'{"id": 3}')
        with pytest.raises(UserError, match=f"{name}: must be a whole recording, got .* validation errors for"):
            list(read())
    assert exit_code(lambda: replay([str(tmp_path)])) == 2  # among many at once, too
    (tmp_path / "recording.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=r"must hold a whole recording.json"):
        Recording.open(tmp_path)


def test_members_of_any_size_are_read_one_by_one(tmp_path: Path) -> None:
    lines = [
        bytes(np.random.default_rng(n).integers(32, 127, size, dtype=np.uint8))
        for n, size in enumerate([0, 1, 70_000, 3_000_000, 5])
    ]
    file = GzipLines(tmp_path / "x.gz")
    for line in lines:
        file.append(line)
    found = list(read_gzip_lines(tmp_path / "x.gz"))
    assert [text for _, text in found] == [line + b"\n" for line in lines] and found[-1][0] == file.size()


def test_other_programs_read_the_lines_as_json(tmp_path: Path) -> None:
    import datasets

    with recorder_in(tmp_path / "episodes") as recorder:
        for group in range(5):
            recorder.write(replace(trajectory(), group=group), step=1)
    lines = datasets.load_dataset(
        "json", data_files=str(tmp_path / "episodes" / EPISODES), cache_dir=str(tmp_path / "cache")
    )["train"]
    assert lines["ids"] == [[5, 6, 7, 8]] * 5 and lines["logprobs"] == [[-1.0, -1.0]] * 5


@pytest.mark.parametrize(
    "text", ["line\nbreak\u2028and\x00nul", "\ud800 alone", "<script>alert(1)</script>", "مرحبا" * 99]
)
def test_any_text_is_one_line_of_json(text: str, tmp_path: Path) -> None:
    said = replace(trajectory().turns[0], text=text, info={"raw": text, 3: {1, 2}, "object": object()})
    played = replace(trajectory(), turns=(said,), messages=({"role": "assistant", "content": text},))
    with recorder_in(tmp_path) as recorder:
        recorder.write(played, step=1)
    (line,) = recorded(tmp_path)
    shown = text.replace("\ud800", "\ufffd")  # half a pair is no text
    assert line["turns"][0]["text"] == line["messages"][0]["content"] == shown


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
    [
        b"bytes",
        {1, 2},
        float("nan"),
        np.float32(0.5),
        {(1, 2): Unshowable()},
        nested(600),
        10**5000,
        Unshowable(),
        {Unshowable(): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_an_environment_puts_in_is_recorded(value: object, tmp_path: Path) -> None:
    message = {"role": "tool", "content": [{"type": "text", "text": "x", "raw": value}], "raw": value}
    played = replace(turn(2, 4), observations=(message,), info={"value": value})
    episode = replace(trajectory(), turns=(played,), messages=(message,), metadata={"value": value})
    with recorder_in(tmp_path) as recorder:
        recorder.write(episode, step=1)
    (read,) = Recording.open(tmp_path).episodes()
    assert not read.is_exact and set(read.metadata) == {"value"}


@pytest.mark.parametrize("mode", ["CMYK", "F", "RGBA", "L"])
def test_images_of_every_mode_are_recorded(mode: str, tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "image", "image": Image.new(mode, (8, 8))}]}
    with recorder_in(tmp_path) as recorder:
        recorder.write(replace(trajectory(), messages=(message,)), step=1)
    (saved,) = (tmp_path / "images").iterdir()
    assert Image.open(saved).mode == "RGB"


@pytest.mark.parametrize("info", [{"log": "x" * 40 * 2**20}, {"cells": [{}] * 1_200_000}])
def test_what_is_recorded_can_be_read_however_large_an_info_is(tmp_path: Path, info: dict) -> None:
    played = replace(trajectory(), turns=(replace(trajectory().turns[0], info=info), *trajectory().turns[1:]))
    with recorder_in(tmp_path) as recorder:
        recorder.write(played, step=1)
        recorder.write(replace(trajectory(), group=1), step=1)
    cut, whole = Recording.open(tmp_path).episodes()
    assert cut.ids == whole.ids and (cut.is_exact, whole.is_exact) == (False, True)
