"""What "Write an environment" shows works as shown: its example is checked, played and trained on."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agents.engines.sglang.server_arguments import NOT_BESIDE, choose_arguments, choose_variables
from agents.engines.sglang.server_facts import Host
from agents.engines.sglang.settings import ServerPlace, SGLangSettings
from agents.model import STARTER_PATH
from agents.types import RouteShape
from envs.check import CHECKS
from envs.env import CallPolicy, EnvArgs
from envs.grading import GRADERS
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.tool_calls import ToolCall, find_tool_calls
from envs.types import Sample
from tests.flags import last_of_each
from tests.pages import code_block, is_shown, session
from tests.paths import ROOT
from tests.processes import run_command

PAGES = [ROOT / "docs" / name for name in ("environments.md", "environment-contract.md")]


def page() -> str:
    return "".join(file.read_text(encoding="utf-8") for file in PAGES)


def described_keys() -> list[str]:
    """Return the items of the page's list of registry keys, as the code describes them."""
    items = []
    for name, field in EnvSpec.model_fields.items():
        if name in ("id", "origin", "parts"):
            continue
        default = field.get_default()
        shown = ""
        if field.is_required():
            shown = " (required)"
        elif default not in (None, {}):
            shown = f" (`{default}`)"
        items.append(f"- `{name}`{shown}: {field.description}")
    items.append("- `gymnasium`: id of a Gymnasium environment, in place of `entry_point` and `dataset`")
    servers = "commands and URLs of [MCP servers](other-environments.md#mcp-servers)"
    items.append(f"- `mcp`: {servers}, in place of `entry_point`")
    items.append("- `openenv`: URL of an OpenEnv server, in place of `entry_point` and `dataset`")
    items.append("- `verifiers`: package written for verifiers, in place of `entry_point` and `dataset`")
    return items


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the repository with the files of the example."""
    folder = tmp_path_factory.mktemp("dots")
    (folder / "dots.py").write_text(code_block(page(), "python", "# dots.py"))
    (folder / "registry.yaml").write_text(code_block(page(), "yaml", "# registry.yaml"))
    return folder


def command(folder: Path, argv: Sequence[str], written: str = "", *more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the page in a folder, as a user does who has installed the package."""
    env = {"PYTHONPATH": str(ROOT), "COLUMNS": "110"}
    return run_command(*argv, *more, cwd=folder, env=env, written=written, timeout_s=280)


def test_the_example_passes_the_check_with_the_output_shown(example: Path) -> None:
    argv, shown = session(page(), "envs.check")
    done = command(example, argv)
    assert done.returncode == 0, done.stdout + done.stderr

    def results(text: str) -> list[tuple[str, str]]:
        return re.findall(r"^ ([a-z][a-z ]*?)  +(passed|FAILED|n/a)  ", text, re.MULTILINE)

    assert results(shown) == results(done.stdout) and len(results(shown)) == len(CHECKS)
    assert shown.splitlines()[-1] == done.stdout.splitlines()[-1]
    seconds = re.compile(r"[\d.]+ s\b|\s+")
    assert seconds.sub("", shown) == seconds.sub("", done.stdout)


def test_the_example_plays_in_the_terminal_as_shown(example: Path) -> None:
    argv, shown = session(page(), "agents.play")
    typed = ':call zoom {"half": "left"}\n.\n\\boxed{1}\n.\n'
    done = command(example, argv, typed)
    assert done.returncode == 0, done.stderr
    without_typed = [line for line in shown.splitlines() if line not in typed.splitlines()]
    assert done.stdout.splitlines() == without_typed
    assert {path.name for path in (example / "play").iterdir()} == {"dots-0-prompt-1.png", "dots-0-turn1-1.png"}


