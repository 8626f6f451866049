"""Claims about the layouts for slime's ten models: they are possible, and the page shows them."""

from __future__ import annotations

import pytest

from envs.config.cli import parse
from tests.paths import ROOT
from trainer.config.learner import ClusterConfig
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES
from trainer.learner.layout import Layout
from trainer.learner.layout_rules import check_layout
from trainer.planning.qwen3_vl import qwen3_vl_config

#: Size of the network -> memory of a GPU in GiB.
SIZES = {"2b": 80, "4b": 80, "8b": 80, "30b-a3b": 141, "235b-a22b": 141}
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")


def recipe(size: str) -> RunConfig:
    argv = ["--config", "slime-geo3k", "--config", f"megatron-qwen3-vl-{size}"]
    return parse(RunConfig, argv, "prog", "", SOURCES)


def row(size: str) -> str:
    """Return the line of the page about a size."""
    config, name = recipe(size), f"megatron-qwen3-vl-{size}"
    model = config.model.model.removesuffix("-Instruct")
    flags = Layout.of(config.cluster).flags().removeprefix("--backend megatron ")
    servers = f"{config.engine.num_servers} x {config.engine.tensor_parallel}"
    room = f"{config.engine.memory_share(beside_learner=True) * SIZES[size]:.0f}"
    cells = [f"`{model}-Instruct`, `-Thinking`", f"`{name}`", f"{config.cluster.num_gpus} x {SIZES[size]} GB"]
    return f"| {' | '.join([*cells, f'`{flags}`', f'{servers}, {room}'])} |"


@pytest.mark.parametrize("size", SIZES)
def test_a_recipe_is_possible_and_is_what_the_page_shows(size: str) -> None:
    config = recipe(size)
    check_layout(Layout.of(config.cluster), config.cluster.num_gpus, qwen3_vl_config(size))
    assert config.model.model.lower() == f"qwen/qwen3-vl-{size}-instruct"
    engine = config.engine
    assert engine.num_servers * engine.tensor_parallel == config.cluster.num_gpus
    assert row(size) in PAGE


def test_slimes_own_layout_is_that_of_the_dense_models() -> None:
    own = Layout(tensor=4, sequence=True)
    assert {Layout.of(recipe(size).cluster) for size in ("2b", "4b", "8b")} == {own}


def test_a_recipe_runs_without_megatron_as_the_page_says() -> None:
    flags = "--backend fsdp --tp 1 --pp 1 --ep 1 --no-sp"
    assert f"`{flags}`" in PAGE
    argv = ["--config", "slime-geo3k", "--config", "megatron-qwen3-vl-235b-a22b", *flags.split()]
    cluster = parse(RunConfig, argv, "prog", "", SOURCES).cluster
    assert cluster == ClusterConfig(num_gpus=64)
