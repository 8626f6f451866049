"""Decides whether `--compile auto` compiles the learner."""

from __future__ import annotations

from trainer.config.learner import LearnerConfig

#: Compiling takes about 40 s (H100, H200). A smaller network rarely gains that back in its steps.
LARGE = 500_000_000


def is_compiled(config: LearnerConfig, on_gpu: bool, num_parameters: int) -> bool:
    """Return whether the learner is compiled: by itself on a GPU, from 500 M parameters on."""
    if config.compile != "auto":
        return config.compile == "on"
    return on_gpu and num_parameters >= LARGE
