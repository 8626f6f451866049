"""Claims about runs whose episodes go on while the learner learns: what they train on, and how they end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine
from agents.recording import Recording
from agents.types import Trajectory
from tests.environments import environment, lucky_geometry
from tests.flags import last_of_each
from tests.recordings import episodes_in, lines_of
from tests.servers import serving
from tests.trainer.test_run import SMALL, train
from trainer.checkpoint.checkpointer import _write_manifest
from trainer.config.sources import read_config
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.rollouts.live import LiveRollouts
from trainer.rollouts.session import TrainingSession
from trainer.run import run
from trainer.weight_sync.sync import WeightSync

STEPS = 4
#: Problems whose metadata no checkpoint can hold, and a callback that ends the run after its second step.
OWN_GRADERS = """
from envs.env import Env
from envs.types import Sample
from trainer.callbacks import Callback, Stop
class Graded(Env):
    def __init__(self, sample): self.grade = sample.metadata["grade"]
    def reset(self): return {}, {}
    def step(self, text): return {}, True, {}
    def reward(self, text): return self.grade(text)
def build_env(sample=None, args=None, **_): return Graded(sample)
def problems(split="train", size=8, seed=0):
    prompts = [({"role": "user", "content": f"Say {number}."},) for number in range(size)]
    return [Sample(str(n), prompt, None, {"grade": lambda text: len(text) % 3}) for n, prompt in enumerate(prompts)]
class Short(Callback):
    def on_step_end(self, step, row): return Stop("enough") if step == 2 else None
"""


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of a run whose steps all teach something."""
    with lucky_geometry(tmp_path_factory.mktemp("lucky"), "lucky_geometry", "return float(len(text) % 3)") as flags:
        yield [*flags, "--lr", "1e-2", "--warmup-steps", "0", "--group-size", "4"]


