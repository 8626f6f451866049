"""Claims about the graphs by which SGLang's servers encode images. Replays are plain calls here: a CPU has no graphs.

The tower is built as SGLang's is: what its layers are called with, and that they add to what they are given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agents.engines.sglang.in_server.scheduler import tower_graphs
from agents.engines.sglang.in_server.scheduler.tower_graphs import MAX_IMAGES, SIZES, TowerGraphs

WIDTH, HEADS, PATCH, MERGE = 32, 2, 12, 4
IS_IN_GRAPH_MODE = []


class VisionTritonAttention:
    takes_lengths = True


class VisionFlash3Attention:
    takes_lengths = False


class Attention(nn.Module):
    """Attends within each image. In graph mode places come as a list, and rows of no image keep what they had."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.num_attention_heads_per_partition, self.head_size = HEADS, WIDTH // HEADS
        self.qkv, self.qkv_backend = nn.Linear(WIDTH, 3 * WIDTH), backend

    def forward(self, x_PH: Tensor, cu_seqlens: Any, cos: Tensor, sin: Tensor, output_ws: Tensor | None) -> Tensor:
        q, k, v = (part.view(-1, HEADS, self.head_size) for part in self.qkv(x_PH).chunk(3, dim=-1))
        q, k = (part * cos[:, None] + part.roll(1, -1) * sin[:, None] for part in (q, k))
        starts, out = cu_seqlens, torch.full_like(q, torch.nan) if output_ws is None else output_ws
        assert isinstance(cu_seqlens, list) == bool(IS_IN_GRAPH_MODE) == (output_ws is not None)
        if isinstance(cu_seqlens, list):
            starts, *lengths, most = cu_seqlens
            assert most == len(x_PH) and len(lengths) == self.qkv_backend.takes_lengths
            assert all(torch.equal(starts.diff(), given) for given in lengths)
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            if start < end:
                mine = [part[start:end].transpose(0, 1) for part in (q, k, v)]
                out[start:end] = nn.functional.scaled_dot_product_attention(*mine, scale=4.0).transpose(0, 1)
        return out.reshape(len(x_PH), WIDTH)


class Block(nn.Module):
    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(backend), nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Any,
        rotary_pos_emb_cos: Tensor,
        rotary_pos_emb_sin: Tensor,
        output_ws: Tensor | None = None,
    ) -> Tensor:
        x += self.attn(self.norm(x[:, 0]), cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, output_ws)[:, None]
        x += self.mlp(self.norm(x))
        return x


class Merger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MERGE * WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, MERGE * WIDTH))


