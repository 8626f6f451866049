"""Claims about code of the user: every kind on the page works from a file outside, and what is wrong is said first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agents.recording import Recording
from envs.config.settings import flag_of, leaves, takes_code
from envs.errors import UserError
from tests.paths import ROOT
from trainer.config.run import RunConfig
from trainer.run import run

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
#: Two quick steps without evaluation.
QUICK = ["--steps=2", "--problems-per-step=2", "--group-size=4", "--eval-size=0", "--doctor=off", "--train-size=8"]
QUICK += ["--name=run", "--save-every=0"]


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files that the page shows into an empty folder, and go there."""
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[list[str]]:
    found = re.findall(r"^\$ python -m trainer\.run (.*)$", PAGE, re.MULTILINE)
    assert len(found) >= 6
    return [command.split() for command in found]


def train(*flags: str) -> list[dict[str, float]]:
    tracker = [] if any(flag.startswith("--tracker") for flag in flags) else ["--tracker="]
    assert run([*QUICK, *tracker, *flags]) == 0
    return [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("flags", commands(), ids=lambda flags: flags[0].strip("-"))
def test_every_command_of_the_page_trains(flags: Sequence[str], page_files: Path) -> None:
    rows = train(*flags)
    assert len(rows) == 2
    if "--tracker" in flags:
        assert len((page_files / "runs/run/rewards.txt").read_text().splitlines()) == 2


def test_the_reward_is_the_weighted_sum_in_metrics_and_recording(page_files: Path) -> None:
    rows = train("--reward", "answer@2", "--reward", "my_rewards.py:brevity@0.5")
    for row in rows:
        assert row["reward"] == pytest.approx(2 * row["reward/answer"] + 0.5 * row["reward/brevity"])
    for episode in Recording.open("runs/run").episodes():
        assert episode.rewards["brevity"] == -len(episode.logprobs) / 256
        assert episode.reward == pytest.approx(2 * episode.rewards["answer"] + 0.5 * episode.rewards["brevity"])
        assert episode.env_reward == episode.rewards["answer"] in (0.0, 1.0)


def test_without_answer_in_the_list_the_environments_reward_does_not_count(page_files: Path) -> None:
    for row in train("--reward", "my_rewards.py:brevity"):
        assert row["reward"] == pytest.approx(row["reward/brevity"])


BROKEN = """
import math, time
def raises(t): raise KeyError("no such thing")
def hangs(t): time.sleep(60)
def nothing(t): pass
def endless(t): return math.inf
def flag(t): return True
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raises", "the reward function raises failed: KeyError: 'no such thing' (my.py:3)"),
        ("hangs", "took longer than 0.5 s (my.py:4)"),
        ("endless", "the reward function endless must return a finite number, got inf (my.py:6)"),
        ("flag", "must return a finite number, got True; write float(...) (my.py:7)"),
    ],
)
def test_a_reward_function_that_fails_is_named_with_its_line_before_step_0(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(BROKEN)
    monkeypatch.setenv("TRUETURN_STEP_TIMEOUT_S", "0.5")
    with pytest.raises(UserError) as caught:
        train("--reward", "answer", "--reward", f"my.py:{name}")
    assert told in str(caught.value)


def test_a_run_in_which_no_episode_can_be_scored_ends_with_code_1_and_names_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("def later(t):\n    return 1.0 / (t.seed == 0)\n")
    monkeypatch.setenv("TRUETURN_RESAMPLE", "0")
    assert run([*QUICK, "--reward=my.py:later", "--tracker="]) == 1
    told = "nothing was learnt in 2 steps in a row: the reward function later failed: ZeroDivisionError"
    assert told in capsys.readouterr().err
    assert {e.end_reason.value for e in Recording.open("runs/run").episodes()} == {"reward_error"}


ODD = """
import torch
def adv_raises(groups, config): return 1 / 0
def adv_few(groups, config): return [[0.0] for g in groups]
def adv_nan(groups, config): return [[float("nan")] * len(g.valid) for g in groups]
def adv_turns(groups, config): return [[[1.0] * 9 for t in g.valid] for g in groups]
def loss_shape(tokens, config):
    from trainer.algorithms.policy_loss import PolicyTerms
    return PolicyTerms(tokens.logprobs_N.sum(), tokens.logprobs_N > 0, tokens.logprobs_N)
def loss_type(tokens, config): return tokens.logprobs_N
def correct(tokens, config): return torch.ones(3), torch.ones(3)
def keep(group): return "yes"
def order(samples, seed, epoch): return [0]
def few(a): return a
number = 3
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "name", "told"),
    [
        (
            "advantage",
            "adv_raises",
            "'{file}:adv_raises' must not raise, got ZeroDivisionError: division by zero (my.py:3)",
        ),
        ("advantage", "adv_few", "must return what an advantage does (zip() argument 2 is shorter than argument 1)"),
        ("advantage", "adv_nan", "(nan is not finite)"),
        ("advantage", "adv_turns", "turns have advantages of shape (9,)"),
        ("policy-loss", "loss_shape", "tokens need a tensor of that shape, not ()"),
        ("policy-loss", "loss_type", "(it must be PolicyTerms)"),
        ("correction", "correct", "tokens need a tensor of that shape, not (3,)"),
        ("group-filter", "keep", "(it must be True or False)"),
        ("sampler", "order", "(it must be 8 indices from 0 to 7)"),
        ("advantage", "few", "'{file}:few' must take groups, config, got (a): too many positional arguments"),
        ("advantage", "nope", "'{file}' must define it, got nope; known:"),
        ("policy-loss", "number", "must be callable, got int"),
    ],
)
def test_a_wrong_function_is_one_line_that_names_flag_function_and_rule(
    flag: str, name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(ODD)
    with pytest.raises(UserError) as caught:
        train(f"--{flag}", f"my.py:{name}")
    assert str(caught.value).startswith(f"--{flag}: ")
    assert told.replace("{file}", str(tmp_path / "my.py"))[:120] in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--advantage", "nope"],
            "--advantage: must be 'grpo', 'rloo', 'reinforce++', 'turn' or 'gigpo', or module:NAME or file.py:NAME",
        ),
        (["--advantage", "no.py:f"], "no.py' must import, got no such file"),
        (["--advantage", "no_such_module:f"], "'no_such_module' must import, got ModuleNotFoundError"),
        (["--reward", "answer@x"], "--reward: must have a number as its weight after @, which 'x' is not"),
        (["--reward", "answer@nan"], "which 'nan' is not"),
        (["--reward", "answer", "--reward", "answer@2"], "--reward: must name each reward once, got answer"),
        (["--grader", "1:2"], "--grader: must be 'math', 'geo3k_strict' or 'geo3k_tolerance', or module:NAME"),
        (["--tracker", "no.py:T"], "--tracker: '"),
    ],
)
def test_what_cannot_be_found_is_said_before_anything_is_made(
    flags: Sequence[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        train(*flags)
    assert told in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--reward", "--callback"])
def test_a_pipe_is_no_file_of_code_and_is_not_waited_for(flag: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.py")
    with pytest.raises(UserError, match=r"mine.py' must import, got no such file"):
        train(flag, f"{tmp_path / 'mine.py'}:f")


UNGUARDED = """
from envs import ToolEnv
from envs.config.plugins import import_object

class Shop(ToolEnv):
    pass

print("begins")
import_object("environment", "shop.py:Shop")        # as training in it does, and every worker that imports it
"""


def test_a_file_that_trains_in_what_it_defines_is_told_to_guard_its_code(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(UNGUARDED)
    command = [sys.executable, "shop.py"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=variables)
    assert done.stdout.count("begins") == 2 and done.returncode != 0
    assert "must not be used by the file that defines it while that is imported, got shop.py" in done.stderr
    definitions, _, code = UNGUARDED.partition('print("begins")\n')
    (tmp_path / "shop.py").write_text(f'{definitions}if __name__ == "__main__":\n    {code}')
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False, env=variables).returncode == 0


def test_a_recording_never_makes_its_reader_run_code_that_it_names(page_files: Path) -> None:
    own = ["--advantage=my_advantages.py:turn_level", "--sampler=my_choices.py:easy_first", "--reward=answer"]
    train(*own, "--reward=my_rewards.py:brevity@0.1")
    again = ["--replay-rollouts=runs/run", "--name=again", "--tracker=", "--steps=1"]
    with pytest.raises(
        UserError, match=r"algorithm.advantage: names code, which is not run .* give --advantage yourself"
    ):
        run(again)
    assert run([*again, "--advantage=grpo"]) == 0


def test_turns_of_an_episode_may_have_advantages_of_their_own(page_files: Path) -> None:
    train("--advantage=my_advantages.py:turn_level")
    recording = Recording.open("runs/run")
    outcomes = recording.outcomes()
    several = [episode for episode in recording.episodes() if len(episode.turns) == 2]
    assert several
    for episode in several:
        first, second = outcomes[episode.id].turn_advantages
        assert second == pytest.approx(2 * first) and outcomes[episode.id].advantage == pytest.approx(
            (first + second) / 2
        )


def test_the_page_has_every_flag_that_takes_code() -> None:
    own = {flag_of(path[-1], field) for path, field in leaves(RunConfig) if takes_code(field)}
    assert {flag for flag in own if f"`{flag}" not in PAGE} == set()
