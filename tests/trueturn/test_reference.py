"""Claims about the reference of the Python API: it is generated, and has every public function and class."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trueturn as tt
from tests.paths import ROOT

#: What is public and has its own pages: errors, tools and samples of environments.
ELSEWHERE = {"UserError", "tool", "ToolError", "Sample", "rewards"}


@pytest.mark.slow
def test_the_reference_has_every_public_name_with_its_text(tmp_path: Path) -> None:
    modules = re.search(r"^REFERENCE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert modules
    names = re.sub(
        r"\$\(addprefix trueturn\.,([^)]*)\)", lambda m: " ".join(f"trueturn.{n}" for n in m[1].split()), modules[1]
    )
    command = [
        sys.executable,
        "-m",
        "pdoc",
        "--output-directory",
        str(tmp_path),
        "--docformat",
        "google",
        *names.split(),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "Warn" not in found.stderr
    pages = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert {name for name in set(tt.__all__) - ELSEWHERE if f'id="{name}"' not in pages} == set()
