"""Keeps compiled kernels between runs: tells the libraries of this process, and of those it starts, where."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

#: The folder of each variable: of torch.compile, Triton, FlashInfer, and SGLang with what it compiles by.
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
}


def keep_kernels() -> None:
    """Set each variable of `FOLDERS` to a folder of the user's cache, `$XDG_CACHE_HOME/trueturn/kernels/...`.

    The libraries themselves name what they keep by versions, GPU and shapes. A variable that is set and not empty
    stays. If the folder cannot be written, nothing is set: then each library uses a folder of its own.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "trueturn" / "kernels"
        root.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(root, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # of `Path.home`
        return
    # Some imports of torch set its variable, to a folder that a restart of the machine may empty.
    default = str(Path(tempfile.gettempdir()) / "torchinductor_")
    for variable, name in FOLDERS.items() if is_writable else ():
        if (os.environ.get(variable) or default).startswith(default):
            os.environ[variable] = str(root / name)
