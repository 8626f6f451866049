"""What the README shows works as shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import envs.check
from agents.replay import ReplayConfig
from agents.show import ShowConfig
from agents.view import ViewConfig
from envs.cli import leaves
from trainer.config import RunConfig
from trainer.evaluate import EvaluateConfig
from trainer.run import run
from trainer.supervised.config import SftConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    """Return the code block of a language that holds a word."""
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in text)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder outside of the repository with the README's environment, its entry and two rows."""
    (tmp_path / "shop.py").write_text(block("python", "ShopEnv"))
    (tmp_path / "shop.yaml").write_text(block("yaml", "shop:ShopEnv"))
    rows = [("an apple and a pear", 7), ("two plums and a melon", 11)]
    lines = [json.dumps({"problem": f"What do {what} cost?", "answer": str(sum)}) for what, sum in rows]
    (tmp_path / "shop.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shop", None)


def commands() -> dict[str, list[str]]:
    """Return the arguments of the README's commands for its environment, by module."""
    lines = [line.partition("#")[0].split() for line in block("console", "envs.check shop").splitlines()]
    return {words[3]: words[4:] for words in lines}


def test_the_environment_of_the_readme_has_twenty_lines() -> None:
    assert len([line for line in block("python", "ShopEnv").splitlines() if line.strip()]) <= 20


def test_the_environment_of_the_readme_passes_the_check(shop: Path) -> None:
    assert envs.check.run(commands()["envs.check"]) == 0


def test_the_environment_of_the_readme_can_be_played(shop: Path, checkpoint: Path) -> None:
    written = ':call price {"fruit": "apple"}\n.\n:call price {"fruit": "pear"}\n.\n\\boxed{7}\n.\n'
    command = [sys.executable, "-m", "agents.play", *commands()["agents.play"], "--model", str(checkpoint)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shop), str(ROOT)])}
    done = subprocess.run(command, input=written, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "completed, reward 1, 3 turns" in done.stdout


def test_the_environment_of_the_readme_trains(shop: Path, checkpoint: Path) -> None:
    argv = [*commands()["trainer.run"], "--model", str(checkpoint), "--steps", "1", "--group-size", "2"]
    assert run([*argv, "--problems-per-step", "2", "--max-new-tokens", "30", "--name", "readme"]) == 0
    summary = json.loads((shop / "runs" / "readme" / "summary.json").read_text())
    assert sum(summary["end_reasons"].values()) == 4
    assert not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()


def test_every_flag_in_the_readme_exists() -> None:
    models = (RunConfig, SftConfig, EvaluateConfig, ReplayConfig, ViewConfig, ShowConfig)
    flags = {"--" + path[-1].replace("_", "-") for model in models for path, _ in leaves(model)}
    # Of pip, benchmarks, every layered command, and the demonstrations.
    others = {"--index-url", "--seeds", "--parallel", "--config", "--print-config", "--num", "--out"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named <= flags | others, named - flags - others


def test_every_file_that_the_readme_names_exists() -> None:
    package, named = "", []
    for line in block("text", "what the agent acts in").splitlines():
        if not line.startswith(" "):
            package = line.split("/")[0]
            continue
        left = re.split(r" {3,}", line.strip())[0]  # the names; what they are for stands after a gap
        named += [ROOT / package / name for name in left.split()]
    assert len(named) > 45
    assert all(path.exists() for path in named), [str(path) for path in named if not path.exists()]


def test_every_local_link_of_the_readme_leads_somewhere() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if not target.startswith("http")]
    assert links and all((ROOT / target).exists() for target in links), links
