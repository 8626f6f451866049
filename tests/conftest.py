"""Fixtures that tests of agents and trainer share: one tiny random checkpoint for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from agents.model import PolicyModel
from agents.renderer import Renderer
from tests.builders import write_tiny_checkpoint

# A first call may be slow (imports, caches), and a busy machine is no bug.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The networks here are so small that threads only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Qwen3-VL checkpoint folder with random weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(checkpoint: Path) -> Renderer:
    return Renderer.from_checkpoint(checkpoint)


@pytest.fixture
def model(checkpoint: Path) -> PolicyModel:
    """A copy of the tiny network that the test may change."""
    return PolicyModel.load(checkpoint)
