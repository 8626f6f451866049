"""Claims about the direction of imports: trainer -> agents -> envs, and `envs` without torch or transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"envs": {"agents", "trainer"}, "agents": {"trainer"}, "trainer": set[str]()}


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level package of every import of a file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [f"{path.relative_to(ROOT)} imports {name}" for path in files for name in imported(path)
             if name in FORBIDDEN[package] | {"tests", "benchmarks"}]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize(
    "modules",
    ["envs, envs.env, envs.registry, envs.data, envs.geo3k.env, envs.geo3k.procedural", "trainer.config, envs.cli"],
)
def test_light_modules_load_neither_torch_nor_transformers(modules: str) -> None:
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
