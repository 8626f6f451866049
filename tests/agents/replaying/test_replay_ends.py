"""Claims about episodes that ended in every way: each replays without a difference, or is counted and said."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agents.recording import Recorder, Recording
from agents.recording.manifest import build_manifest
from agents.rendering.renderer import Renderer
from agents.replay import run
from agents.replaying.difference import Difference, differences
from agents.replaying.replayer import EnvReplayer, ReplayContext, Replayer
from agents.replaying.report import kinds
from agents.replaying.runner import ReplaySummary, replay
from agents.replaying.stream_replayer import StreamReplayer
from agents.rollout.episode import ABORT, Episode, Limits
from agents.types import Completion, EndReason, GenerateRequest, Trajectory
from envs.config.cli import exit_code
from envs.execution.load import load_env
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample, bare_text
from tests.builders import sampling
from tests.golden.make import FOLDER
from tests.prompts import question

ODD = '''
import time
from PIL import Image
from envs.env import Env


class OddEnv(Env):
    """Does in each turn what the sample's metadata say; mended, it neither raises nor hangs."""

    def __init__(self, sample, args):
        self.plan, self.mended, self.turn = sample.metadata, args.options.get("mended"), 0

    def act(self, what):
        if what == "raise" and not self.mended:
            raise ValueError("broken")
        if what in ("hang", "wait") and not self.mended:
            time.sleep(2.0 if what == "hang" else 0.3)
        if what == "thin":
            image = Image.new("RGB", (1, 1000))
            return {"multi_modal_data": {"image": [image]}, "obs_str": "thin"}
        said = {"nothing": "", "done": "", "long": "so " * 400}
        text = said.get(what, f"{what} {self.turn}")
        return {"obs_str": text, "role": "user"} if text else {}

    def reset(self):
        return (self.act(self.plan["reset"]) if "reset" in self.plan else {}), {}

    def step(self, text):
        self.turn += 1
        what = self.plan["acts"][self.turn - 1]
        return self.act(what), what == "done", ({"turn": self.turn} if what != "nothing" else {})

    def reward(self, text):
        self.act(self.plan.get("reward", "say"))
        return 0.25 + len(text)