class Tower(nn.Module):
    """A vision tower of three layers, one of them with a merger of its own."""

    deepstack_visual_indexes = (1,)
    spatial_merge_unit, num_heads, out_hidden_size = MERGE, HEADS, 16

    def __init__(self, backend: Any = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch_embed = nn.Linear(PATCH, WIDTH)
        self.blocks = nn.ModuleList(Block(backend or VisionTritonAttention()) for _ in range(3))
        self.merger, self.deepstack_merger_list = Merger(), nn.ModuleList([Merger()])
        self.num_eager = 0
        self.to(dtype)

    device = property(lambda self: self.patch_embed.weight.device)
    dtype = property(lambda self: self.patch_embed.weight.dtype)

    def _places(self, grids: Sequence[Sequence[int]]) -> Tensor:
        return torch.cat([torch.arange(f * h * w) * (1 + h / 64) for f, h, w in grids])[:, None]

    def fast_pos_embed_interpolate_from_list(self, grids: Sequence[Sequence[int]]) -> Tensor:
        return torch.sin(self._places(grids) * torch.arange(WIDTH) / 9).to(self.dtype)

    def rot_pos_emb(self, grids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        angles = self._places(grids) * torch.arange(WIDTH // HEADS) / 50
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def forward(self, x: Tensor, grid_thw: Tensor) -> Tensor:
        """Encode as SGLang does without graphs."""
        self.num_eager += 1
        grids = grid_thw.tolist()
        x = (self.patch_embed(x.to(self.dtype)) + self.fast_pos_embed_interpolate_from_list(grids))[:, None]
        starts = torch.tensor(np.cumsum([0] + [h * w for f, h, w in grids for _ in range(f)]))
        cos, sin = self.rot_pos_emb(grids)
        deep = []
        for number, block in enumerate(self.blocks):
            x = block(x, starts, cos, sin)
            if number in self.deepstack_visual_indexes:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return torch.cat([self.merger(x), *deep], dim=1)


class Mode:
    """The variable by which SGLang's attention knows that it is captured."""

    def __init__(self, is_on: bool = False) -> None:
        self._is_on = is_on

    def get(self) -> bool:
        return self._is_on or bool(IS_IN_GRAPH_MODE)

    def set(self, value: bool) -> None:
        IS_IN_GRAPH_MODE.append(value)

    def clear(self) -> None:
        IS_IN_GRAPH_MODE.clear()


@contextmanager
def graph_mode() -> Iterator[None]:
    IS_IN_GRAPH_MODE.append(True)
    try:
        yield
    finally:
        IS_IN_GRAPH_MODE.clear()


@dataclass
class Capture:
    """A graph of a CPU: what is captured is run again at every replay, from and to the same memory."""

    num_captured: int = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        run()

        def replay() -> None:
            with graph_mode():
                run()

        return replay


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def graphs_of(tower: Tower, capture: Any = None) -> TowerGraphs:
    return TowerGraphs(tower, lambda x, grids: tower(x, grids), capture or Capture(), graph_mode)


def make_images(random: np.random.Generator, number: int, most: int = 24) -> tuple[Tensor, Tensor]:
    """Return random patches and the grids of `number` images of up to `most` x `most` patches."""
    grids = torch.tensor([[1, *(2 * random.integers(1, most // 2 + 1, 2))] for _ in range(number)])
    return torch.tensor(random.normal(size=(int(grids.prod(1).sum()), PATCH)), dtype=torch.float32), grids


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).float().norm() / theirs.float().norm()).item()


@pytest.mark.parametrize("backend", [VisionTritonAttention, VisionFlash3Attention])
def test_images_of_any_sizes_and_numbers_are_encoded_as_sglang_does(backend: Callable[[], Any]) -> None:
    tower, capture, random = Tower(backend()), Capture(), np.random.default_rng(0)
    graphs = graphs_of(tower, capture)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(60):
        patches, grids = make_images(random, random.choice([1, 1, 1, 2, 3, MAX_IMAGES]), most=14)
        kept.append((graphs.encode(patches, grids), tower(patches, grids)))
    assert tower.num_eager == 60 + capture.num_captured
    assert 4 < capture.num_captured < 25
    for ours, theirs in kept:  # also after others were encoded in the same memory
        assert ours.shape == theirs.shape and difference(ours, theirs) < 0.02


def test_two_images_are_not_one_with_as_many_patches() -> None:
    tower, random = Tower(), np.random.default_rng(1)
    graphs = graphs_of(tower)
    patches = torch.tensor(random.normal(size=(64, PATCH)), dtype=torch.float32)
    for grids in ([[1, 8, 8]], [[1, 4, 8], [1, 4, 8]], [[1, 2, 8], [1, 6, 8]], [[1, 8, 8]]):
        theirs = tower(patches, torch.tensor(grids))
        assert difference(graphs.encode(patches, torch.tensor(grids)), theirs) < 0.02
    whole, halves = tower(patches, torch.tensor([[1, 8, 8]])), tower(patches, torch.tensor([[1, 4, 8], [1, 4, 8]]))
    assert difference(whole, halves) > 0.1


def test_a_graph_goes_on_from_new_weights() -> None:
    tower, random = Tower(), np.random.default_rng(2)
    graphs, (patches, grids) = graphs_of(tower), make_images(random, 1)
    before = graphs.encode(patches, grids)
    for weights in tower.parameters():
        weights.mul_(1.5)
    after = graphs.encode(patches, grids)
    assert difference(after, tower(patches, grids)) < 0.02 < difference(after, before)


@pytest.mark.parametrize(
    "grids",
    [[[1, 66, 64]], [[2, 4, 4]]],
    ids=["larger than any graph", "a video"],
)
def test_other_passes_are_sglangs(grids: list[list[int]]) -> None:
    tower, capture = Tower(), Capture()
    patches = torch.randn(sum(f * h * w for f, h, w in grids), PATCH)
    encoded = graphs_of(tower, capture).encode(patches, torch.tensor(grids))
    assert capture.num_captured == 0
    assert torch.equal(encoded, tower(patches, torch.tensor(grids)))


@pytest.mark.parametrize(
    ("grids", "num_graphs"),
    [([[1, 2, 2], [1, 4, 2]] * MAX_IMAGES, 1), ([[1, 64, 64]] * 2 + [[1, 66, 64], [1, 2, 4]], 2)],
    ids=["more images than of a graph", "more patches"],
)
def test_a_large_pass_is_several_that_have_graphs(grids: list[list[int]], num_graphs: int) -> None:
    tower, capture = Tower(), Capture()
    patches = torch.randn(sum(h * w for _, h, w in grids), PATCH)
    encoded = graphs_of(tower, capture).encode(patches, torch.tensor(grids))
    assert capture.num_captured == num_graphs
    theirs = tower(patches, torch.tensor(grids))
    assert encoded.shape == theirs.shape and difference(encoded, theirs) < 0.02


@pytest.mark.parametrize(
    ("tower", "cuts", "reason"),
    [
        (Tower(dtype=torch.float32), 1, "it computes in torch.float32"),
        (Tower(SimpleNamespace()), 1, "its attention is SimpleNamespace"),
        (Tower(), 2, "it is cut over GPUs"),
    ],
)
def test_other_towers_are_sglangs_and_the_log_says_why(
    tower: Tower, cuts: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    tower.num_heads *= cuts
    capture = Capture()
    graphs_of(tower, capture).encode(*make_images(np.random.default_rng(3), 1))
    assert (capture.num_captured, tower.num_eager) == (0, 1)
    assert caplog.messages == [f"images are encoded without graphs: {reason}"]


def test_a_graph_that_encodes_otherwise_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    tower = Tower()

    def has_lost_weights(run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            weights, kept = tower.merger.linear.weight, tower.merger.linear.weight.clone()
            weights.zero_()
            with graph_mode():
                run()
            weights.copy_(kept)

        return replay

    assert_sglang_encodes(tower, has_lost_weights, caplog, "a graph of 64 patches differs by 0.")


def test_what_cannot_be_captured_is_encoded_as_before(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert_sglang_encodes(Tower(), refuses, caplog, "RuntimeError operation not permitted")


def assert_sglang_encodes(tower: Tower, capture: Any, caplog: pytest.LogCaptureFixture, message: str) -> None:
    graphs, grids = graphs_of(tower, capture), torch.tensor([[1, 8, 8]])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            patches = torch.randn(64, PATCH)
            assert torch.equal(graphs.encode(patches, grids), tower(patches, grids))
    assert [message in record.getMessage() for record in caplog.records] == [True]


def test_sizes_waste_little() -> None:
    assert all(size % MERGE == 0 for size in SIZES)
    assert all(larger <= 1.5 * size for size, larger in pairwise(SIZES))


def test_a_tower_that_is_called_otherwise_is_left_alone() -> None:
    class OtherTower:
        def forward(self, x: Tensor, grid_thw: Tensor, places: Tensor) -> None: ...

    own = OtherTower.forward
    install(OtherTower, Mode())
    assert OtherTower.forward is own


def install(tower_class: type, mode: Mode) -> None:
    envs = SimpleNamespace(SGLANG_VIT_ENABLE_CUDA_GRAPH=mode)
    tower_graphs.install(SimpleNamespace(Qwen3VLMoeVisionModel=tower_class, envs=envs))


@pytest.mark.parametrize("is_sglangs", [False, True])
def test_graphs_of_sglang_have_the_last_word(is_sglangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(Tower):
        def forward(self, x: Tensor, grid_thw: Tensor) -> Tensor:
            return super().forward(x, grid_thw)

    captures: list[Capture] = []
    monkeypatch.setattr(tower_graphs, "CudaCapture", lambda: captures.append(Capture()) or captures[-1])
    install(Changed, Mode(is_sglangs))
    tower = Changed()
    for seed in (4, 4, 4):
        tower(*make_images(np.random.default_rng(seed), 1))
    assert [capture.num_captured for capture in captures] == ([] if is_sglangs else [1])
    assert tower.num_eager == (3 if is_sglangs else 1)


def test_a_capture_that_fails_does_not_leave_sglangs_own_graphs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(Tower):
        def forward(self, x: Tensor, grid_thw: Tensor) -> Tensor:
            assert not IS_IN_GRAPH_MODE  # SGLang would encode in another way
            return super().forward(x, grid_thw)

    def refuses(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(tower_graphs, "CudaCapture", lambda: refuses)
    install(Changed, Mode())
    tower = Changed()
    for seed in (4, 5):
        tower(*make_images(np.random.default_rng(seed), 1))
    assert (tower.num_eager, IS_IN_GRAPH_MODE) == (2, [])
