"""Loads TransformerEngine's kernels over the cuDNN that torch has."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

#: Where TransformerEngine looks for cuDNN first.
CUDNN_HOME = "CUDNN_HOME"
#: The parts of cuDNN that others need: they come first, so that each finds those of its own version.
FIRST = ("libcudnn_graph", "libcudnn_ops")


def load_kernels() -> None:
    """Import TransformerEngine, before anything in this process uses cuDNN.

    It names cuDNN's parts, which torch loads as late as it can, and takes no path from torch: the linker then gives it
    the system's. If those have another version, the parts do not fit each other: fused attention is left out without a
    word, attention is slower, and `--cp` has no other.
    """
    folder = cudnn_folder()
    if folder and os.environ.setdefault(CUDNN_HOME, str(folder)) == str(folder):
        for part in sorted((folder / "lib").glob("libcudnn*.so.*"), key=lambda file: _order(file.name)):
            with contextlib.suppress(OSError):  # without it, all may work but fused attention, which is said below
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch

    version = transformer_engine_torch.get_cudnn_version()
    if version != _version_of_torch():
        logger.warning(
            "TransformerEngine has loaded cuDNN %s, which is not torch's: attention may be slow, and --cp may fail; "
            "let %s and LD_LIBRARY_PATH name no other than torch's",
            version,
            CUDNN_HOME,
        )


def cudnn_folder() -> Path | None:
    """Return the folder of the cuDNN that came with torch as a package of its own, which holds `lib`; None without."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:  # no package around it
        return None
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return next((place for place in places if any((place / "lib").glob("libcudnn.so*"))), None)


def _order(name: str) -> tuple[bool, str]:
    return (name.partition(".")[0] not in FIRST, name)


def _version_of_torch() -> int | None:
    """Return which cuDNN torch uses; None where torch refuses it, because it was built for another."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:
        return None
