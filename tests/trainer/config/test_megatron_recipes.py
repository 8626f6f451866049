"""Claims about the layouts for slime's ten models: they are possible, they fit, and the page shows what is computed."""

from __future__ import annotations

import pytest

from envs.config.cli import parse
from tests.paths import ROOT
from trainer.config.learner import ClusterConfig
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES
from trainer.learner.layout import Layout
from trainer.learner.layout_rules import check_layout
from trainer.learner.weights_io import meta_model
from trainer.preflight.memory_estimate import estimate
from trainer.preflight.memory_terms import GIB, MemoryEstimate, Plan
from trainer.preflight.qwen3_vl import qwen3_vl_config

#: Size of the network -> memory of a GPU in GiB.
SIZES = {"2b": 80, "4b": 80, "8b": 80, "30b-a3b": 141, "235b-a22b": 141}
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")


def recipe(size: str) -> RunConfig:
    argv = ["--config", "slime-geo3k", "--config", f"megatron-qwen3-vl-{size}"]
    return parse(RunConfig, argv, "prog", "", SOURCES)


def need(size: str) -> MemoryEstimate:
    """Return what a rank takes with the longest stream of the recipe, a quarter of it pictures."""
    config = recipe(size)
    tokens = max(config.model.context_length, config.learner.max_tokens_per_microbatch)
    layout, recompute = Layout.of(config.cluster), config.learner.recompute
    plan = Plan(config.cluster.num_gpus, tokens, tokens, recompute, layout=layout)
    return estimate(meta_model(qwen3_vl_config(size)), plan)


def row(size: str) -> str:
    """Return the line of the page about a size."""
    config, found, name = recipe(size), need(size), f"megatron-qwen3-vl-{size}"
    model = config.model.model.removesuffix("-Instruct")
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "total", "between_steps")
    figures = [f"{getattr(found, part) / GIB:.1f}" for part in parts]
    flags = Layout.of(config.cluster).flags().removeprefix("--backend megatron ")
    servers = f"{config.engine.num_servers} x {config.engine.tensor_parallel}"
    room = f"{config.engine.memory_share(beside_learner=True) * SIZES[size]:.0f}"
    cells = [f"`{model}-Instruct`, `-Thinking`", f"`{name}`", f"{config.cluster.num_gpus} x {SIZES[size]} GB"]
    return f"| {' | '.join([*cells, f'`{flags}`', *figures, f'{servers}, {room}'])} |"


@pytest.mark.parametrize("size", SIZES)
def test_a_recipe_is_possible_fits_and_is_what_the_page_shows(size: str) -> None:
    config, found, room = recipe(size), need(size), SIZES[size] * GIB
    check_layout(Layout.of(config.cluster), config.cluster.num_gpus, qwen3_vl_config(size))
    assert config.model.model.lower() == f"qwen/qwen3-vl-{size}-instruct"
    assert found.total < 0.95 * room  # servers have freed their memory
    assert found.between_steps + config.engine.memory_share(beside_learner=True) * room < 0.95 * room
    engine = config.engine
    assert engine.num_servers * engine.tensor_parallel == config.cluster.num_gpus
    assert row(size) in PAGE


def test_slimes_own_layout_is_that_of_the_dense_models_and_does_not_hold_a_mixture() -> None:
    own = Layout(tensor=4, sequence=True)
    assert {Layout.of(recipe(size).cluster) for size in ("2b", "4b", "8b")} == {own}
    mixture = estimate(meta_model(qwen3_vl_config("30b-a3b")), Plan(8, 8192, 8192, 1.0, layout=own))
    assert round(mixture.total / GIB) == 212 and "would need 212 GiB" in PAGE


def test_a_recipe_runs_without_megatron_as_the_page_says() -> None:
    flags = "--backend fsdp --tp 1 --pp 1 --ep 1 --no-sp"
    assert f"`{flags}`" in PAGE
    argv = ["--config", "slime-geo3k", "--config", "megatron-qwen3-vl-235b-a22b", *flags.split()]
    cluster = parse(RunConfig, argv, "prog", "", SOURCES).cluster
    assert cluster == ClusterConfig(num_gpus=64)


def test_the_page_shows_what_a_long_stream_needs() -> None:
    layouts = (None, Layout(context=4), Layout(2, context=2, sequence=True), Layout(4, sequence=True))
    for size in ("2b", "4b", "8b"):
        model = meta_model(qwen3_vl_config(size))
        found = [estimate(model, Plan(4, 131_072, 4 * 16_384, 1.0, layout=layout)).total for layout in layouts]
        assert f"| {size} | {' | '.join(f'{total / GIB:.1f}' for total in found)} |" in PAGE
