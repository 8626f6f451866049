"""What the README shows works as shown."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from envs.cli import leaves
from trainer.config import RunConfig
from trainer.run import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    """Return the code block of a language that holds a word."""
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in text)


def test_the_environment_of_the_readme_trains(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_envs.py").write_text(block("python", "GuessEnv"))
    (tmp_path / "my_registry.yaml").write_text(block("yaml", "my_envs"))
    rows = [{"problem": "Guess a number from 1 to 9.", "answer": str(n)} for n in (3, 7)]
    (tmp_path / "secrets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["--registry", "my_registry.yaml", "--env", "guess", "--data", "secrets.jsonl", "--model", str(checkpoint)]
    assert run([*argv, "--steps", "1", "--group-size", "2", "--max-new-tokens", "30", "--name", "readme"]) == 0
    summary = json.loads((tmp_path / "runs" / "readme" / "summary.json").read_text())
    assert sum(summary["end_reasons"].values()) == 16
    assert not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()
    sys.modules.pop("my_envs")


def test_the_environment_of_the_readme_plays_by_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.types import Sample

    namespace: dict[str, object] = {}
    exec(block("python", "GuessEnv"), namespace)
    env = namespace["build_env"](Sample("s", (), label="5"))  # type: ignore[operator]
    assert env.reset() == ({}, {})
    assert env.step("3") == ({"obs_str": "Go higher."}, False, {})
    assert env.step("It is 8!") == ({"obs_str": "Go lower."}, False, {})
    assert env.step("5") == ({}, True, {})
    assert env.reward("5") == 1.0 and env.reward("4") == 0.0


def test_every_flag_in_the_readme_exists() -> None:
    flags = {"--" + path[-1].replace("_", "-") for path, _ in leaves(RunConfig)}
    others = {"--index-url", "--seeds"}  # of pip and of the benchmark
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
    assert len(named) > 30
    assert all(path.exists() for path in named), [str(path) for path in named if not path.exists()]


def test_every_local_link_of_the_readme_leads_somewhere() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if not target.startswith("http")]
    assert links and all((ROOT / target).exists() for target in links), links
