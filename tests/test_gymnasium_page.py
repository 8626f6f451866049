"""What the page on Gymnasium shows works: its entries are read, and MiniGrid is checked, played and trained on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.registry import get_spec
from tests.pages import code_block, is_shown, session
from tests.paths import ROOT
from tests.processes import run_command

PAGE = (ROOT / "docs" / "gymnasium.md").read_text(encoding="utf-8")
#: What MiniGrid imports and the development tools do not bring.
PACKAGES = ("minigrid>=3,<4", "pygame-ce>=2.4,<3")


def test_the_one_line_entry_of_the_page_is_valid(tmp_path: Path) -> None:
    (tmp_path / "registry.yaml").write_text(code_block(PAGE, "yaml", "gymnasium: FrozenLake-v1"))
    spec = get_spec("frozen_lake", tmp_path / "registry.yaml")
    prompt = spec.load_dataset("train", 1, 0)[0].prompt[0]["content"]
    shown = re.search(r'The prompt is "(.*?) \.\.\."', PAGE)
    assert spec.max_turns > 1 and shown and prompt.startswith(shown[1])


def test_the_python_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    exec(code_block(PAGE, "python", "import gymnasium"), names)
    assert names["reward"] in (0.0, 1.0) and names["terminated"] and not names["truncated"]


@pytest.fixture(scope="module")
def site(pytestconfig: pytest.Config) -> Path:
    """Return a folder with MiniGrid, kept from one run of the tests to the next."""
    # Without the packages that it requires: it must run with those that are here, such as our Gymnasium.
    kept = pytestconfig.cache.mkdir("minigrid")  # pyright: ignore[reportOptionalMemberAccess]
    target = kept / f"{sys.implementation.cache_tag}-{'-'.join(PACKAGES)}".translate(str.maketrans("<>=", "___"))
    if not target.is_dir():
        partial = target.with_suffix(f".{os.getpid()}")  # an interrupted installation is not taken for a whole one
        options = ["--no-deps", "--retries=1", "--timeout=20", "--disable-pip-version-check", f"--target={partial}"]
        pip = [sys.executable, "-m", "pip", "install", *options, *PACKAGES]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode and re.search("connection|timed out|name resolution", done.stderr, re.IGNORECASE):
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[0][:200]}")
        assert done.returncode == 0, done.stderr
        partial.replace(target)
    return target


@pytest.fixture
def play(site: Path, tmp_path: Path):
    """Return what runs a command of the page in a folder with its registry file."""
    (tmp_path / "registry.yaml").write_text(code_block(PAGE, "yaml", "# registry.yaml"))

    def run(argv: Sequence[str], written: str = "", *more: str) -> str:
        env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "COLUMNS": "110"}
        done = run_command(*argv, *more, cwd=tmp_path, env=env, written=written, timeout_s=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_minigrid_passes_the_check(play) -> None:
    argv, shown = session(PAGE, "envs.check")
    assert play(argv).splitlines()[-1] == shown.splitlines()[-1]


@pytest.mark.slow
def test_minigrid_plays_in_the_terminal_as_shown(play, tmp_path: Path) -> None:
    argv, shown = session(PAGE, "agents.play")
    goal = ["forward", "forward", "right", "forward", "forward"]
    typed = "".join(f':call act {{"action": "{action}"}}\n.\n' for action in goal)
    printed = play(argv, typed)
    assert printed.startswith(shown.removesuffix("...\n"))
    assert "'terminated': True" in printed and re.search(r"reward 0\.9\d", printed), printed
    assert len(list((tmp_path / "play").iterdir())) == len(goal) + 1


@pytest.mark.slow
# Trains: two small groups in place of the command's own.
def test_minigrid_trains(play, tmp_path: Path) -> None:
    argv, shown = session(PAGE, "trainer.run")
    small = ["--problems-per-step=2", "--group-size=2", "--eval-size=1", "--name=grid"]
    printed = play(argv, "", *small)
    assert is_shown(shown, printed), printed
    summary = json.loads((tmp_path / "runs" / "grid" / "summary.json").read_text())
    assert summary["end_reasons"] and not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()