@pytest.mark.slow
# Trains: the tiny network of the tests in place of the bundled model, everything else as on the page.
def test_the_example_trains(example: Path, checkpoint: Path) -> None:
    argv, shown = session(page(), "trainer.run")
    small = ["--model", str(checkpoint), "--group-size", "2", "--max-new-tokens", "30", "--eval-size", "2"]
    done = command(example, last_of_each([*argv, *small, "--name", "docs"]), "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_shown(shown, done.stdout), done.stdout
    summary = json.loads((example / "runs" / "docs" / "summary.json").read_text())
    assert sum(summary["end_reasons"].values()) == 3 * 16
    assert not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()


def test_the_test_of_the_page_passes(example: Path) -> None:
    (example / "test_dots.py").write_text(code_block(page(), "python", "def test_my_environment_is_sound"))
    done = command(example, ["pytest", "-q", "-p", "no:cacheprovider", "test_dots.py"])
    assert done.returncode == 0, done.stdout


def test_every_registry_key_is_in_the_list_with_its_default_and_meaning() -> None:
    assert " ".join(described_keys()) in " ".join(page().split())


def test_every_check_policy_and_grader_is_on_the_page() -> None:
    claims = page().split("Each check claims:\n\n")[1].split("\n\n")[0]
    named = re.findall(r"^- \*\*([a-z ]+)\*\*: ", claims, re.MULTILINE)
    _, shown = session(page(), "envs.check")
    assert named == re.findall(r"^ ([a-z][a-z ]*?)  +(?:passed|n/a)  ", shown, re.MULTILINE)
    for name in (*CallPolicy.__args__, *GRADERS):
        assert f"`{name}`" in page(), name


def test_the_calls_on_the_page_are_read_as_calls() -> None:
    for tool_format in ("hermes", "qwen_xml"):
        (text,) = re.findall(rf"^\| `{tool_format}` \| `(.*)` \|$", page(), re.MULTILINE)
        assert find_tool_calls(text, tool_format) == [ToolCall("zoom", {"half": "left"})]


def test_the_one_line_entry_of_the_page_is_valid(tmp_path: Path) -> None:
    (tmp_path / "registry.yaml").write_text(code_block(page(), "yaml", "compat: slime"))
    assert get_spec("theirs", tmp_path / "registry.yaml").max_turns > 1


def test_the_plain_environment_of_the_page_plays_by_its_rules() -> None:
    names: dict[str, Any] = {}
    exec(code_block(page(), "python", "class FindEnv"), names)
    sample = Sample("0", (), label="q", metadata={"image": Image.new("RGB", (32, 32))})
    env = names["FindEnv"](sample, EnvArgs(max_turns=3))
    message = env.format_observation(env.reset()[0])
    assert (message["role"], [part["type"] for part in message["content"]]) == ("user", ["image", "text"])
    assert env.step("the q")[0] == {"obs_str": "One letter, please."}
    assert env.step("q") == ({}, True, {})
    assert (env.reward("q"), env.reward("x")) == (1.0, 0.0)


def test_every_flag_of_the_pages_on_rollouts_and_engines_is_one_of_the_command() -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rollouts.md", "engines.md"))
    others = {"--enable-fp32-lm-head", "--enable-lora", "--max-lora-rank", "--skip-tokenizer-init"}  # of SGLang
    others.add("--mamba-full-memory-ratio")  # of SGLang too, and chosen for no starter
    others |= {"--tokenizers", "--only", "--variant", "--images", "--profile"}  # of other commands
    others |= {words[0] for words in chosen_arguments()} | {name for names in NOT_BESIDE.values() for name in names}
    named = set(re.findall(r"--[a-z][a-z0-9-]+", text)) - others
    done = run_command("trainer.run", "--help-all")
    known = set(re.findall(r"--[a-z][a-z0-9-]+", done.stdout))
    assert len(named) > 20
    assert named <= known, sorted(named - known)


def test_the_table_of_started_servers_has_every_argument_and_variable_that_is_chosen() -> None:
    table = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").split("### Arguments of started servers")[1]
    obvious = {"--model-path", "--tp-size", "--port", "--host", "--dtype", "--base-gpu-id", "--weight-version"}
    obvious |= {"--log-level", "--lora-target-modules", "--max-lora-rank", "--max-loras-per-batch"}
    names = {words[0] for words in chosen_arguments()} - obvious | {*choose_variables("float32")}
    assert [name for name in names if f"`{name}`" not in table.split("\n## ")[0]] == []


def chosen_arguments() -> list[tuple[str, ...]]:
    """Return arguments of every kind: for a mixture with adapters and a short context beside the learner."""
    settings = SGLangSettings(
        str(STARTER_PATH), context_length=100, lora_rank=8, frees_memory=True, routes=RouteShape(48, 128, 8)
    )
    return choose_arguments(settings, ServerPlace(30000), Host(1, (9,), True, True))


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("envs", "agents", "trainer")
#: The items of the path of one token, and of the page that says where things are.
ITEMS = re.findall(
    r"^(?:-|\d+\.) .*(?:\n +.*)*",
    ARCHITECTURE.split("## The tree")[0] + (ROOT / "docs" / "where.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def tree() -> list[Path]:
    """Return the paths of the tree on the page on architecture; a line is indented below the line of its folder."""
    folders: list[Path] = []
    found = []
    for line in ARCHITECTURE.split("## The tree")[1].split("```text\n")[1].split("```")[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        path = ROOT.joinpath(*folders[:depth], name)
        folders[depth:] = [Path(name)]
        assert path.is_dir() == name.endswith("/"), path
        found.append(path)
    return found


def test_every_path_of_the_tree_exists() -> None:
    missing = [str(path.relative_to(ROOT)) for path in tree() if not path.exists()]
    assert missing == []
    assert len(tree()) > 100


def test_every_folder_and_every_file_at_the_top_of_a_package_is_in_the_tree() -> None:
    shown = set(tree())
    for package in PACKAGES:
        files = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        there = {file.parent for file in files} | {file for file in files if file.parent == ROOT / package}
        missing = [str(path.relative_to(ROOT)) for path in there - shown if path.name != "__init__.py"]
        assert missing == []


def test_where_the_tree_lists_a_file_of_a_folder_it_lists_them_all() -> None:
    shown = set(tree())
    for folder in {path.parent for path in shown if path.suffix == ".py"}:
        missing = [file.name for file in folder.glob("[a-z]*.py") if file not in shown]
        assert missing == [], folder


def test_the_pages_of_the_architecture_name_files_and_what_is_in_them() -> None:
    assert len(ITEMS) > 35
    for item in ITEMS:
        words = re.findall(r"`([^`]+)`", item)
        paths = [ROOT / word for word in words if "/" in word or word == "registry.yaml"]
        assert all(path.exists() for path in paths), item
        files = [file for path in paths for file in ([path] if path.is_file() else path.glob("*.py"))]
        texts = [file.read_text(encoding="utf-8") for file in files]
        for word in words:
            if word.endswith(".py"):
                assert any(file.name == Path(word).name for file in files), f"{word}: {item}"
            elif re.fullmatch(r"[A-Za-z_]+(\.[a-z_]+)?", word) and ROOT / word not in paths:
                name = word.split(".")[-1]
                assert any(re.search(rf"\b{name}\b", text) for text in texts), f"{word}: {item}"


def test_the_page_on_new_models_names_tests_and_files_that_exist() -> None:
    text = (ROOT / "docs" / "bring-a-model.md").read_text(encoding="utf-8")
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in source] == []
    paths = re.findall(r"`((?:agents|envs|tests|trainer)/[\w/.]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_term_of_the_glossary_names_a_file_and_has_one_entry() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\| ([a-z -]+) \| .* \| `([\w/.]+)` \|$", text, re.MULTILINE)
    terms = [term for term, _ in entries]
    assert 30 <= len(terms) <= 45 and len(set(terms)) == len(terms)
    assert len(terms) == len(re.findall(r"^\| ", text, re.MULTILINE)) - 1  # besides the heading
    assert [path for _, path in entries if not (ROOT / path).is_file()] == []


def test_every_file_that_a_page_names_exists() -> None:
    pattern = r"(?<![\w/.-])((?:agents|benchmarks|docs|envs|tests|trainer)/[\w./-]+\.(?:py|md|jsonl?|yaml|jinja|png))"
    for source in [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        named = set(re.findall(pattern, source.read_text(encoding="utf-8"))) - {"trainer/config/recipes/NAME.yaml"}
        assert [name for name in named if not (ROOT / name).exists()] == [], source.name


def test_every_command_of_the_pages_is_a_module() -> None:
    for source in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        modules = set(
            re.findall(rf"python -m ((?:{'|'.join(PACKAGES)}|starter|benchmarks)\.[\w.]*\w)", source.read_text("utf-8"))
        )
        for module in modules:
            assert importlib.util.find_spec(module) is not None, f"{source.name}: python -m {module}"
