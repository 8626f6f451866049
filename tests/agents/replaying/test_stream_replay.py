"""Claims about replaying and continuing episodes whose history was cut: every stream is compared, and goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.engines.scripted import ScriptedEngine
from agents.recording import EpisodeRecord, Recording
from agents.recording.stream_schema import TurnRecord
from agents.rendering.renderer import Renderer
from agents.replaying.difference import Difference, differences
from agents.replaying.fork import Fork, check_tokenizer
from agents.replaying.replayer import EnvReplayer, ReplayContext
from agents.replaying.stream_replayer import StreamReplayer
from envs.history import History
from tests.windowed import TEXTS, windowed_recording, windowed_spec


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer, checkpoint: Path) -> tuple[Recording, Any]:
    return windowed_recording(tmp_path_factory.mktemp("windowed"), renderer, str(checkpoint))


def replayed(recording: Recording, renderer: Renderer, episode: EpisodeRecord | None = None) -> tuple[Difference, ...]:
    (kept,) = recording.episodes()
    context = ReplayContext(recording, windowed_spec())
    return differences(episode or kept, asyncio.run(StreamReplayer(context, renderer).play(kept)))


def test_a_windowed_episode_replays_without_a_difference(recorded: tuple[Recording, Any], renderer: Renderer) -> None:
    recording, _ = recorded
    (episode,) = recording.episodes()
    assert replayed(recording, renderer) == ()
    context = ReplayContext(recording, windowed_spec())
    assert differences(episode, asyncio.run(EnvReplayer(context).play(episode))) == ()


def _changed(episode: EpisodeRecord, number: int, **change: object) -> EpisodeRecord:
    later = list(episode.later)
    later[number] = later[number].model_copy(update=change)
    return episode.model_copy(update={"later": tuple(later)})


def test_a_difference_says_which_stream_it_is_in(recorded: tuple[Recording, Any], renderer: Renderer) -> None:
    recording, _ = recorded
    (episode,) = recording.episodes()
    ids_T = episode.streams[2].ids_T.astype("<i4")
    ids_T[5] += 1
    (found,) = replayed(recording, renderer, _changed(episode, 1, ids=ids_T.tobytes()))
    assert (found.kind, found.where) == ("tokens", "turn 4 stream 3 token 5")
    (found,) = replayed(recording, renderer, _changed(episode, 0, images=episode.later[0].images[:1]))
    assert (found.kind, found.place) == ("images of the stream", "stream 2 [1]")
    found = replayed(recording, renderer, _changed(episode, 0, prompt_length=7))
    assert ("place of a turn", "turn 3 stream 2 prompt_length") in [(each.kind, each.where) for each in found]


def test_a_window_that_is_another_one_now_is_a_difference(recorded: tuple[Recording, Any], renderer: Renderer) -> None:
    recording, _ = recorded
    (episode,) = recording.episodes()
    wider = windowed_spec().model_copy(update={"history": History(keep_images=2)})
    result = asyncio.run(StreamReplayer(ReplayContext(recording, wider), renderer).play(episode))
    assert {each.kind for each in differences(episode, result)} == {"tokens"}
    assert {turn.stream for turn in episode.turns} == {0, 1, 2}


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_fork_goes_on_in_the_stream_in_which_its_turn_was_written(
    turn: int, recorded: tuple[Recording, Any], renderer: Renderer
) -> None:
    recording, played = recorded
    (episode,) = recording.episodes()
    way = recording.manifest.ways["train"]
    fork = Fork(episode, turn, ReplayContext(recording, windowed_spec()), renderer, way)
    assert asyncio.run(fork.changes()) == ()
    check_tokenizer(episode, turn, renderer)
    engine = ScriptedEngine(renderer.tokenizer, lambda number, request: TEXTS[-1])
    (t,) = asyncio.run(fork.play(fork.loop(engine, 1), (7,)))
    assert (t.end_reason.value, len(t.turns)) == ("completed", turn + 1)
    # The answer is written where the recorded episode wrote its next turn, behind the same tokens.
    assert [each.stream for each in t.turns] == [each.stream for each in played.turns[: turn + 1]]
    last, before = t.turns[-1], played.turns[turn]
    assert last.start == before.start
    streams = [each.streams[last.stream] for each in (t, played)]
    assert np.array_equal(streams[0].ids_T[: last.start], streams[1].ids_T[: last.start])
    assert np.array_equal(streams[0].logprobs_T[: last.start], streams[1].logprobs_T[: last.start])


def test_every_field_of_a_turn_has_a_place_in_its_record(recorded: tuple[Recording, Any]) -> None:
    _, played = recorded
    assert set(TurnRecord.model_fields) == set(vars(replace(played.turns[0])))
