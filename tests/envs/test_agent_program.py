"""Claims about agents as entries of the registry: what is checked before anything runs, and `envs.check`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs.check import check_env
from envs.errors import UserError
from envs.execution.load import load_env
from envs.registry import parse_entry
from envs.spec import EnvSpec

ENTRY = {"dataset": "envs.calculator:samples", "description": "Test.", "max_turns": 3}
ASK = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": task["messages"]}).encode()
def ask():
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.loads(urllib.request.urlopen(url, body).read())["choices"][0]["message"]["content"]
"""


def spec_of(**entry: Any) -> EnvSpec:
    return parse_entry("registry.yaml", "mine", {**ENTRY, **entry})


def test_an_agent_is_a_whole_entry() -> None:
    spec = spec_of(agent="python my_agent.py")
    assert (spec.agent, spec.step_timeout_s, spec.entries[0].agent) == ("python my_agent.py", 600.0, spec.agent)
    # A program has its own limit of memory, whatever isolates the environment.
    assert spec_of(agent="python my_agent.py", memory_limit_gib=2).memory_limit_gib == 2
    assert EnvSpec.model_validate({**spec.model_dump(), "origin": spec.origin}) == spec
    assert spec_of(entry_point="envs.calculator:CalculatorEnv").agent == ""


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ({"agent": 5}, "agent must be a command or module:NAME"),
        ({"sandbox": "docker"}, "agent must be a command or module:NAME"),
        ({"agent": "python a.py", "entry_point": "a:b"}, "agent must stand in place of entry_point"),
        ({"agent": "python a.py", "mcp": ["x"]}, "agent must stand in place of mcp"),
        ({"agent": "a:b", "isolation": "inline"}, "agent needs isolation: thread or process"),
        ({"agent": "a:b", "memory_limit_gib": 1}, "memory_limit_gib needs isolation: process"),
        ({"agent": "python a.py", "sandbox": "vm"}, "sandbox must be one of none, docker, podman"),
        ({"agent": "python a.py", "sandbox": "docker"}, "sandbox: docker needs a command and options"),
    ],
)
def test_an_entry_of_an_agent_that_cannot_be_meant_is_an_error(entry: Mapping[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        spec_of(**entry)


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ({"agent": "nonesuch --fast"}, "needs the program nonesuch"),
        ({"agent": "python nonesuch.py"}, "must name a script that exists"),
        ({"agent": "nonesuch:agent"}, "'nonesuch' must import"),
        ({"agent": "envs.calculator:evaluate"}, "must take task, base_url, api_key"),
        ({"agent": "ls", "sandbox": "podman", "options": {"image": "x"}}, "needs the program podman"),
    ],
)
def test_what_an_agent_lacks_is_told_before_anything_is_played(
    entry: Mapping[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=rule):
        load_env(spec_of(**entry))


@pytest.mark.parametrize(
    ("source", "status", "found"),
    [
        (f"{ASK}\nask()\nprint(ask())", "ok", "2 requests of the model, the result '\\\\boxed{8413}', reward 1"),
        (f"{ASK}\nask()\nprint(7)", "warning", "reward 0"),
        (f"{ASK}\nprint(7)", "fault", "0 requests of the model"),
        (f"{ASK}\nask()\nsys.exit('oh')", "fault", "status 1: oh (after 1 request of the model)"),
        (f"{ASK}\nwhile True: ask()", "fault", "HTTP Error 400"),
    ],
)
def test_the_check_of_an_agent_plays_one_episode(tmp_path: Path, source: str, status: str, found: str) -> None:
    path = tmp_path / "agent.py"
    path.write_text(source)
    prompts, episode = check_env(spec_of(agent=f"{sys.executable} {path}"), num_samples=2)
    assert (prompts.found, episode.status) == ("2 prompts with 0 images", status)
    assert found in episode.found


def test_the_digest_of_an_agent_is_that_of_its_script(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("1")
    spec = spec_of(agent=f"{sys.executable} {path}")
    before = spec.source_digest()
    path.write_text("2")
    assert before and before != spec.source_digest()