'''


@dataclass(frozen=True)
class Scene:
    """What the model writes (text, and how it goes wrong), what the environment does, and how the episode ends."""

    end: EndReason
    acts: Sequence[str] = ("say", "done")
    says: Sequence[tuple[str, str]] = (("one", "stop"), ("two", "stop"), ("three", "stop"))
    plan: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    context_length: int = 4096
    is_cancelled: bool = False


LENGTHY = (("one " * 200, "stop"),)
SCENES = {
    "completed": Scene(EndReason.COMPLETED),
    "a first observation": Scene(EndReason.COMPLETED, plan={"reset": "say"}),
    "an environment that says nothing": Scene(EndReason.COMPLETED, ("nothing", "done")),
    "all turns": Scene(EndReason.MAX_TURNS, ("say", "say", "say")),
    "all turns, the last one unanswered": Scene(EndReason.MAX_TURNS, ("say", "say", "nothing")),
    "a turn that is too long": Scene(EndReason.TOKEN_BUDGET, says=LENGTHY, limits={"max_new_tokens": 9}),
    "an answer that does not fit": Scene(EndReason.TOKEN_BUDGET, ("long", "done"), limits={"max_new_tokens": 99}),
    "no room for any turn": Scene(EndReason.CONTEXT_FULL, context_length=4),
    "a full context": Scene(EndReason.CONTEXT_FULL, ("long", "done"), context_length=120),
    "a step that raises": Scene(EndReason.ENV_ERROR, ("say", "raise")),
    "a first step that raises": Scene(EndReason.ENV_ERROR, ("raise",)),
    "a reset that raises": Scene(EndReason.ENV_ERROR, plan={"reset": "raise"}),
    "a reward that raises": Scene(EndReason.ENV_ERROR, plan={"reward": "raise"}),
    "a reward that raises after a limit": Scene(
        EndReason.ENV_ERROR, ("long", "done"), plan={"reward": "raise"}, limits={"max_new_tokens": 99}
    ),
    "a reward that raises after half a turn": Scene(
        EndReason.ENV_ERROR, says=LENGTHY, plan={"reward": "raise"}, limits={"max_new_tokens": 9}
    ),
    "a step that hangs": Scene(EndReason.ENV_TIMEOUT, ("say", "hang")),
    "an observation that no model reads": Scene(EndReason.ENV_ERROR, ("thin", "done")),
    "a first observation that no model reads": Scene(EndReason.ENV_ERROR, plan={"reset": "thin"}),
    "aborted by the engine": Scene(EndReason.ABORTED, says=(("one", "stop"), ("two", "abort"))),
    "aborted in the first turn": Scene(EndReason.ABORTED, says=(("one", "abort"),)),
    "cancelled while the model writes": Scene(EndReason.ABORTED, says=(("one", "stop"), ("two", "cancel"))),
    "cancelled while the environment works": Scene(EndReason.ABORTED, ("say", "wait"), is_cancelled=True),
    "an engine that misreads": Scene(EndReason.INVALID_STREAM, says=(("one", "stop"), ("two", "misread"))),
    "an engine that misreads at once": Scene(EndReason.INVALID_STREAM, says=(("one", "misread"),)),
    "a log-prob that is none": Scene(EndReason.INVALID_STREAM, says=(("one", "nan"), ("two", "stop"))),
}  # fmt: skip


class OddEngine:
    """Writes what a scene says, and goes wrong as it says."""

    def __init__(self, scene: Scene, renderer: Renderer) -> None:
        self.scene, self.renderer, self.context_length, self.num_asked = scene, renderer, scene.context_length, 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[OddEngine]:
        yield self

    async def generate(self, request: GenerateRequest) -> Completion:
        text, how = self.scene.says[self.num_asked]
        self.num_asked += 1
        ids = (*self.renderer.tokenizer(text, add_special_tokens=False)["input_ids"], self.renderer.stop_ids[-1])
        finish, read = "abort" if how == "abort" else "stop", len(request.ids) + (how == "misread")
        if len(ids) > request.max_new_tokens:
            ids, finish = ids[: request.max_new_tokens], "length"
        if how == "cancel":
            raise asyncio.CancelledError(ABORT)
        logprobs = [math.nan if how == "nan" else -0.5] * len(ids)
        return Completion(ids, tuple(logprobs), finish, read, ((3, len(ids)),))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvSpec]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "ends_env.py").write_text(ODD)
    entry = {"entry_point": "ends_env:OddEnv", "description": "odd", "max_turns": 3, "step_timeout_s": 0.8}
    (folder / "registry.yaml").write_text(json.dumps({"odd": entry}))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield get_spec("odd", folder / "registry.yaml")


def play(scene: Scene, spec: EnvSpec, renderer: Renderer) -> tuple[Episode, Trajectory]:
    """Play a scene in the real agent loop."""
    limits = Limits(**{"max_turns": 3, "max_new_tokens": 256, **scene.limits}, env=EnvLimits.of(spec))
    episode = Episode(OddEngine(scene, renderer), renderer, limits, sampling(renderer))  # type: ignore[arg-type]
    sample = Sample("odd-0", question("Go on."), "5", {"acts": list(scene.acts), **scene.plan})

    async def playing() -> Trajectory:
        task = asyncio.ensure_future(episode.run(sample, lambda: load_env(spec)(sample, spec.args()), seed=1))
        if scene.is_cancelled:
            await asyncio.sleep(0.1)
            task.cancel(ABORT)
        return await task

    return episode, asyncio.run(playing())


def recorded(folder: Path, scene: Scene, spec: EnvSpec, renderer: Renderer) -> Recording:
    episode, trajectory = play(scene, spec, renderer)
    assert trajectory.end_reason is scene.end, trajectory
    with Recorder(folder, build_manifest(spec, renderer, "tiny", {"train": episode})) as recorder:
        recorder.write(trajectory, step=1)
    return Recording.open(folder)


def replayed(recording: Recording, spec: EnvSpec, renderer: Renderer | None) -> ReplaySummary:
    stage = ReplayContext(recording, spec)
    player: Replayer = StreamReplayer(stage, renderer) if renderer else EnvReplayer(stage)
    return asyncio.run(replay(player, recording.episodes(), max_concurrent=2))


def changes(recording: Recording, spec: EnvSpec, renderer: Renderer, num_turns: int) -> tuple[Difference, ...]:
    """Return what differs in the first turns of the only episode."""
    (episode,) = recording.episodes()
    result = asyncio.run(StreamReplayer(ReplayContext(recording, spec), renderer).play(episode, num_turns))
    return differences(episode, result, num_turns)


@pytest.mark.parametrize("name", [name for name, scene in SCENES.items() if scene.plan.get("reset", "say") == "say"])
def test_the_opening_is_the_problem_and_the_first_observation_however_an_episode_ends(
    name: str, spec: EnvSpec, renderer: Renderer, tmp_path: Path
) -> None:
    scene = replace(SCENES[name], plan={**SCENES[name].plan, "reset": "say"})
    (episode,) = recorded(tmp_path, scene, spec, renderer).episodes()
    assert [bare_text(message) for message in episode.opening] == ["Go on.", "say 0"]


@pytest.mark.parametrize("name", SCENES)
def test_an_episode_replays_without_a_difference_however_it_ended(
    name: str, spec: EnvSpec, renderer: Renderer, tmp_path: Path
) -> None:
    recording = recorded(tmp_path, SCENES[name], spec, renderer)
    for reader in (None, renderer):
        outcome = replayed(recording, spec, reader)
        assert (outcome.num_replayed, outcome.skipped, outcome.differing) == (1, {}, []), reader
    assert changes(recording, spec, renderer, 1) == ()


@pytest.mark.parametrize("name", [name for name, scene in SCENES.items() if "raise" in name or "hangs" in name])
def test_a_fault_that_does_not_come_back_is_a_difference(
    name: str, spec: EnvSpec, renderer: Renderer, tmp_path: Path
) -> None:
    recording = recorded(tmp_path, SCENES[name], spec, renderer)
    mended = spec.model_copy(update={"options": {"mended": True}})
    for reader in (None, renderer):
        (found,) = replayed(recording, mended, reader).differing
        assert {each.kind for each in found.differences} == {"end reason"}
        assert found.differences[0].recorded.startswith(f"{SCENES[name].end.value}: ")


@pytest.mark.parametrize(
    "name",
    ["a step that raises", "a first step that raises", pytest.param("a step that hangs", marks=pytest.mark.slow)],
)
def test_a_fault_that_counts_replays_and_is_a_difference_where_it_is_worth_something_else(
    name: str, spec: EnvSpec, renderer: Renderer, tmp_path: Path
) -> None:
    counts = spec.model_copy(update={"on_tool_fault": "reward_min", "reward_min_val": -1.0})
    recording = recorded(tmp_path, replace(SCENES[name], end=EndReason.TOOL_FAULT), counts, renderer)
    assert [(episode.reward, episode.end_reason) for episode in recording.episodes()] == [(-1.0, "tool_fault")]
    assert changes(recording, counts, renderer, 1) == ()
    for reader in (None, renderer):
        assert replayed(recording, counts, reader).differing == []
        for other in (spec, spec.model_copy(update={"options": {"mended": True}})):
            (found,) = replayed(recording, other, reader).differing
            assert {each.kind for each in found.differences} == {"end reason"}
            assert found.differences[0].recorded.startswith("tool_fault: ")
        (found,) = replayed(recording, counts.model_copy(update={"reward_min_val": -2.0}), reader).differing
        assert {each.kind for each in found.differences} == {"reward"}


def test_a_fault_that_the_model_read_replays(renderer: Renderer, tmp_path: Path) -> None:
    entry = {"entry_point": "tests.faulty_tools:Tools", "description": "x", "max_turns": 3}
    spec = EnvSpec(id="tools", **entry)  # type: ignore[arg-type]
    call = '<tool_call>{"name": "do", "arguments": {"deed": "raise"}}</tool_call>'
    recording = recorded(tmp_path, Scene(EndReason.COMPLETED, says=((call, "stop"), ("two", "stop"))), spec, renderer)
    (episode,) = recording.episodes()
    assert episode.turns[0].info["tool_calls"][0]["outcome"] == "tool_fault"
    for reader in (None, renderer):
        assert replayed(recording, spec, reader).differing == []
        (found,) = replayed(recording, spec.model_copy(update={"on_tool_fault": "drop"}), reader).differing
        assert found.differences[0].kind == "end reason"


def test_an_episode_that_was_never_begun_is_counted_and_said(spec: EnvSpec, renderer: Renderer, tmp_path: Path) -> None:
    episode, played = play(SCENES["completed"], spec, renderer)
    nothing = np.zeros(0)
    unplayed = replace(
        played, ids_T=nothing.astype(np.int64), mask_T=nothing.astype(bool), logprobs_T=nothing.astype(np.float32),
        turns=(), messages=question("Go on."), end_reason=EndReason.ABORTED, error="the engine is gone", reward=0.0,
        prompt_length=0,
    )  # fmt: skip
    with Recorder(tmp_path, build_manifest(spec, renderer, "tiny", {"train": episode})) as recorder:
        recorder.write(unplayed, step=1)
        recorder.write(replace(played, sample_index=1), step=1)
    for reader in (None, renderer):
        outcome = replayed(Recording.open(tmp_path), spec, reader)
        assert (outcome.num_episodes, outcome.num_replayed, outcome.differing) == (2, 1, [])
        assert outcome.skipped == {"ended before the first turn": 1}


def test_an_episode_whose_metadata_are_known_as_text_only_is_not_compared(
    spec: EnvSpec, renderer: Renderer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = recorded(tmp_path / "x", SCENES["completed"], spec, renderer)
    (episode,) = recording.episodes()
    episode_2 = play(SCENES["completed"], spec, renderer)
    with Recorder(tmp_path / "y", build_manifest(spec, renderer, "tiny", {"train": episode_2[0]})) as recorder:
        recorder.write(replace(episode_2[1], metadata={"acts": ("say", "done"), "key": {1, 2}}, reward=7.0), step=1)
        recorder.write(replace(episode_2[1], sample_index=1), step=1)
    outcome = replayed(Recording.open(tmp_path / "y"), spec, None)
    assert episode.is_exact and outcome.num_replayed == 1 and outcome.differing == []
    assert run([str(tmp_path / "y"), "--registry", spec.origin]) == 3
    said = "1 not replayed, whose label or metadata JSON cannot hold, so a difference proves nothing: train-0-0"
    assert said in capsys.readouterr().out


def test_episodes_with_damaged_or_exchanged_images_are_counted_and_the_others_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FOLDER / "geo3k", copy)
    first, second, *_ = sorted((copy / "images").iterdir())
    first.write_bytes(first.read_bytes()[:100])
    Image.new("RGB", (160, 128)).save(second)
    assert run([str(copy)]) == 3  # not all were replayed
    out = capsys.readouterr().out
    assert "must be a whole image" in out or "must be the image that was recorded" in out
    num_skipped = int(out.split(" not replayed, cannot be read: ")[0].split()[-1])
    assert 0 < num_skipped < 23 and f"23 episodes, {23 - num_skipped} replayed, 0 differ" in out
    shutil.copytree(FOLDER / "geo3k", tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost" / "images")
    assert exit_code(lambda: run([str(tmp_path / "lost")])) == 2  # nothing was compared, which is no success
    assert "must hold an episode that can be replayed, got 23 that cannot" in capsys.readouterr().err


def test_environments_in_processes_of_their_own_replay(spec: EnvSpec, renderer: Renderer, tmp_path: Path) -> None:
    recording = recorded(tmp_path, SCENES["all turns"], spec, renderer)
    isolated = spec.model_copy(update={"isolation": "process", "reset_timeout_s": 60.0, "step_timeout_s": 60.0})
    assert replayed(recording, isolated, None).differing == []
    mended = isolated.model_copy(update={"entry_point": "envs.guess:GuessEnv"})
    assert set(kinds(replayed(recording, mended, None).differing)) == {"observation", "info", "reward"}


SLIME = """
def build_env(sample=None, args=None, **_):
    return Theirs(sample)


class Theirs:
    def __init__(self, sample):
        self.turn = 0

    def reset(self):
        return {}, {}

    def step(self, text):
        self.turn += 1
        observation = {"obs_str": f"turn {self.turn}", "role": "tool"} if self.turn < 2 else {}
        return observation, self.turn == 2, {"n": self.turn}

    def format_observation(self, observation):
        return {"role": "tool", "content": observation["obs_str"]}

    def close(self):
        pass
"""


def test_environments_of_slimes_contract_replay(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "theirs_env.py").write_text(SLIME)
    entry = {"entry_point": "theirs_env", "description": "x", "max_turns": 3, "compat": "slime"}
    (tmp_path / "registry.yaml").write_text(json.dumps({"theirs": entry}))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        spec = get_spec("theirs", tmp_path / "registry.yaml")
        recording = recorded(tmp_path / "rec", Scene(EndReason.COMPLETED), spec, renderer)
        for reader in (None, renderer):
            assert replayed(recording, spec, reader).differing == []
