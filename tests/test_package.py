"""Claims about what is released: the source archive, the wheel, and the licences of what they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.packages import is_permissive, licence_of
from tests.paths import ROOT

#: Folders that the wheel installs.
PACKAGES = ("agents", "envs", "trainer", "trueturn")


def run(*argv: str | Path, cwd: Path = ROOT) -> str:
    """Run a command as a user does who has not set where Python looks for modules."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive of this checkout, and the wheel that was built from the archive."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_source_archive_has_every_file_of_the_repository(dist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone, so nothing says which files belong to the repository")
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened if member.isfile()}
    assert set(run("git", "ls-files").splitlines()) - names == set()


@pytest.mark.slow
def test_the_wheel_has_every_file_of_its_packages_and_nothing_else(wheel: Path) -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected | {"envs/registry.yaml"}


@pytest.mark.slow
# The dependencies are those of this interpreter: only the wheel itself is installed.
def test_the_wheel_trains_outside_the_checkout_with_the_command_of_the_readme(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    site.joinpath("dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    here = tmp_path / "here"
    here.mkdir()
    shown = re.search("`make demo` runs `python (-m [^`]*)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown is not None
    small = ["--steps", "2", "--problems-per-step", "2", "--group-size", "2", "--eval-size", "0", "--name", "wheel"]
    run(python, *shown[1].split(), *small, cwd=here)
    assert json.loads((here / "runs" / "wheel" / "summary.json").read_text())["steps_done"] == 2
    assert run(python, "-c", "import trainer; print(trainer.__file__)", cwd=here).startswith(str(tmp_path))
    assert run(python.with_name("trueturn"), "--help", cwd=here).startswith("usage: trueturn")


def test_every_installed_package_has_a_permissive_licence() -> None:
    found = [distribution.metadata.json for distribution in distributions()]
    assert len(found) > 50
    assert [f"{each['name']}: {licence_of(each)}" for each in found if not is_permissive(each)] == []
