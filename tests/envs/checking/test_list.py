"""Claims about `python -m envs.list`: every entry is shown with where it comes from, and nothing of it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envs.config.cli import exit_code
from envs.list import run
from tests.paths import ROOT

ENTRY = """
lost:
  entry_point: no_such_module
  description: "[bold]Nobody[/bold] finds it."
  max_turns: 7
  tool_format: qwen_xml
  tool_calls: last
  isolation: process
"""


def rows(shown: str) -> dict[str, list[str]]:
    """Return the cells of each row by the first one; cells stand two spaces apart."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in shown.splitlines()]
    return {cells[0]: cells for cells in lines if len(cells) == 7}


def test_every_entry_is_listed_with_its_settings_and_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "registry.yaml"
    file.write_text(ENTRY)
    assert run(["--registry", str(file)]) == 0
    shown = rows(capsys.readouterr().out.replace(str(file), "the file"))
    assert shown["geo3k"][1:6] == ["3", "auto, last", "thread", "built-in", "packaged"]
    expected = ["7", "qwen_xml, last", "process", "no", "the file", "[bold]Nobody[/bold] finds it."]
    assert shown["lost"][1:] == expected
    assert list(shown) == ["id", *sorted(name for name in shown if name != "id")]


def test_an_entry_of_an_installed_package_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "shop_envs"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "registry.yaml").write_text(ENTRY)
    info = tmp_path / "shop_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-envs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trueturn.envs]\nshop = shop_envs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run([]) == 0
    assert rows(capsys.readouterr().out)["lost"][5] == "package shop"


def test_a_registry_that_is_missing_is_a_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(["--registry", "none.yaml"])) == 2
    assert "none.yaml: must be a readable registry file" in capsys.readouterr().err


def test_listing_imports_no_environment() -> None:
    code = (
        "import sys; from envs.list import run; run([]);"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'gymnasium')"
        " or name.startswith(('envs.geo3k', 'envs.guess', 'envs.calculator', 'envs.from_gymnasium'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "envs.list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "geo3k" in done.stdout and done.stderr == ""
