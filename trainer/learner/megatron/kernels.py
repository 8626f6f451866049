"""Loads TransformerEngine's kernels over the cuDNN that torch has."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

#: Where TransformerEngine looks for cuDNN first.
CUDNN_HOME = "CUDNN_HOME"


def load_kernels() -> None:
    """Import TransformerEngine, before anything in this process uses cuDNN.

    By itself it opens the system's `libcudnn.so`. If that is older than torch's, the parts of cuDNN do not fit each
    other: fused attention is left out without a word, attention is slower, and `--cp` has no other.
    """
    if folder := cudnn_folder():
        os.environ.setdefault(CUDNN_HOME, str(folder))
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch

    theirs, ours = transformer_engine_torch.get_cudnn_version(), torch.backends.cudnn.version()
    if theirs != ours:
        logger.warning(
            "TransformerEngine has loaded cuDNN %s and torch %s: attention may be slow, and --cp may fail; set %s to "
            "the folder of torch's",
            theirs,
            ours,
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
