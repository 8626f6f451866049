"""Claims about TransformerEngine's kernels: they come with the cuDNN of torch, and another one is named.

Small libraries stand for cuDNN's parts, an engine that names them for TransformerEngine, whose loader does the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="needs a C compiler and Linux's linker"
)

#: What each part needs, by its name. The first calls the second, as cuDNN's own does.
PARTS = {"_graph": (), "_ops": ("_graph",), "_adv": ("_ops", "_graph"), "": ("_graph",)}
ENGINE = """
import ctypes, glob, os
home = os.environ.get("CUDNN_HOME")
found = home and glob.glob(home + "/**/libcudnn.so*", recursive=True)
ctypes.CDLL(found[0] if found else "libcudnn.so", mode=ctypes.RTLD_GLOBAL)
core = ctypes.CDLL(os.environ["CORE"], mode=ctypes.RTLD_GLOBAL)
versions = [core.version(), core.ops(), core.adv()]
assert len(set(versions)) == 1, versions
"""
FILES = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch.py": ENGINE,
    "transformer_engine_torch.py": """
import transformer_engine.pytorch as engine
def get_cudnn_version():
    return engine.core.version()
""",
}
CODE = """
import torch
torch.backends.cudnn.version = lambda: 91900
from trainer.learner.megatron.kernels import load_kernels
load_kernels()
"""


def compile_library(file: Path, code: str, needs: Iterable[str] = ()) -> None:
    """Compile a library that needs others of its folder, and finds them there if nothing else is found."""
    source = file.with_suffix(".c")
    source.write_text(code)
    command = ["cc", "-shared", "-fPIC", "-o", str(file), str(source), f"-Wl,-soname,{file.name}"]
    command += ["-Wl,--no-as-needed", f"-L{file.parent}", *(f"-l:libcudnn{name}.so.9" for name in needs)]
    subprocess.run([*command, "-Wl,-rpath,$ORIGIN", "-Wl,--enable-new-dtags"], check=True)
    source.unlink()


def write_cudnn(folder: Path, version: int) -> None:
    """Write the parts of a cuDNN."""
    folder.mkdir(parents=True)
    for part, needs in PARTS.items():
        name = {"": "version", "_graph": "graph"}.get(part, part[1:])
        body = f"return {version};" if part == "_graph" else "return graph();"
        compile_library(folder / f"libcudnn{part}.so.9", f"int graph(void); int {name}(void) {{ {body} }}", needs)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine: the system's cuDNN 9.14, torch's 9.19 in its package, and an engine built for either."""
    root = tmp_path_factory.mktemp("machine")
    write_cudnn(root / "system", 91400)
    write_cudnn(root / "packages/nvidia/cudnn/lib", 91900)
    (root / "system/libcudnn.so").symlink_to("libcudnn.so.9")
    compile_library(root / "system/core.so", "int core(void) { return 0; }", PARTS)
    (root / "system/core.so").rename(root / "core.so")
    for name, text in FILES.items():
        (root / "engine" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "engine" / name).write_text(text)
    return root


def words_of(root: Path, *packages: str, **variables: str) -> str:
    """Load the kernels where these folders are on the path; return what is said."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDNN_HOME"}
    path = os.pathsep.join([*(str(root / name) for name in ("engine", *packages)), *sys.path])
    own = {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(root / "system"), "CORE": str(root / "core.so")}
    environ = kept | own | variables
    done = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stderr


def test_every_part_is_of_the_cudnn_that_torch_has_as_a_package(libraries: Path) -> None:
    assert words_of(libraries, "packages") == ""


def test_another_cudnn_is_named(libraries: Path) -> None:
    assert "has loaded cuDNN 91400, which is not torch's" in words_of(libraries)


def test_a_cudnn_that_the_user_names_stays(libraries: Path) -> None:
    assert "has loaded cuDNN 91400" in words_of(libraries, "packages", CUDNN_HOME=str(libraries / "system"))
