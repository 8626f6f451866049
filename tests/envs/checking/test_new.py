"""Claims about `python -m envs.new`: what it writes passes its checks and its own test, and nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from envs.config.cli import exit_code
from envs.new import run, write_scaffold
from envs.registry import get_spec
from tests.paths import ROOT
from tests.processes import run_command


def command(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python in a folder, as a user does who has installed the package."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return run_command(*argv, cwd=folder, env={"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"})


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    done = command(folder, "envs.new", "my_env")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_command_writes_three_files(scaffold: Path) -> None:
    assert {path.name for path in scaffold.iterdir()} >= {"my_env.py", "test_my_env.py", "registry.yaml"}


def test_the_new_environment_passes_every_check(scaffold: Path) -> None:
    done = command(scaffold, "envs.check", "my_env", "--registry", "registry.yaml", "--samples", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "solution() 3/3" in done.stdout and " 0 failed" in done.stdout


def test_the_test_of_the_new_environment_passes(scaffold: Path) -> None:
    done = command(scaffold, "pytest", "-q", "-p", "no:cacheprovider", "test_my_env.py")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


def test_the_next_commands_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fruit_shop", "--folder", str(tmp_path / "shop")]) == 0
    shown = capsys.readouterr().out
    assert f"next, in {tmp_path / 'shop'}:" in shown
    for line in (
        "python -m envs.check fruit_shop --registry registry.yaml",
        "python -m pytest test_fruit_shop.py",
        "python -m agents.play --env fruit_shop --registry registry.yaml",
        "python -m trainer.run --env fruit_shop --registry registry.yaml --steps 1",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("name", "class_name"), [("fruit_shop", "FruitShopEnv"), ("shop_env", "ShopEnv"), ("x", "XEnv")]
)
def test_names_follow_the_name_of_the_environment(name: str, class_name: str, tmp_path: Path) -> None:
    write_scaffold(name, tmp_path)
    assert get_spec(name, tmp_path / "registry.yaml").entry_point == f"{name}:{class_name}"
    text = (tmp_path / f"{name}.py").read_text() + (tmp_path / f"test_{name}.py").read_text()
    assert f"class {class_name}(ToolEnv):" in text
    assert "MyEnv" not in text and ("my_env" not in text)


def test_an_existing_registry_is_left_alone_and_the_entry_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "registry.yaml").write_text("{}\n")
    assert run(["shop", "--folder", str(tmp_path)]) == 0
    assert (tmp_path / "registry.yaml").read_text() == "{}\n"
    shown = capsys.readouterr().out
    entry = shown.split("registry.yaml:\n\n")[1].split("\n\n")[0]
    assert yaml.safe_load(entry)["shop"]["entry_point"] == "shop:ShopEnv"


def test_an_id_that_is_in_the_folders_registry_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = tmp_path / "registry.yaml"
    registry.write_text("shop: {entry_point: other_shop, description: x, max_turns: 1}\n")
    assert exit_code(lambda: run(["shop", "--folder", str(tmp_path)])) == 2
    assert f"NAME: must not be in {registry} already, got shop;" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["registry.yaml"]


@pytest.mark.parametrize("there", ["shop.py", "test_shop.py"])
def test_no_file_is_overwritten(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / there).write_text("mine")
    assert exit_code(lambda: run(["shop", "--folder", str(tmp_path)])) == 2
    assert "NAME: must name new files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Fruit-Shop", "must be a module's name"),
        ("3d", "must be a module's name"),
        ("../shop", "must be a module's name"),
        ("class", "must be a module's name"),
        ("", "must be a module's name"),
        ("json", "must not hide another module"),
        ("numpy", "must not hide another module"),
        ("envs", "must not hide another module"),
        ("test_shop", "must not hide another module"),
        ("geo3k", "must not be in the registry already"),
    ],
)
def test_a_name_that_cannot_be_a_module_is_refused(
    name: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda: run([name, "--folder", str(tmp_path)])) == 2
    assert f"NAME: {rule}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert exit_code(lambda: run(["shop", "--folder", str(tmp_path / "file")])) == 2
    assert "--folder: must be writable" in capsys.readouterr().err
