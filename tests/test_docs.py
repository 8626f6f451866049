"""What "Write an environment" shows works as shown: its example is checked, played and trained on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from envs.check import CHECKS
from envs.env import CallPolicy, EnvArgs
from envs.grading import GRADERS
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.tool_calls import ToolCall, find_tool_calls
from envs.types import Sample

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "environments.md"


def page() -> str:
    return FILE.read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    """Return the code block of a language that holds a word."""
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", page(), re.DOTALL) if word in text)


def key_table() -> str:
    """Return the rows of the page's table of registry keys, as the code describes them."""
    rows = []
    for name, field in EnvSpec.model_fields.items():
        if name in ("id", "origin"):
            continue
        default = field.get_default()
        shown = "required" if field.is_required() else "" if default in (None, {}) else f"`{default}`"
        rows.append(f"| `{name}` | {shown} | {field.description} |")
    rows.append("| `gymnasium` |  | id of a Gymnasium environment, in place of `entry_point` and `dataset` |")
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the repository with the files of the example."""
    folder = tmp_path_factory.mktemp("dots")
    (folder / "dots.py").write_text(block("python", "# dots.py"))
    (folder / "registry.yaml").write_text(block("yaml", "# registry.yaml"))
    return folder


def command(folder: Path, line: str, written: str = "", *more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the page in a folder, as a user does who has installed the package."""
    program, *argv = line.split()
    assert program == "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "110"}
    return subprocess.run(
        [sys.executable, *argv, *more], cwd=folder, env=environment, input=written, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip


def session(word: str) -> tuple[str, str]:
    """Return the command and the output of a console block of the page."""
    text = block("console", word)
    first, _, output = text.partition("\n")
    return first.removeprefix("$ "), output


def test_the_example_passes_the_check_with_the_output_shown(example: Path) -> None:
    line, shown = session("envs.check")
    done = command(example, line)
    assert done.returncode == 0, done.stdout + done.stderr

    def results(text: str) -> list[tuple[str, str]]:
        return re.findall(r"^ ([a-z][a-z ]*?)  +(passed|FAILED|n/a)  ", text, re.MULTILINE)

    assert results(shown) == results(done.stdout) and len(results(shown)) == len(CHECKS)
    assert shown.splitlines()[-1] == done.stdout.splitlines()[-1]
    timing = re.compile(r"[\d.]+ (µs|ms|%)|\s+")
    assert timing.sub("", shown.split(" timing")[0]) == timing.sub("", done.stdout.split(" timing")[0])


def test_the_example_plays_in_the_terminal_as_shown(example: Path) -> None:
    line, shown = session("agents.play")
    typed = ':call zoom {"half": "left"}\n.\n\\boxed{1}\n.\n'
    done = command(example, line, typed)
    assert done.returncode == 0, done.stderr
    without_typed = [line for line in shown.splitlines() if line not in typed.splitlines()]
    assert done.stdout.splitlines() == without_typed
    assert {path.name for path in (example / "play").iterdir()} == {"dots-0-prompt-1.png", "dots-0-turn1-1.png"}


# Trains: the tiny network of the tests in place of the bundled model, everything else as on the page.
def test_the_example_trains(example: Path, checkpoint: Path) -> None:
    line, _ = session("trainer.run")
    small = ["--model", str(checkpoint), "--group-size", "2", "--max-new-tokens", "30", "--eval-size", "2"]
    done = command(example, line, "", *small, "--name", "docs")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((example / "runs" / "docs" / "summary.json").read_text())
    assert sum(summary["end_reasons"].values()) == 3 * 16
    assert not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()


def test_the_test_of_the_page_passes(example: Path) -> None:
    (example / "test_dots.py").write_text(block("python", "def test_my_environment_is_sound"))
    done = command(example, "python -m pytest -q -p no:cacheprovider test_dots.py")
    assert done.returncode == 0, done.stdout


def test_every_registry_key_is_in_the_table_with_its_default_and_meaning() -> None:
    assert key_table() in page()


def test_every_check_policy_and_grader_is_on_the_page() -> None:
    claims = page().split("| check | claim |")[1].split("\n\n")[0]
    named = re.findall(r"^\| ([a-z ]+) \|", claims, re.MULTILINE)
    _, shown = session("envs.check")
    assert named == re.findall(r"^ ([a-z][a-z ]*?)  +(?:passed|n/a)  ", shown, re.MULTILINE)
    for name in (*CallPolicy.__args__, *GRADERS):
        assert f"`{name}`" in page(), name


def test_the_calls_on_the_page_are_read_as_calls() -> None:
    for tool_format in ("hermes", "qwen_xml"):
        (text,) = re.findall(rf"^\| `{tool_format}` \| `(.*)` \|$", page(), re.MULTILINE)
        assert find_tool_calls(text, tool_format) == [ToolCall("zoom", {"half": "left"})]


@pytest.mark.parametrize(("word", "env_id"), [("gymnasium: FrozenLake-v1", "frozen_lake"), ("compat: slime", "theirs")])
def test_the_one_line_entries_of_the_page_are_valid(word: str, env_id: str, tmp_path: Path) -> None:
    (tmp_path / "registry.yaml").write_text(block("yaml", word))
    assert get_spec(env_id, tmp_path / "registry.yaml").max_turns > 1


def test_the_gymnasium_example_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    exec(block("python", "import gymnasium"), names)
    assert names["reward"] in (0.0, 1.0) and names["terminated"] and not names["truncated"]


def test_the_plain_environment_of_the_page_plays_by_its_rules() -> None:
    names: dict[str, Any] = {}
    exec(block("python", "class FindEnv"), names)
    sample = Sample("0", (), label="q", metadata={"picture": Image.new("RGB", (32, 32))})
    env = names["FindEnv"](sample, EnvArgs(max_turns=3))
    message = env.format_observation(env.reset()[0])
    assert (message["role"], [part["type"] for part in message["content"]]) == ("user", ["image", "text"])
    assert env.step("the q")[0] == {"obs_str": "One letter, please."}
    assert env.step("q") == ({}, True, {})
    assert (env.reward("q"), env.reward("x")) == (1.0, 0.0)


def test_every_flag_of_the_page_on_rollouts_is_one_of_the_command() -> None:
    text = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z0-9-]+", text)) - {"--enable-fp32-lm-head", "--tokenizers"}
    done = subprocess.run(
        [sys.executable, "-m", "trainer.run", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"--[a-z][a-z0-9-]+", done.stdout))
    assert len(named) > 20
    assert named <= known, sorted(named - known)
