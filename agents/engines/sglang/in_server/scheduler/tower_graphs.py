"""Encodes images by CUDA graphs, in the scheduler of a server with Qwen3-VL.

SGLang launches the kernels of the vision tower one by one, and 0.5.15 waits for the GPU in each of its layers. At 2B
that takes 14 to 35 ms an image, however small, in which the server writes nothing. A graph launches them at once.

SGLang's own (`SGLANG_VIT_ENABLE_CUDA_GRAPH`) stay off. In 0.5.15 they put positions elsewhere than the learner, take
two images for one with as many patches, and hand out memory that the next image overwrites.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

#: Patches of a graph: a pass runs in the next larger one. Beyond the last, products take longer than launching them,
#: so more images than that are several passes.
SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
#: Images of a pass. One alone has graphs of its own, whose attention has no room for others.
MAX_IMAGES = 8
#: How far a graph's first encoding may be from SGLang's: bfloat16 in other products gives 0.01.
MAX_DIFFERENCE = 0.05
#: SGLang's kinds of attention, and whether their graph mode takes the lengths of images beside their starts.
_TAKES_LENGTHS = {"VisionTritonAttention": True, "VisionFlash3Attention": False}

Run = Callable[[], None]
logger = logging.getLogger(__name__)


class CudaCapture:
    """Captures graphs that share their memory, because they never run at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        """Return what does the same as `run`, from and to the same memory."""
        run()  # kernels are compiled outside
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        return graph.replay