@pytest.fixture(scope="module")
def recorded(checkpoint: Path, lucky: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    train(checkpoint, folder, *lucky, "--max-staleness", "2", steps=STEPS, eval_size=0)
    return folder


def test_a_recording_of_an_asynchronous_run_replays_to_the_bit(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = lines_of(recorded / "metrics.jsonl")
    assert max(row["staleness/max"] for row in rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    model = read_config(recorded / "config.yaml").model.model
    argv = ["--replay-rollouts", str(recorded), "--model", model, "--tracker=", "--out", str(tmp_path)]
    assert run([*argv, "--name", "replay"]) == 0
    assert f"equal to the bit in {STEPS} of {STEPS} steps" in " ".join(capsys.readouterr().out.split())
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (tmp_path / "replay", recorded))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("where", ["embedded", "servers"])
def test_the_engine_of_a_run_is_told_to_keep_its_cache(
    checkpoint: Path, lucky: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    owner, name = (HFEngine, "load_weights") if where == "embedded" else (SGLangEngine, "update")
    load, told = getattr(owner, name), []

    def loading(self: Any, *args: Any) -> Any:
        told.append(self.keeps_kv_cache if where == "embedded" else self.settings.keeps_kv_cache)
        return load(self, *args)

    monkeypatch.setattr(owner, name, loading)
    with ExitStack() as stack:
        given = ["--engine-url", stack.enter_context(serving(checkpoint, "--has-cache"))] if where == "servers" else []
        argv = [*lucky, *given, "--max-staleness", "2", "--keep-kv-cache"]
        train(checkpoint, tmp_path / "run", *argv, eval_size=0)
    assert set(told) == {True}


def test_a_run_plays_no_group_that_it_does_not_train_on(recorded: Path) -> None:
    assert Counter(e["fate"] for e in episodes_in(recorded)) == {"train": STEPS * 2 * 4}


def test_a_run_that_only_plays_begins_no_group_that_it_does_not_hand_out(
    checkpoint: Path, lucky: list[str], tmp_path: Path
) -> None:
    """Its weights stay those of version 0, whatever the step."""
    train(checkpoint, tmp_path / "run", *lucky, "--rollout-only", "--max-staleness", "2", steps=3)
    assert Counter(e["fate"] for e in episodes_in(tmp_path / "run")) == {"train": 3 * 2 * 4}


def test_episodes_go_on_while_a_checkpoint_is_summed_up(
    checkpoint: Path, lucky: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, seen = threading.Semaphore(0), list[bool]()
    on_episode, is_written, write = TrainingSession.on_episode, FSDPLearner.is_checkpoint_written, _write_manifest

    def noted(session: TrainingSession, trajectory: Trajectory) -> None:
        on_episode(session, trajectory)
        ended.release()

    def slowly(folder: Path, step: int) -> None:
        while ended.acquire(blocking=False):
            pass
        seen.append(ended.acquire(timeout=2.0))
        write(folder, step)

    monkeypatch.setattr(TrainingSession, "on_episode", noted)
    monkeypatch.setattr(FSDPLearner, "is_checkpoint_written", lambda learner, wait: is_written(learner, wait=True))
    monkeypatch.setattr("trainer.checkpoint.checkpointer._write_manifest", slowly)
    ahead = ["--max-staleness", "2", "--max-concurrent", "1", "--save-every", "1"]
    train(checkpoint, tmp_path / "run", *lucky, *ahead, steps=4, eval_size=0)
    assert len(seen) == 4 and seen[0]


def test_the_loss_of_a_step_with_tokens_of_several_versions_is_that_of_decoupled_ppo(recorded: Path) -> None:
    """Worked out from the recording alone: the engine's log-probs when a token was written are the behaviour's, the
    learner's before the update the proximal policy's; before the first update PPO's own ratio is 1."""
    recording = Recording.open(recorded)
    scores = recording.scores()
    corrected = 0
    for row in lines_of(recorded / "metrics.jsonl"):
        terms = []
        for e in episodes_in(recorded):
            if e["fate"] != "train" or e["step"] != row["step"] or e["advantage"] is None:
                continue
            proximal_N, behaviour_N = np.array(scores[e["id"]].logprobs), np.array(e["logprobs"])
            weight_N = np.minimum(np.exp(proximal_N - behaviour_N), 2.0)
            terms.append(-weight_N * e["advantage"])
            version_N = np.concatenate([[v] * n for turn in e["turns"] for v, n in turn["versions"]])
            is_new_N = version_N == row["step"] - 1
            assert np.abs(proximal_N - behaviour_N)[is_new_N].max(initial=0) < 1e-3
            corrected += int((np.abs(weight_N - 1) > 0.01)[~is_new_N].sum())
        assert row["loss"] == pytest.approx(np.concatenate(terms).mean(), rel=1e-4, abs=1e-6)
    assert corrected > 10


def test_a_run_without_a_correction_says_what_it_does(
    checkpoint: Path, lucky: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(checkpoint, tmp_path / "run", *lucky, "--max-staleness", "1", "--correction", "none", steps=1, eval_size=0)
    assert "--correction none trains on tokens of older weights" in capsys.readouterr().out


def test_a_problem_set_smaller_than_what_is_played_ahead_is_read_again(
    checkpoint: Path, lucky: list[str], tmp_path: Path
) -> None:
    few = ["--train-size", "3", "--max-staleness", "4", "--max-concurrent", "1"]
    train(checkpoint, tmp_path / "run", *lucky, *few, steps=3, eval_size=0)
    trained = [e for e in episodes_in(tmp_path / "run") if e["fate"] == "train"]
    assert list(dict.fromkeys(e["group"] for e in trained)) == [0, 1, 2, 3, 4, 5]
    assert len({e["sample_id"] for e in trained}) == 3
    assert max(Counter(e["seed"] for e in trained).values()) == 1


@pytest.mark.parametrize("phase", ["collect", "learn", "push", "evaluate"])
def test_an_interrupt_in_any_phase_ends_the_run_with_every_episode_accounted_for(
    checkpoint: Path, lucky: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    owner, name = {
        "collect": (LiveRollouts, "collect"),
        "learn": (FSDPLearner, "step"),
        "push": (WeightSync, "push"),
        "evaluate": (LiveRollouts, "evaluate"),
    }[phase]
    work, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    folder = tmp_path / "run"
    argv = ["--model", str(checkpoint), "--steps", "9", "--eval-size", "3", "--eval-every", "1", *SMALL, *lucky]
    argv += ["--max-staleness", "2", "--tracker=", "--out", str(tmp_path), "--name", "run"]
    assert run(last_of_each(argv)) == 130
    summary, episodes = json.loads((folder / "summary.json").read_text()), episodes_in(folder)
    rows = lines_of(folder / "metrics.jsonl")
    assert summary["interrupted"] and summary["steps_done"] == len(rows) in (1, 2)
    assert {e["fate"] for e in episodes} == {"train", "aborted"}
    assert sum(summary["end_reasons"].values()) == len(episodes) == len({e["seed"] for e in episodes})
    assert len({e["group"] for e in episodes if e["fate"] == "train"}) == 2 * summary["steps_done"]


def test_an_interrupt_of_the_evaluation_that_a_resumed_run_begins_with_accounts_for_what_was_in_flight(
    checkpoint: Path, lucky: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, calls, folder = LiveRollouts.evaluate, itertools.count(1), tmp_path / "run"

    def interrupted(*args: Any) -> Any:
        if next(calls) > 1:  # after the one before the first step
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(LiveRollouts, "evaluate", interrupted)
    argv = ["--model", str(checkpoint), "--steps", "9", "--eval-size", "3", "--eval-every", "1", *SMALL, *lucky]
    argv += ["--max-staleness", "2", "--tracker=", "--out", str(tmp_path), "--name", "run"]
    assert run(last_of_each(argv)) == 130
    assert (folder / "checkpoints" / "step-1" / "config.yaml").is_file()
    assert run(["--resume", str(folder)]) == 130
    summary, episodes = json.loads((folder / "summary.json").read_text()), episodes_in(folder)
    assert {e["fate"] for e in episodes} == {"train", "aborted"}
    assert sum(summary["end_reasons"].values()) == len(episodes)


def test_groups_in_flight_are_kept_also_where_the_metadata_of_their_problems_cannot_be(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with environment(tmp_path, "own_graders", OWN_GRADERS, dataset="own_graders:problems") as flags:
        short = ["--max-staleness", "2", "--callback", "own_graders:Short"]
        train(checkpoint, folder, *flags, *short, steps=4, eval_size=0)
        assert run(["--resume", str(folder), "--callback="]) == 0
    recorded = lines_of(folder / "episodes" / "episodes.jsonl.gz")  # each once
    assert len(recorded) == len({e["id"] for e in recorded}) == STEPS * 2 * 2
