"""Claims about recordings of episodes with several token streams."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from agents.recording import EPISODES, MANIFEST, EpisodeRecord, Recorder, Recording
from agents.recording.gzip_lines import GzipLines
from agents.recording.recorder import _written
from agents.recording.stream_check import broken_record
from agents.rendering.renderer import Renderer
from agents.types import TokenStream
from envs.errors import UserError
from envs.types import message_images
from tests.golden.make import FOLDER
from tests.recordings import lines_of
from tests.windowed import windowed_episode, windowed_recording


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer, checkpoint: Path) -> tuple[Recording, Any]:
    return windowed_recording(tmp_path_factory.mktemp("windowed"), renderer, str(checkpoint))


def test_the_script_cuts_its_history_twice(renderer: Renderer) -> None:
    t, _ = windowed_episode(renderer)
    assert (t.end_reason.value, t.error, t.reward) == ("completed", None, 1.0)
    assert [turn.stream for turn in t.turns] == [0, 0, 1, 2]


def test_the_conversation_of_cut_streams_is_whole_and_in_the_order_of_play(renderer: Renderer) -> None:
    t, _ = windowed_episode(renderer)
    assert [message["role"] for message in t.conversation] == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert len(message_images(t.conversation)) == 4
    assert replace(t, later=()).conversation is t.messages


def same_stream(one: TokenStream, other: TokenStream) -> bool:
    arrays = all(np.array_equal(vars(one)[name], vars(other)[name]) for name in ("ids_T", "mask_T", "logprobs_T"))
    images = [[(image.digest, image.grid_thw) for image in stream.images] for stream in (one, other)]
    facts = [
        (s.prompt_length, s.num_opening, s.num_given, [m["role"] for m in s.messages], [t.text for t in s.turns])
        for s in (one, other)
    ]
    return arrays and images[0] == images[1] and facts[0] == facts[1]


def test_every_stream_is_read_back_as_it_was_with_its_images(
    recorded: tuple[Recording, Any], renderer: Renderer
) -> None:
    recording, played = recorded
    (episode,) = recording.episodes()
    read = recording.trajectory(episode, renderer.images)
    assert len(read.streams) == len(played.streams) == 3
    assert all(map(same_stream, read.streams, played.streams))
    for one, other in zip(read.streams, played.streams, strict=True):
        assert all(np.array_equal(a.pixels_PD, b.pixels_PD) for a, b in zip(one.images, other.images, strict=True))
    assert (episode.num_tokens, episode.num_model_tokens) == (played.num_tokens, played.num_model_tokens)
    (score,) = recording.scores().values()
    written = np.array(episode.all_logprobs, dtype=np.float64)
    assert score.logprobs == pytest.approx((written - 0.125).tolist())


def test_a_message_of_several_streams_is_written_once(recorded: tuple[Recording, Any]) -> None:
    (line,) = lines_of(recorded[0].folder / EPISODES)
    said = [*line["messages"], *line["later_messages"]]
    # An answer whose image is gone is another message than the one that shows it.
    texts = Counter(map(str, said))
    assert max(texts.values()) == 1
    first, second = (stream["said"] for stream in line["later"])
    # The problem, turns and answers; 4 stands for the image of an earlier answer, wherever one is left out.
    assert (len(line["messages"]), first, second) == (4, [0, 1, 4, 3, 5, 6], [0, 1, 4, 3, 4, 6, 7, 8])


def test_the_text_of_every_token_of_every_stream_is_recorded(recorded: tuple[Recording, Any]) -> None:
    recording, played = recorded
    tokens = recording.tokens()
    assert {each for stream in played.streams for each in stream.ids_T.tolist()} <= set(tokens)


def _later(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda line: line["later"][0].update(change)


STRANGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no such stream": (lambda line: line["turns"][-1].update(stream=9), "a turn of stream 10, there are 3"),
    "a stream without a turn": (lambda line: line["turns"][2].update(stream=0), "stream 2: no turn was written in it"),
    "a turn in another stream": (lambda line: line["turns"][1].update(stream=2), "mask covers 84 tokens, the turns 42"),
    "a message that is not there": (_later(said=[0, 99]), "stream 2: message 99 of"),
    "a larger opening than messages": (_later(num_opening=99), "stream 2: the first 99 of"),
    "a place below 0": (_later(said=[-1]), "greater than or equal to 0"),
    "half an id": (_later(ids="AAAA"), "no whole int32"),
    "fewer ids": (_later(ids="AAAAAA=="), "stream 2: "),
    "a prompt behind the end": (
        _later(prompt_length=10**6),
        "stream 2: turn 1: begins at 387, the prompt ends at 1000000",
    ),
    "log-probs above 0": (
        lambda line: line["later"][1].update(logprobs=[0.5] * len(line["later"][1]["logprobs"])),
        "stream 3: turn 1: log-probs must be finite and at most 0",
    ),
    "a later stream of a stream": (_later(later=[]), "Extra inputs are not permitted"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_streams_that_break_a_rule_are_refused_with_a_sentence(
    name: str, recorded: tuple[Recording, Any], tmp_path: Path
) -> None:
    change, rule = STRANGE[name]
    (line,) = lines_of(recorded[0].folder / EPISODES)
    change(line)
    _rewritten(recorded[0], line, tmp_path)
    with pytest.raises(UserError, match=rule):
        list(Recording.open(tmp_path).episodes())


def _rewritten(recording: Recording, line: dict[str, Any], folder: Path) -> None:
    shutil.copy(recording.folder / MANIFEST, folder)
    file = GzipLines(folder / EPISODES)
    file.append(orjson.dumps(line))
    file.close()


def test_a_line_that_is_cut_keeps_its_streams(
    recorded: tuple[Recording, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, played = recorded
    long = {**played.later[0].messages[-1], "content": "so " * 100_000}
    later = (replace(played.later[0], messages=(*played.later[0].messages[:-1], long)), *played.later[1:])
    monkeypatch.setattr("agents.recording.recorder.MAX_LINE", 50_000)
    with Recorder(tmp_path, recording.manifest) as recorder:
        recorder.write(replace(played, later=later), step=1)
    (episode,) = Recording.open(tmp_path).episodes()
    assert not episode.is_exact
    assert all(
        np.array_equal(one.ids_T, other.ids_T) for one, other in zip(episode.streams, played.streams, strict=True)
    )
    assert "more" in episode.streams[1].messages[-1]["content"]


def test_messages_that_had_to_go_are_named_by_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.recording.recorder.MAX_LINE", 1000)
    stream = {"said": [0, 499], "num_opening": 1, "num_given": 2}
    messages = [{"role": "user"}] * 500
    cut = json.loads(_written({"messages": messages, "later_messages": [], "later": [stream]}))
    assert len(cut["messages"]) < 500
    assert cut["later"] == [{"said": [], "num_opening": 0, "num_given": 0}]


def test_a_folder_of_schema_4_is_read_as_it_was_and_continued(recorded: tuple[Recording, Any], tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "guess", tmp_path / "guess")
    before = Recording.open(tmp_path / "guess")
    old = list(before.episodes())
    assert {(episode.schema_version, episode.later, episode.later_messages) for episode in old} == {(4, (), ())}
    with Recorder(tmp_path / "guess", before.manifest) as recorder:
        recorder.write(recorded[1], step=1)
    now = Recording.open(tmp_path / "guess")
    *same, new = now.episodes()
    assert same == old
    assert (now.manifest.schema_version, new.schema_version, len(new.streams)) == (5, 5, 3)


def test_very_many_streams_are_checked_in_time_that_grows_with_them(recorded: tuple[Recording, Any]) -> None:
    (line,) = lines_of(recorded[0].folder / EPISODES)
    count = 20_000
    line["later"] = [line["later"][0]] * count
    line["turns"] = [*line["turns"][:2], *({**line["turns"][2], "stream": number + 1} for number in range(count))]
    episode = EpisodeRecord.model_validate(line)
    started = time.perf_counter()
    assert broken_record(episode) is None
    assert len(episode.all_logprobs) == len(episode.logprobs) + count * len(episode.later[0].logprobs)
    # One pass over all turns for each stream would take minutes.
    assert time.perf_counter() - started < 30
