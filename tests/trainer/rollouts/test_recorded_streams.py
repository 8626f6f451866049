"""Claims about training from recordings whose episodes have several streams: each is checked and processed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agents.recording import EpisodeRecord, Recording
from agents.rendering.renderer import Renderer
from agents.rollout.groups import StepRollout
from agents.types import Trajectory
from envs.errors import UserError
from tests.builders import group, trajectory
from tests.windowed import windowed_recording
from trainer.metrics.log import rollout_metrics
from trainer.rollouts.recording_check import RecordingCheck

VOCABULARY = 4096


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, renderer: Renderer, checkpoint: Path
) -> tuple[Recording, Trajectory]:
    return windowed_recording(tmp_path_factory.mktemp("windowed"), renderer, str(checkpoint))


def checked(recording: Recording, renderer: Renderer, episode: EpisodeRecord) -> None:
    facts: Any = SimpleNamespace(image_token_id=renderer.image_token_id, max_positions=4096, routes=None)
    check = RecordingCheck(recording, renderer, facts, VOCABULARY)
    check.model()
    check.episode(episode)


def _ids(change: Callable[[np.ndarray], object]) -> Callable[[EpisodeRecord], dict[str, Any]]:
    def update(episode: EpisodeRecord) -> dict[str, Any]:
        ids_T = episode.streams[2].ids_T.astype("<i4")
        change(ids_T)
        return {"ids": ids_T.tobytes()}

    return update


@pytest.mark.parametrize(
    ("update", "rule"),
    [
        (_ids(lambda ids_T: ids_T.__setitem__(3, VOCABULARY)), "must have ids below the model's 4096"),
        (_ids(lambda ids_T: ids_T.__setitem__(-1, 2**31 - 1)), "must have ids below the model's 4096"),
        (lambda episode: {"images": episode.later[1].images[:1]}, "must have 4 image tokens"),
        (lambda episode: {"kept": bytes(4 * len(episode.later[1].logprobs))}, "must have 0 ids that each token"),
    ],
)
def test_a_later_stream_that_the_model_cannot_have_written_is_refused(
    update: Callable[[EpisodeRecord], dict[str, Any]],
    rule: str,
    recorded: tuple[Recording, Trajectory],
    renderer: Renderer,
) -> None:
    recording, _ = recorded
    (episode,) = recording.episodes()
    checked(recording, renderer, episode)
    later = (episode.later[0], episode.later[1].model_copy(update=update(episode)))
    with pytest.raises(UserError, match=rule):
        checked(recording, renderer, episode.model_copy(update={"later": later}))


def test_metrics_count_streams_only_where_an_episode_has_several(recorded: tuple[Recording, Trajectory]) -> None:
    _, played = recorded
    one = trajectory()
    assert "streams" not in rollout_metrics(StepRollout(groups=(group(one, one),)), 4, 1.0)
    found = rollout_metrics(StepRollout(groups=(group(played, one),)), 4, 1.0)
    lengths = [len(stream.ids_T) for stream in (*played.streams, *one.streams)]
    assert (found["streams"], found["length/stream_max"]) == (2.0, max(lengths))
    assert found["length/stream_mean"] == pytest.approx(sum(lengths) / 4)
    assert found["tokens_per_episode"] == (played.num_model_tokens + one.num_model_tokens) / 2
    alone = rollout_metrics(StepRollout(groups=(group(replace(played, later=()), one),)), 4, 1.0)
    assert "streams" not in alone
