"""Claims about commands that end before their first step: one line, whoever ended them, and nothing is left behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envs.config.cli import exit_code
from tests.environments import environment, write_rows
from tests.paths import ROOT
from trainer.checkpoint.session import resume_hint
from trainer.run import run

#: A program that a script starts in the background ignores Ctrl-C, and so would its children.
INTERRUPTED = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(30)
"""
SMALL = ["--steps=1", "--problems-per-step=1", "--group-size=2", "--train-size=4", "--eval-size=0", "--tracker="]


@pytest.mark.usefixtures("ctrl_c")  # a process started in the background passes on that it ignores SIGINT
@pytest.mark.parametrize("library", ["pydantic", "torch"])  # of every command, and of what runs behind its flags
@pytest.mark.parametrize("module", ["trainer.run", "trainer.evaluate", "trainer.sft"])
def test_ctrl_c_while_a_command_imports_is_one_word_and_no_traceback(module: str, library: str, tmp_path: Path) -> None:
    (tmp_path / f"{library}.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", module]
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "interrupted\n"
    assert done.returncode in (130, -signal.SIGINT)  # a shell shows both as 130
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"] == []


FAULTY = """
from envs.env import Env

class Faulty(Env):
    def __init__(self, sample, args): pass
    def reset(self): return {}, {}
    def step(self, text): raise KeyError("beta")
    def reward(self, text): return 1.0

build_env = Faulty
"""


def test_an_environment_that_raises_in_step_is_named_with_file_and_line_before_the_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", {"problem": "2+2?", "answer": "4"})
    with environment(tmp_path, "faulty_step", FAULTY) as flags:
        argv = [*flags, "--data", data, "--model", str(checkpoint), *SMALL, "--out", str(tmp_path / "runs")]
        assert exit_code(lambda: run(argv)) == 2
    error = capsys.readouterr().err
    assert "must play a turn and give a reward, got KeyError: 'beta' (faulty_step.py:7)" in error
    assert not list((tmp_path / "runs").glob("*"))


CALLBACKS = """
from trainer.callbacks import Callback
class Unmade(Callback):
    def __init__(self): raise KeyError("beta")
class Late(Callback):
    def on_begin(self, run): raise KeyError("beta")
"""


@pytest.mark.parametrize(
    ("name", "told", "num_folders"),
    [
        ("Unmade", "Unmade' must not raise, got KeyError: 'beta' (mine.py:4)", 0),
        ("Late", "Late'.on_begin must not raise, got KeyError: 'beta' (mine.py:6)", 1),
    ],
)
def test_a_callback_that_fails_leaves_a_folder_only_where_the_run_had_begun(
    name: str, told: str, num_folders: int, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(CALLBACKS)
    own = ["--callback", f"{tmp_path / 'mine.py'}:{name}", "--out", str(tmp_path / "runs")]
    assert exit_code(lambda: run(["--model", str(checkpoint), *SMALL, *own])) == 2
    assert told in capsys.readouterr().err
    assert len(list((tmp_path / "runs").glob("*"))) == num_folders


@pytest.mark.parametrize("name", ["plain", "my run", "it's", "$HOME", "`x`;y"])
def test_the_command_that_resumes_a_run_can_be_pasted_into_a_shell(name: str, tmp_path: Path) -> None:
    (tmp_path / name / "checkpoints" / "step-1").mkdir(parents=True)
    command = resume_hint("trainer.run", tmp_path / name).removeprefix("resume with: ")
    assert shlex.split(command) == ["python", "-m", "trainer.run", "--resume", str(tmp_path / name)]
