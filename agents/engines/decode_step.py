"""One decode step of the embedded engine on a GPU, replayed as a CUDA graph.

A decode step of a small network launches hundreds of kernels, and launching them takes longer than computing them. A
graph launches all of them at once, but it always reads and writes the same memory. So the step has fixed tensors for
its inputs, and the column that it appends to the cache is read from device memory.

Legend: B rows of a batch, W columns of the cache that the step reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agents.engines.hf_batch import BatchCache, KeysAndValues, NewTokens
from agents.model.policy import PolicyModel

logger = logging.getLogger(__name__)

#: A step reads this many further columns than its batch has filled; then the next step is captured.
COLUMNS_AHEAD = 256


class DecodeStep:
    """Reads one more token a row of one batch, at fixed places in memory.

    Example::

        step = DecodeStep(model, cache, num_rows=64)
        step.capture(pool)                                    # without it, every call launches its kernels
        logits_BV = step.next_logits(ids_B, positions_B)      # valid until the next call
    """

    def __init__(self, model: PolicyModel, cache: BatchCache, num_rows: int, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._ids_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._positions_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._window = CacheWindow(cache, min(cache.length + COLUMNS_AHEAD, cache.num_columns), device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_BV = torch.empty(0)

    def fits(self, cache: BatchCache, num_rows: int) -> bool:
        """Whether this step can read the next token of a batch."""
        return self._cache is cache and len(self._ids_B) == num_rows and cache.length < self._window.width

    def capture(self, pool: GraphPool) -> bool:
        """Capture the step as a graph; return whether that worked. Some networks wait for the GPU, and cannot.

        It comes before the first call. What the step writes here is written again by that call, and states stay as they
        are, because no row is alive yet.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(pool.device)
        stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(stream):
            self._run()  # loads kernels and makes workspaces, which a capture does not allow
            stream.synchronize()
            try:
                self._logits_BV = captured(graph, self._run, pool.handle)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                logger.warning("the embedded engine decodes without CUDA graphs, which takes longer (%s)", reason)
                return False
        torch.cuda.current_stream(pool.device).wait_stream(stream)
        self._graph = graph
        return True

    def next_logits(self, ids_B: Tensor, positions_B: Tensor) -> Tensor:
        """Append one token a row to the cache; return the logits after it, (B, V), valid until the next call."""
        self._ids_B.copy_(ids_B)
        self._positions_B.copy_(positions_B)
        self._window.follow()
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._logits_BV

    def _run(self) -> Tensor:
        return self._model.next_logits(self._ids_B, self._positions_B, self._window.seen_BW(), self._window)


class CacheWindow:
    """The first columns of a batch's cache, as a network sees them.

    Tensors name the column that a step appends to, and the rows that are alive: none before `follow`.
    """

    def __init__(self, cache: BatchCache, width: int, device: torch.device) -> None:
        self.width = width
        self._cache = cache
        self._column_1 = torch.full((1,), cache.length, device=device)
        self._new = NewTokens(torch.zeros(len(cache.columns_BC), 1, dtype=torch.bool, device=device))
        # A hidden column has the weight 0, but 0 times what happens to lie in fresh memory may be NaN.
        for layer in cache.layers:
            if isinstance(layer, KeysAndValues):
                layer.store[:, :, :, cache.length : width].zero_()

    def follow(self) -> None:
        """Take from the cache where it stands, and which rows have a new token."""
        self._column_1.fill_(self._cache.length)
        self._new.real_BT.copy_(self._cache.new.real_BT)

    def seen_BW(self) -> Tensor:
        """Which columns a row sees: those that hold its tokens, and the new one."""
        return self._cache.columns_BC[:, : self.width].index_fill(1, self._column_1, True)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write (B, heads, 1, head_dim) keys and values of one layer; return all columns of the window."""
        keys_BKWD, values_BKWD = self._cache.layers[layer].store[:, :, :, : self.width]
        keys_BKWD.index_copy_(2, self._column_1, keys)
        values_BKWD.index_copy_(2, self._column_1, values)
        return keys_BKWD, values_BKWD

    def add_routes(self, routes_BLK: Tensor) -> None:
        """Write the routes of one new token a row."""
        self._cache.routes_like(routes_BLK).index_copy_(1, self._column_1, routes_BLK[:, None])

    def state_forward(self, module: Any, hidden_B1H: Tensor) -> Tensor:
        """Return the output of a state layer; the states of rows that are alive go on by one token."""
        return self._cache.layers[module.layer_idx].forward(module, hidden_B1H, self._new)

    def get_seq_length(self, *_: object) -> int:
        """Columns, padding included."""
        return self.width

    def has_previous_state(self, *_: object) -> bool:
        """Keep Transformers 5.12 from making a mask for state layers: it would wait for the GPU, and none reads it."""
        return True


class GraphPool:
    """The memory that an engine's graphs share: one of them is in use at a time.

    A pool whose last graph has gone cannot be used again, so this keeps a small one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            self._kept = captured(self._graph, lambda: torch.zeros(1, device=device))
        self.handle = self._graph.pool()


def captured(graph: torch.cuda.CUDAGraph, run: Callable[[], Tensor], pool: Any = None) -> Tensor:
    """Capture a function on the current stream, and return its output, which each replay writes again."""
    # Other threads of this process, such as a learner's, go on using the GPU.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        return run()
    finally:
        graph.capture_end()
