"""Claims about the golden recordings: every bundled environment gives what it gave, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.recording import SCHEMA_VERSION, Recording
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.replay import ReplayConfig, open_all, replay_all
from envs.registry import PACKAGED, load_registry
from tests.golden.make import ENVS, FOLDER, make

FIX = "a change that is meant: `python -m tests.golden.make`, and say so in the entry's `version`"


@pytest.fixture(scope="module")
def starter() -> Renderer:
    return Renderer.from_checkpoint(model_folder("starter"))


@pytest.mark.parametrize("env_id", ENVS)
def test_a_bundled_environment_gives_what_it_gave_token_by_token(env_id: str) -> None:
    config = ReplayConfig(run=str(FOLDER / env_id), model="recorded", max_concurrent=8)
    outcome = replay_all(config, open_all(config))
    assert outcome.num_replayed == outcome.num_episodes > 10
    assert (outcome.differing, outcome.unsteady) == ([], []), FIX


def test_every_bundled_environment_has_a_golden_recording() -> None:
    bundled = {env_id for env_id, spec in load_registry().items() if spec.origin == str(PACKAGED)}
    assert set(ENVS) == bundled


def test_golden_recordings_hold_every_kind_of_episode_and_are_small() -> None:
    episodes = [e for env_id in ENVS for e in Recording.open(FOLDER / env_id).episodes()]
    assert {e.end_reason.value for e in episodes} == {"completed", "max_turns", "token_budget"}
    outcomes = {call["outcome"] for e in episodes for turn in e.turns for call in turn.info.get("tool_calls", ())}
    assert outcomes == {"ok", "malformed", "truncated", "unknown_tool", "bad_arguments", "tool_error"}
    images = [m for e in episodes for turn in e.turns for m in turn.observations if isinstance(m["content"], list)]
    assert images, "none of the tools answers with an image"
    assert {0.0, 1.0} < {e.reward for e in episodes}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 300_000


def test_a_golden_recording_is_what_its_script_records_today(starter: Renderer, tmp_path: Path) -> None:
    num_episodes = make("guess", tmp_path / "guess", starter)
    made, kept = (list(Recording.open(folder / "guess").episodes()) for folder in (tmp_path, FOLDER))
    # Schema 4 differs from 5 in nothing that an episode of one stream has.
    assert {episode.schema_version for episode in kept} == {4}
    now = [episode.model_copy(update={"schema_version": SCHEMA_VERSION}) for episode in kept]
    assert made == now and len(made) == num_episodes


def test_a_golden_recording_names_no_machine_and_no_day() -> None:
    for env_id in ENVS:
        manifest = Recording.open(FOLDER / env_id).manifest
        assert (manifest.created, manifest.registry, manifest.versions, manifest.model) == ("", "", {}, "starter")
