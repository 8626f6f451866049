"""Claims about recordings of agents: a replay runs the agent again, and a fork lets it go on from one of its turns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agents.engines.scripted import ScriptedEngine
from agents.recording import Recorder, Recording
from agents.recording.manifest import build_manifest
from agents.rendering.renderer import Renderer
from agents.replay import ReplayConfig, open_all
from agents.replaying.fork import Fork
from agents.replaying.replayer import ReplayContext
from agents.replaying.runner import ReplaySummary, replay
from agents.replaying.stream_replayer import StreamReplayer
from agents.types import EndReason
from envs.errors import UserError
from tests.agents.gateway.playing import ASK, command, entry, loop_of, script

#: Asks in two conversations, then goes on in the first.
AGENT = f"""{ASK}
first = ask(task["messages"])
ask([{{"role": "user", "content": "Who are you?"}}])
print(ask([*task["messages"], first, {{"role": "user", "content": "Sure?"}}])["content"])
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    return command(tmp_path, AGENT)


@pytest.fixture
def recording(renderer: Renderer, program: str, tmp_path: Path) -> Recording:
    loop, build, task = loop_of(renderer, program, "\\boxed{4}", "A judge.", "\\boxed{5}")
    trajectory = asyncio.run(loop.run(task, build, seed=7))
    assert (trajectory.end_reason, len(trajectory.streams), trajectory.reward) == (EndReason.COMPLETED, 2, 1.0)
    with Recorder(tmp_path / "run", build_manifest(entry(program), renderer, "tiny", {"train": loop})) as recorder:
        recorder.write(trajectory, step=1)
    return Recording.open(tmp_path / "run")


def replayed(recording: Recording, program: str, renderer: Renderer) -> ReplaySummary:
    player = StreamReplayer(ReplayContext(recording, entry(program)), renderer)
    return asyncio.run(replay(player, recording.episodes()))


def test_an_agent_that_has_not_changed_writes_the_recorded_streams_again(
    recording: Recording, program: str, renderer: Renderer
) -> None:
    summary = replayed(recording, program, renderer)
    assert (summary.num_replayed, summary.num_turns, summary.differing) == (1, 3, [])


def test_an_agent_that_asks_otherwise_differs_from_that_turn_on(
    recording: Recording, program: str, renderer: Renderer, tmp_path: Path
) -> None:
    command(tmp_path, AGENT.replace("Who are you?", "Who am I?"))
    (found,) = replayed(recording, program, renderer).differing
    assert {difference.turn for difference in found.differences} == {2}


def test_a_fork_gives_the_agent_its_recorded_turns_and_then_other_ones(
    recording: Recording, program: str, renderer: Renderer
) -> None:
    (episode,) = recording.episodes()
    context = ReplayContext(recording, entry(program))
    fork = Fork(episode, 2, context, renderer, context.way(episode))
    assert asyncio.run(fork.changes()) == ()
    loop = fork.loop(ScriptedEngine(renderer.tokenizer, script("\\boxed{6}")), 1)
    (trajectory,) = asyncio.run(fork.play(loop, (7,)))
    assert [turn.text for turn in trajectory.turns] == ["\\boxed{4}", "A judge.", "\\boxed{6}"]
    assert trajectory.turns[-1].info == {"result": "\\boxed{6}"} and trajectory.reward == 0.0


def test_a_replay_without_a_model_asks_for_one(recording: Recording, program: str) -> None:
    inputs = open_all(ReplayConfig(run=str(recording.folder)), entry(program))
    with pytest.raises(UserError, match="--model: must be given to replay 'agent', an agent"):
        _ = inputs.replayer
