"""Claims about the experts of a mixture in a run: they reach the learner, the recording and those who train on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.model.architectures import ModelFacts
from agents.recording import Recording
from agents.recording.gzip_lines import GzipLines
from agents.recording.schema import EPISODES
from agents.recording.stream_schema import RoutesRecord
from agents.rollout.groups import GroupInFlight, ManagerState
from agents.types import RouteShape
from envs.errors import UserError
from tests.builders import trajectory
from tests.environments import lucky_geometry
from tests.paths import ROOT
from tests.recordings import lines_of
from tests.tiny_models import write_tiny_model
from tests.trainer.rollouts.test_replay_rollouts import SMALL, replayed, said, started
from tests.trainer.runs import metrics_of
from trainer.checkpoint.checkpointer import Checkpoint
from trainer.data import packing
from trainer.rollouts.recorded_groups import RecordedSteps
from trainer.rollouts.run_state import LoopState, read_loop_state

PLAIN, ROUTED = (f"{ROOT / 'tests/agents/engines' / name}.py:make_engine" for name in ("plain_engine", "routed_engine"))
SHAPE = RouteShape(num_layers=3, num_experts=4, top_k=2)
FEW = ["--group-size", "2", "--eval-size", "0", "--max-new-tokens", "40", "--max-turns", "2"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    write_tiny_model(folder, "qwen3_vl_moe")
    assert ModelFacts.load(folder).routes == SHAPE
    reward = "return float(len(text) % 3)"
    with lucky_geometry(tmp_path_factory.mktemp("lucky"), "lucky_mixture", reward) as lucky:
        yield [*lucky, "--model", str(folder), *SMALL, *FEW]


@pytest.fixture(scope="module")
def recorded(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRUETURN_RECORD_ROUTES", "true")
        return started(folder, *flags, "--engine", ROUTED, "--steps", "2")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each micro-batch that is packed has experts."""
    found: list[bool] = []
    collate = packing.collate

    def watched(*args: Any, **kwargs: Any) -> Any:
        batch = collate(*args, **kwargs)
        found.append(batch.packed.routes_TLK is not None)
        return batch

    monkeypatch.setattr("trainer.learner.fsdp_learner.collate", watched)
    return found


def test_every_episode_of_a_run_has_the_experts_that_its_engine_chose(recorded: Path) -> None:
    rows = metrics_of(recorded)
    assert all(row["rollout_train_kl"] < 1e-8 and row["grad_norm"] > 0 for row in rows)
    for episode in Recording.open(recorded).episodes():
        routes = episode.streams[0].routes_RLK
        assert routes is not None and routes.shape == (episode.turns[-1].end - 1, SHAPE.num_layers, SHAPE.top_k)
        assert (np.sort(routes)[..., 0] != np.sort(routes)[..., 1]).all() and routes.max() < SHAPE.num_experts


def test_a_replay_trains_on_recorded_experts_unless_routing_is_free(
    recorded: Path, packed: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed(tmp_path / "replay", recorded)
    assert "entropy are equal to the bit in 2 of 2 steps" in said(capsys)
    assert packed and all(packed)
    packed.clear()
    replayed(tmp_path / "free", recorded, "--routing", "free")
    assert "which experts each token took" not in said(capsys)
    assert packed and not any(packed)
    steps = RecordedSteps.open(recorded, 2, 2)
    for each, is_there in ((steps, True), (replace(steps, gives_routes=False), False)):
        found = [t.routes_RLK is not None for group in each.rollout(1, None).groups for t in group.trajectories]
        assert found and set(found) == {is_there}


def rewritten(recorded: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of a run whose episodes were changed."""
    shutil.copytree(recorded, folder)
    lines = lines_of(folder / "episodes" / EPISODES)
    (folder / "episodes" / EPISODES).unlink()
    file = GzipLines(folder / "episodes" / EPISODES)
    for line in lines:
        change(line)
        file.append(json.dumps(line).encode())
    file.close()
    return folder


def test_a_replay_without_recorded_experts_says_so(
    recorded: Path, packed: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = rewritten(recorded, tmp_path / "bare", lambda line: line.pop("routes"))
    replayed(tmp_path / "replay", bare, "--steps", "1")
    note = "the recording does not say which experts each token took: the trainer chooses again, so expect a "
    assert note in said(capsys)
    assert packed and not any(packed)


@pytest.mark.parametrize(
    ("shape", "number", "words"),
    [
        ((3, 2), 3, "a token went to expert 4, the network has 4"),
        ((2, 3), 1, r"experts of shape \(\d+, 2, 3\), the tokens that were read need \(\d+, 3, 2\)"),
        ((4, 2), 1, r"experts of shape \(\d+, 4, 2\)"),
    ],
)
def test_recorded_experts_of_another_network_are_refused_before_anything_is_loaded(
    shape: tuple[int, int], number: int, words: str, recorded: Path, tmp_path: Path
) -> None:
    def other(line: dict[str, Any]) -> None:
        num_read = line["turns"][-1]["end"] - 1
        line["routes"] = RoutesRecord.line(np.full((num_read, *shape), number + np.arange(shape[1]), np.uint8))

    strange = rewritten(recorded, tmp_path / "strange", other)
    with pytest.raises(UserError, match=f"must have experts of the model, got {words}"):
        replayed(tmp_path / "replay", strange)


def test_recorded_experts_are_refused_by_a_dense_model(recorded: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "dense", "qwen3_vl")
    with pytest.raises(UserError, match=r"must have no experts, as the model has none, got \(\d+, 3, 2\)"):
        replayed(tmp_path / "replay", recorded, "--model", str(tmp_path / "dense"))


@pytest.mark.parametrize(
    ("more", "is_said", "has_experts"),
    [
        (["--engine", PLAIN], True, False),
        (["--engine", PLAIN, "--routing", "free"], False, False),
        (["--engine", ROUTED, "--routing", "free"], False, False),
        (["--engine", ROUTED], False, True),
    ],
)
def test_an_engine_that_does_not_say_where_tokens_went_is_told_of_once_with_the_gap_to_expect(
    more: list[str],
    is_said: bool,
    has_experts: bool,
    flags: list[str],
    packed: list[bool],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = started(tmp_path / "run", *flags, *more, "--steps", "1")
    note = "the engine does not say which experts each token took: the trainer chooses again, so expect a "
    assert said(capsys).count(note) == is_said
    assert packed and set(packed) == {has_experts}
    # Nobody has asked to record them.
    assert all("routes" not in line for line in lines_of(folder / "episodes" / EPISODES))


def test_a_run_that_has_no_experts_to_record_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUETURN_RECORD_ROUTES", "true")
    with pytest.raises(UserError, match="record_routes: needs --routing replay, got --routing free"):
        started(tmp_path / "run", *flags, "--engine", ROUTED, "--routing", "free", "--steps", "1")


def test_a_checkpoint_keeps_the_experts_of_episodes_that_wait(tmp_path: Path) -> None:
    played = replace(trajectory([5, 6, 7, 8], [0, 1, 0, 1]), routes_RLK=np.ones((3, 3, 2), np.uint8))
    state = ManagerState(1, (GroupInFlight(0, 0, {0: played}, (), False),))
    for name, content in LoopState(rollout=state).files().items():
        (tmp_path / name).write_bytes(content)
    (group,) = read_loop_state(Checkpoint(tmp_path, 0)).rollout.in_flight
    found = group.played[0].routes_RLK
    assert found is not None and found.dtype == np.uint8 and np.array_equal(found, np.ones((3, 3, 2)))