class TowerGraphs:
    """The graphs of one tower, captured as they are needed, by size and images.

    `eager` is SGLang's own way, and `in_graph_mode()` has its attention take places that are on the GPU. All graphs
    read and write one set of buffers, in rows of patches P. Rows beyond those of a pass say nothing to them.

    Example::

        graphs = TowerGraphs(tower, eager, CudaCapture(), in_graph_mode)
        graphs.encode(patches_PD, torch.tensor([[1, 8, 10]]))     # 80 patches: the graph of 96, captured the first time
    """

    def __init__(
        self,
        tower: Any,
        eager: Callable[[Tensor, Tensor], Tensor],
        capture: Callable[[Run], Run],
        in_graph_mode: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._tower = tower
        self._eager = eager
        self._capture = capture
        self._in_graph_mode = in_graph_mode
        self._graphs: dict[tuple[int, int], Run] = {}
        self._buffers: _Buffers | None = None
        self._is_off = False
        if reason := why_not(tower):
            self._turn_off(reason)

    def encode(self, patches_PD: Tensor, grids_N3: Tensor) -> Tensor:
        """Return the encodings of images, as SGLang does: its own where no graph can give them."""
        grids = grids_N3.tolist()
        if self._is_off or any(frames != 1 for frames, _, _ in grids):
            return self._eager(patches_PD, grids_N3)
        lengths = [height * width for _, height, width in grids]
        encoded = []
        first = 0
        for images in passes(lengths):
            end = first + sum(lengths[images])
            encoded.append(self._encode_pass(patches_PD[first:end], grids_N3[images], grids[images]))
            first = end
        if len(encoded) == 1:
            return encoded[0]
        return torch.cat(encoded)

    def _encode_pass(self, patches_PD: Tensor, grids_N3: Tensor, grids: list[list[int]]) -> Tensor:
        size = next((size for size in SIZES if size >= len(patches_PD)), 0)
        if self._is_off or not size:
            return self._eager(patches_PD, grids_N3)
        key = (size, 1 if len(grids) == 1 else MAX_IMAGES)
        if key in self._graphs:
            return self._run(key, patches_PD, grids)
        theirs = self._eager(patches_PD, grids_N3)
        try:
            ours = self._run(key, patches_PD, grids)
            difference = ((ours - theirs).float().norm() / theirs.float().norm()).item()
            if not difference <= MAX_DIFFERENCE:
                raise ArithmeticError(f"a graph of {size} patches differs by {difference:.3f} of the encodings' length")
        except Exception as error:  # whatever a release or GPU does not take: images are encoded as before
            self._turn_off(f"{type(error).__name__} {error}")
            return theirs
        logger.info("images of up to %d patches are encoded by a graph, %.4f from SGLang's way", size, difference)
        return ours

    def _turn_off(self, reason: str) -> None:
        logger.warning("images are encoded without graphs: %s", reason)
        self._is_off = True
        self._graphs.clear()

    def _run(self, key: tuple[int, int], patches_PD: Tensor, grids: list[list[int]]) -> Tensor:
        """Return the encodings by the graph of a size and number of images, which is captured if it is not there."""
        tower = self._tower
        embedded = tower.patch_embed(patches_PD.to(device=tower.device, dtype=tower.dtype, non_blocking=True))
        embedded = embedded + tower.fast_pos_embed_interpolate_from_list(grids)
        cos, sin = tower.rot_pos_emb(grids)
        buffers = self._buffers = self._buffers or _Buffers(tower, embedded, cos)
        buffers.fill(embedded, cos, sin, [height * width for _, height, width in grids])
        if key not in self._graphs:
            with self._in_graph_mode():
                self._graphs[key] = self._capture(lambda: self._layers(buffers, *key))
        self._graphs[key]()
        return buffers.encoded[: len(patches_PD) // tower.spatial_merge_unit].clone()

    def _layers(self, buffers: _Buffers, size: int, num_images: int) -> None:
        """Run all layers over the first rows of the buffers."""
        tower = self._tower
        starts = buffers.starts[: num_images + 1]
        if _TAKES_LENGTHS[_attention(tower)]:
            places = [starts, starts[1:] - starts[:-1], size]
        else:
            places = [starts, size]
        state, deep = buffers.embedded[:size].clone().unsqueeze(1), []  # layers add to it in place
        for number, layer in enumerate(tower.blocks):
            state = layer(
                state,
                cu_seqlens=places,
                rotary_pos_emb_cos=buffers.cos[:size],
                rotary_pos_emb_sin=buffers.sin[:size],
                output_ws=buffers.attended[:size],
            )
            if number in tower.deepstack_visual_indexes:
                deep.append(tower.deepstack_merger_list[len(deep)](state))
        torch.cat([tower.merger(state), *deep], dim=1, out=buffers.encoded[: size // tower.spatial_merge_unit])


def passes(lengths: Sequence[int]) -> Iterator[slice]:
    """Cut images with so many patches each into passes that have a graph; a larger image is a pass of its own.

    >>> list(passes([4000, 80, 80, 9000, 80]))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    first = patches = 0
    for place, length in enumerate(lengths):
        if place > first and (patches + length > SIZES[-1] or place - first == MAX_IMAGES):
            yield slice(first, place)
            first = place
            patches = 0
        patches += length
    yield slice(first, len(lengths))


class _Buffers:
    """The memory that all graphs of a tower read and write."""

    def __init__(self, tower: Any, embedded: Tensor, cos: Tensor) -> None:
        rows = SIZES[-1]
        attention = tower.blocks[0].attn
        self.embedded = embedded.new_zeros(rows, embedded.shape[1])
        self.cos, self.sin = cos.new_zeros(rows, cos.shape[1]), cos.new_zeros(rows, cos.shape[1])
        heads = (attention.num_attention_heads_per_partition, attention.head_size)
        self.attended = embedded.new_zeros(rows, *heads)
        self.encoded = embedded.new_zeros(rows // tower.spatial_merge_unit, tower.out_hidden_size)
        self.starts = torch.zeros(MAX_IMAGES + 1, dtype=torch.int32, device=embedded.device)

    def fill(self, embedded: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> None:
        """Write what a pass reads. Images that it does not have are empty."""
        for buffer, values in ((self.embedded, embedded), (self.cos, cos), (self.sin, sin)):
            buffer[: len(values)] = values
        padded = [*lengths, *[0] * (MAX_IMAGES - len(lengths))]
        starts = torch.tensor([0, *accumulate(padded)], dtype=torch.int32)
        self.starts.copy_(starts, non_blocking=True)  # else the scheduler waits for all that the GPU has to do


def _attention(tower: Any) -> str:
    return type(tower.blocks[0].attn.qkv_backend).__name__


def why_not(tower: Any) -> str:
    """Return why a tower has no graphs; "" if it has: in a narrow type, on one GPU, with an attention known here."""
    if tower.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {tower.dtype}"
    if _attention(tower) not in _TAKES_LENGTHS:
        return f"its attention is {_attention(tower)}"
    if tower.blocks[0].attn.num_attention_heads_per_partition == tower.num_heads:
        return ""
    return "it is cut over GPUs"


def install(qwen3_vl: Any) -> None:
    """Change SGLang's module of that name, unless its tower is called with something else than it was."""
    tower_class = qwen3_vl.Qwen3VLMoeVisionModel
    theirs = tower_class.forward
    mode = qwen3_vl.envs.SGLANG_VIT_ENABLE_CUDA_GRAPH
    if tuple(inspect.signature(theirs).parameters) != ("self", "x", "grid_thw"):
        return

    @contextmanager
    def in_graph_mode() -> Iterator[None]:  # SGLang's `override` leaves the mode on if what is within fails
        mode.set(True)
        try:
            yield
        finally:
            mode.clear()

    def forward(self: Any, x: Tensor, grid_thw: Tensor) -> Tensor:
        if mode.get() or not isinstance(grid_thw, Tensor):
            return theirs(self, x, grid_thw)
        if "image_graphs" not in self.__dict__:
            eager = theirs.__get__(self)
            self.image_graphs = TowerGraphs(self, eager, CudaCapture(), in_graph_mode)
        return self.image_graphs.encode(x, grid_thw)

    tower_class.forward = forward
