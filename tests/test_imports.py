"""Claims about imports: trainer -> agents -> envs, no circles, and `envs` without torch or transformers.

Nothing in the wheel imports `starter`, which is not in it.

An import counts wherever it stands, in functions too, unless it is for types alone. So does a module that is named in a
string: `find_spec("trainer")`, `import_module("trainer.run")`, an entry point "trainer.run:main".
"""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

FORBIDDEN = {
    "envs": {"agents", "trainer", "trueturn"},
    "agents": {"trainer", "trueturn"},
    "trainer": {"trueturn"},
    "trueturn": set[str](),
}
#: Folders of the repository that are not in the wheel.
OUTSIDE = {"starter", "tests", "benchmarks"}
LOOK_UPS = {"find_spec", "import_module", "__import__", "run_module", "resolve_name"}
#: Named like modules, and none: the group of entry points by which installed packages bring environments.
GROUPS = {"trueturn.envs"}
ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(:[\w.]+)?")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of the three packages by module."""
    return {module_name(path): path for package in FORBIDDEN for path in sorted((ROOT / package).rglob("*.py"))}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield everything that runs; what stands under `if TYPE_CHECKING` does not."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from (other, *nodes(other))
        else:
            yield from (child, *nodes(child))


def imported(text: str) -> Iterator[str]:
    """Yield every module that a text imports; of `from a import b` both `a` and `a.b`, which may be a module."""
    for node in nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(text: str) -> Iterator[str]:
    """Yield every module that a text names in a string: as a dotted name, an entry point, or for a look-up."""
    for node in nodes(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOOK_UPS:
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ENTRY_POINT.fullmatch(node.value):
            yield node.value.partition(":")[0]


def test_an_import_is_found_wherever_it_stands() -> None:
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import types_alone\nelse:\n    import other\n"
        "import a.b\nclass C:\n    def f(self):\n        from d import e\n        import_module('g')\n"
        "        return 'h.i:j'\n"
        "importlib.util.find_spec('k')\n'just a word', 'two words.', 'm.n is said'\n"
    )
    assert [*imported(text)] == ["typing", "typing.TYPE_CHECKING", "other", "a.b", "d", "d.e"]
    assert sorted(set(named(text))) == ["g", "h.i", "k"]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    wrong = []
    for module, path in modules().items():
        if module.partition(".")[0] == package:
            text = path.read_text(encoding="utf-8")
            above = FORBIDDEN[package] | OUTSIDE
            found = {*imported(text), *named(text)} - GROUPS
            wrong += [f"{module}: {name}" for name in sorted(found) if name.split(".")[0] in above]
    assert wrong == []


def test_the_starter_imports_neither_tests_nor_benchmarks() -> None:
    names = {name for path in (ROOT / "starter").glob("*.py") for name in imported(path.read_text(encoding="utf-8"))}
    assert {name.split(".")[0] for name in names} & {"tests", "benchmarks", "trueturn"} == set()


def test_no_test_imports_a_benchmark() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert [str(p) for p, text in texts.items() if any(n.split(".")[0] == "benchmarks" for n in imported(text))] == []


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Return the modules of the three packages that each of them imports, at its top or later."""
    found = {}
    for module, path in modules().items():
        names = set(imported(path.read_text(encoding="utf-8")))
        found[module] = {name for name in names if name in modules() and name != module}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of one circle; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(arrows()) == []


# Folders at the top of a package, and the modules beside them: trainer.sft and trainer.loop.
@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_folders_of_a_package_import_each_other_in_a_circle(package: str) -> None:
    places: dict[str, set[str]] = {}
    for module, others in arrows().items():
        here = ".".join(module.split(".")[:2])
        theirs = {".".join(other.split(".")[:2]) for other in others} - {here}
        places.setdefault(here, set()).update(name for name in theirs if name.startswith(f"{package}."))
    assert circle({name: others for name, others in places.items() if name.startswith(f"{package}.")}) == []


@pytest.mark.parametrize(
    "modules",
    [
        "envs, envs.env, envs.registry, envs.datasets.samples, envs.geo3k.env, envs.geo3k.procedural",
        "trainer.config.run, envs.config.cli",
    ],
)
def test_light_modules_load_neither_torch_nor_transformers(modules: str) -> None:
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tests_of_envs_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/envs"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
