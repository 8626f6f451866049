"""Claims about `trueturn`: one command with a sub-command for each module that `python -m` runs."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.paths import ROOT
from trueturn.__main__ import COMMANDS, main


@pytest.fixture
def trueturn(monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `trueturn` with some arguments and returns its exit code."""

    def trueturn(*argv: str) -> int:
        monkeypatch.setattr(sys, "argv", ["trueturn", *argv])
        monkeypatch.setattr(sys, "path", list(sys.path))
        return main()

    return trueturn


def test_trueturn_alone_lists_every_command_with_one_line(trueturn, capsys: pytest.CaptureFixture[str]) -> None:
    assert trueturn() == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert all(f"  {name:<14}{summary}\n" in text for name, (_, summary) in COMMANDS.items())
    assert trueturn("--help") == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_sub_command_is_the_module_that_it_stands_for(
    trueturn, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        trueturn(name, "--help")
    assert caught.value.code == 0
    module, summary = COMMANDS[name]
    usage, help_text = capsys.readouterr().out.split("\n", 1)
    assert usage.startswith(f"usage: trueturn {name} ") and summary in help_text
    assert module.removesuffix(".__main__").endswith(f".{name}")


@pytest.mark.parametrize("command", ["evaluate --env geo3k", "memory --model 8b", "replay tests/golden/geo3k"])
def test_without_the_extra_train_a_command_works_or_says_what_to_install(command: str) -> None:
    program = (
        "import sys\nfor name in ('torch', 'transformers', 'tokenizers', 'accelerate', 'safetensors', 'matplotlib'):\n"
        f"    sys.modules[name] = None\nsys.argv = ['trueturn', *{command.split()!r}]\n"
        "from trueturn.__main__ import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    if command.startswith("replay"):
        assert done.returncode == 0 and "0 differ" in done.stdout, done.stderr
    else:
        assert done.returncode == 2
        assert done.stderr.startswith("error: installation: must have t") and "trueturn[train]" in done.stderr


def test_a_sub_command_returns_its_exit_code_and_reads_its_arguments(
    trueturn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trueturn("run", "--max-turns", "0") == 2
    assert capsys.readouterr().err.startswith("error: --max-turns: must be greater than or equal to 1, got 0;")
    assert trueturn("list") == 0
    assert "geo3k" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_that_names_the_nearest(trueturn, capsys: pytest.CaptureFixture[str]) -> None:
    assert trueturn("evalute", "--env", "geo3k") == 2
    assert (
        capsys.readouterr().err == "error: evalute: is no command of trueturn, got evalute; did you mean 'evaluate'?\n"
    )
    assert trueturn("--env", "geo3k") == 2
    assert capsys.readouterr().err.startswith(
        "error: --env: is no command of trueturn, got --env; known: check, check_engine, doctor"
    )


def test_environments_in_the_current_folder_are_found(
    trueturn, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trueturn("new", "island") == 0
    assert trueturn("check", "island", "--registry", "registry.yaml", "--samples", "1") == 0
    assert "island: " in capsys.readouterr().out


def test_help_and_a_mistyped_flag_answer_without_torch_in_every_command() -> None:
    code = f"""
import contextlib, importlib, sys
from envs.errors import UserError
for module in {[module for module, _ in COMMANDS.values()]}:
    for flag in ("--help", "--mistyped"):
        with contextlib.suppress(SystemExit, UserError):
            importlib.import_module(module).run([flag])
            raise AssertionError(module, flag)
    assert "torch" not in sys.modules, module
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def test_the_list_answers_without_loading_any_command() -> None:
    code = "import sys; from trueturn.__main__ import run; run([]); print({'torch', 'trainer.run'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nset()\n")
    done = subprocess.run([sys.executable, "-m", "trueturn"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: trueturn COMMAND")


def test_the_installed_script_is_this_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"trueturn": "trueturn.__main__:main"}


@pytest.mark.slow
@pytest.mark.parametrize("module", [module.removesuffix(".__main__") for module, _ in COMMANDS.values()])
def test_every_command_runs_as_a_module_in_a_new_interpreter(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m {module} ")
