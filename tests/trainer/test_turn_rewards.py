"""Claims about a run with rewards by turn: trained on, recorded, shown, replayed, and weighted as the settings say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agents.recording.recording import Recording
from agents.replay import run as replay
from trainer.algorithms.advantages import returns_to_go
from trainer.run import run

FLAGS = ["--env=coins", "--steps=1", "--problems-per-step=2", "--group-size=4", "--eval-size=0", "--doctor=off"]
PLACE = ["--train-size=8", "--name=run", "--save-every=0", "--tracker=", "--temperature=2"]


@pytest.mark.parametrize("advantage", ["turn", "gigpo"])
def test_a_run_records_the_reward_and_the_advantage_of_each_turn(
    advantage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["--advantage", advantage, "--discount=0.5", "--reward=answer@2"]
    assert run([*FLAGS, *PLACE, *own]) == 0
    recording = Recording.open("runs/run")
    outcomes = recording.outcomes()
    episodes = list(recording.episodes())
    assert any(turn.reward for episode in episodes for turn in episode.turns)
    for episode in episodes:
        earned = [turn.reward for turn in episode.turns]
        assert earned == pytest.approx([2 * turn.info.get("reward", 0.0) for turn in episode.turns])
        assert math.fsum(earned) == pytest.approx(episode.reward)
        assert len(outcomes[episode.id].turn_advantages) == len(episode.turns)
    row = json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[0])
    first = [episode.turns[0].reward for episode in episodes]
    assert row["turn_reward/1"] == pytest.approx(sum(first) / len(first))
    if advantage == "turn":  # those of a group, at their first turn, add up to 0, and are a return apart
        for group in range(2):
            own_episodes = [episode for episode in episodes if episode.group == group]
            advantages = [outcomes[episode.id].turn_advantages[0] for episode in own_episodes]
            returns = [returns_to_go([t.reward for t in e.turns], 0.5)[0] for e in own_episodes]
            assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
            assert advantages[0] - advantages[1] == pytest.approx((returns[0] - returns[1]) * 4 / 3)
    capsys.readouterr()
    assert replay(["runs/run", "--env=coins"]) == 0
    assert "0 differ" in capsys.readouterr().out


def test_a_discount_that_nothing_reads_is_refused_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    from envs.config.cli import exit_code

    assert exit_code(lambda: run([*FLAGS, "--discount=0.9"])) == 2
    assert "--discount: needs --advantage turn or gigpo, or nothing reads it, got 0.9" in capsys.readouterr().err
