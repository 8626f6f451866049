"""What the README shows works as shown."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import envs.check
from agents.replay import ReplayConfig
from agents.view import ViewConfig
from envs.config.cli import leaves
from tests.pages import code_block
from tests.paths import ROOT
from tests.processes import run_command
from trainer.config.evaluation import EvaluateConfig
from trainer.config.run import RunConfig
from trainer.config.sft import SftConfig
from trainer.run import run

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder outside of the repository with the README's environment, its entry and two rows."""
    (tmp_path / "shop.py").write_text(code_block(README, "python", "ShopEnv"))
    (tmp_path / "shop.yaml").write_text(code_block(README, "yaml", "shop:ShopEnv"))
    rows = [("an apple and a pear", 7), ("two plums and a melon", 11)]
    lines = [json.dumps({"problem": f"What do {what} cost?", "answer": str(sum)}) for what, sum in rows]
    (tmp_path / "shop.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shop", None)


def commands() -> dict[str, list[str]]:
    """Return the arguments of the README's commands for its environment, by module."""
    lines = [line.partition("#")[0].split() for line in code_block(README, "console", "envs.check shop").splitlines()]
    return {words[3]: words[4:] for words in lines}


def test_the_environment_of_the_readme_has_twenty_lines() -> None:
    assert len([line for line in code_block(README, "python", "ShopEnv").splitlines() if line.strip()]) <= 20


def test_the_environment_of_the_readme_passes_the_check(shop: Path) -> None:
    assert envs.check.run(commands()["envs.check"]) == 0


def test_the_environment_of_the_readme_can_be_played(shop: Path, checkpoint: Path) -> None:
    written = ':call price {"fruit": "apple"}\n.\n:call price {"fruit": "pear"}\n.\n\\boxed{7}\n.\n'
    env = {"PYTHONPATH": os.pathsep.join([str(shop), str(ROOT)])}
    argv = [*commands()["agents.play"], "--model", str(checkpoint)]
    done = run_command("agents.play", *argv, cwd=shop, env=env, written=written)
    assert done.returncode == 0, done.stderr
    assert "completed, reward 1, 3 turns" in done.stdout


def test_the_environment_of_the_readme_trains(shop: Path, checkpoint: Path) -> None:
    argv = [*commands()["trainer.run"], "--model", str(checkpoint), "--steps", "1", "--group-size", "2"]
    assert run([*argv, "--problems-per-step", "2", "--max-new-tokens", "30", "--name", "readme"]) == 0
    summary = json.loads((shop / "runs" / "readme" / "summary.json").read_text())
    assert sum(summary["end_reasons"].values()) == 4
    assert not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()


def test_every_flag_in_the_readme_exists() -> None:
    models = (RunConfig, SftConfig, EvaluateConfig, ReplayConfig, ViewConfig)
    flags = {"--" + path[-1].replace("_", "-") for model in models for path, _ in leaves(model)}
    # Of pip, the demonstrations, the computed memory, and every command.
    others = {"--index-url", "--num", "--out", "--gpus", "--memory-gib", "--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named <= flags | others, named - flags - others


def test_every_file_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"[`(]((?:agents|benchmarks|docs|envs|tests|trainer)/[\w./-]+)", README))
    assert len(named) > 15
    assert all((ROOT / path).exists() for path in named), [path for path in named if not (ROOT / path).exists()]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
