"""Claims about TransformerEngine's kernels: they come with the cuDNN of torch, and another one is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

#: An engine that has loaded the cuDNN 9.19 of its variable, or else the system's 9.14.
ENGINE = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch.py": "",
    "transformer_engine_torch.py": """
import os
def get_cudnn_version():
    return 91900 if os.path.exists(os.environ.get("CUDNN_HOME", "") + "/lib/libcudnn.so.9") else 91400
""",
}
CODE = """
import torch
torch.backends.cudnn.version = lambda: 91900
from trainer.learner.megatron.kernels import load_kernels
load_kernels()
"""


def words_of(folder: Path, files: Mapping[str, str], **variables: str) -> str:
    """Load the kernels where these files can be imported; return what is said."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if name != "CUDNN_HOME"}
    environ = kept | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])} | variables
    done = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stderr


@pytest.mark.parametrize("has_package", [True, False])
def test_the_kernels_come_with_the_cudnn_that_torch_has_as_a_package(tmp_path: Path, has_package: bool) -> None:
    package = {"nvidia/cudnn/lib/libcudnn.so.9": ""} if has_package else {}
    said = words_of(tmp_path, {**ENGINE, **package})
    assert ("cuDNN 91400 and torch 91900" in said) != has_package
    assert ("set CUDNN_HOME to the folder of torch's" in said) != has_package


def test_a_cudnn_that_the_user_names_stays(tmp_path: Path) -> None:
    files = {**ENGINE, "nvidia/cudnn/lib/libcudnn.so.9": ""}
    assert "cuDNN 91400 and torch 91900" in words_of(tmp_path, files, CUDNN_HOME=str(tmp_path / "other"))
