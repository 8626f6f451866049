"""Settings of all tests, and fixtures that tests of agents and trainer share: one tiny random checkpoint a session.

Nothing here imports torch before a test asks for it, so `pytest tests/envs` runs without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from envs import registry
from tests.budget import examples

if TYPE_CHECKING:
    from agents.model.policy import PolicyModel
    from agents.rendering.renderer import Renderer

# The networks here are so small that threads only get in each other's way. Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("budget", examples(settings.default.max_examples))
settings.load_profile("budget")


@pytest.fixture(autouse=True, scope="module")
def forget_registered() -> Iterator[None]:
    """What a file of tests registers in this process is gone after it."""
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`, as in a terminal: where tests run in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Qwen3-VL checkpoint folder with random weights."""
    from tests.builders import write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(checkpoint: Path) -> Renderer:
    from agents.rendering.renderer import Renderer

    return Renderer.from_checkpoint(checkpoint)


@pytest.fixture
def model(checkpoint: Path) -> PolicyModel:
    """A copy of the tiny network that the test may change."""
    from tests.builders import fresh_model

    return fresh_model(checkpoint)
