"""Seconds of everything that a run does, from the network's shape and the machine's constants."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.learner.layout import Layout as RankLayout
from trainer.preflight.planner.hardware import Hardware
from trainer.preflight.planner.shape import ModelShape, triangle
from trainer.preflight.planner.workload import GroupShape

Transport = Literal["memory", "ipc", "nccl", "disk"]
#: A forward, and twice that for the gradients of inputs and of weights.
TRAINING_FACTOR = 3
#: Bytes of a value that servers compute with, and that ranks gather; of a gradient that ranks sum.
COMPUTE_BYTES, GRADIENT_BYTES = 2, 4


@dataclass(frozen=True)
class LearnerCosts:
    """How the learner runs: its ranks, the tokens of a micro-batch, and what it does to save memory.

    With a `layout` the backend is Megatron, and its ranks share networks and streams; without one it is FSDP2.
    """

    num_ranks: int = 1
    tokens: int = 16384
    recompute: float = 0.0
    reshards: bool = False
    offloads: bool = False
    epochs: int = 1
    layout: RankLayout | None = None


@dataclass(frozen=True)
class Costs:
    """Seconds by the roofline: operations over operations a second or bytes over bytes a second, the larger.

    `value_bytes` is what a value takes in the engine: 2 in bfloat16, 4 in float32.
    """

    shape: ModelShape
    hardware: Hardware
    value_bytes: int = COMPUTE_BYTES

    def decode_step_s(self, rows: int, cached: float, tensor_parallel: int = 1) -> float:
        """Return the seconds in which `rows` streams of `cached` tokens together get one token each."""
        machine, shape = self.hardware, self.shape
        share = min(tensor_parallel, shape.kv_heads)  # more GPUs hold copies of keys and values
        weights = self.value_bytes * shape.decode_values(rows) / tensor_parallel
        cache = self.value_bytes * cached * shape.cache_values / share
        flops = shape.read_flops(rows, cached, 0) + shape.head_flops(rows)
        computing = flops / (1e12 * machine.prefill_tflops * tensor_parallel)
        sums = 2 * shape.layers * machine.collective_s if tensor_parallel > 1 else 0.0
        reading = (weights + cache) / (1e9 * machine.memory_gb_s)
        return max(reading, computing) + machine.decode_step_s + machine.decode_row_s * rows + sums

    def prefill_s(self, new: int, before: int, images: int, tensor_parallel: int = 1) -> float:
        """Return the seconds to read `new` tokens behind `before` ones, `images` of them of pictures."""
        pairs = triangle(before + new) - triangle(before)
        flops = self.shape.read_flops(new, pairs, images) + self.shape.head_flops(1)
        return flops / (1e12 * self.hardware.prefill_tflops * tensor_parallel)

    def request_s(self, images: float) -> float:
        """Return what the server's tokenizer process takes for a turn whose stream has so many picture tokens."""
        return self.hardware.request_s + images * self.hardware.picture_token_s

    def group_flops(self, group: GroupShape, shares_prompt: bool = True) -> float:
        """Return the operations to train on a group: its prompt, each response, the output layer, backward.

        The prompt is read once, or once for each sample.
        """
        if not shares_prompt:
            return sum(self.group_flops(GroupShape((episode,), group.images)) for episode in group.episodes)
        prompt, images = group.prompt, group.images
        flops = self.shape.read_flops(prompt, triangle(prompt), images)
        for episode in group.episodes:
            added = episode.stream - prompt
            pairs = triangle(episode.stream) - triangle(prompt)
            flops += self.shape.read_flops(added, pairs, 0) + self.shape.head_flops(episode.model_tokens)
        return TRAINING_FACTOR * flops

    def train_s(self, groups: Sequence[GroupShape], learner: LearnerCosts) -> float:
        """Return the seconds of the learner's part of a step.

        All samples of a prompt go to one rank, the largest prompt first, each to the rank with the least to do; so
        ranks beyond the number of prompts have nothing to do. Ranks of Megatron that share a stream count as one that
        is as much faster; each pipeline stage waits for the others while the first and the last micro-batch pass.
        """
        layout = learner.layout
        together = layout.model_parallel if layout else 1
        loads = [(0.0, 0)] * (learner.num_ranks // together)
        works = (
            (self.group_flops(group, layout is None), group.stream_tokens if layout else group.trained_tokens)
            for group in groups
        )
        for flops, tokens in sorted(works, reverse=True):
            load, held = loads[0]
            heapq.heapreplace(loads, (load + flops, held + tokens))
        longest, tokens = max(loads)
        passes = longest * (1 + learner.recompute / TRAINING_FACTOR) / (1e12 * self.hardware.train_tflops * together)
        num_batches = max(1, -(-tokens // learner.tokens))
        if layout:
            passes *= 1 + (layout.pipeline - 1) / num_batches
            passes += num_batches * self.shared_s(learner, layout)
        return learner.epochs * (passes + self.exchange_s(num_batches, learner)) + self.hardware.update_s

    def shared_s(self, learner: LearnerCosts, layout: RankLayout) -> float:
        """Return the seconds in which ranks that share a stream exchange values, for a micro-batch on one stage.

        A block sums its hidden state over tensor ranks twice in the forward pass and twice in the backward pass (arXiv
        1909.08053, figure 4; with sequence parallelism as many bytes, arXiv 2205.05198). Context ranks pass keys and
        values around, and their gradients back. Copies of tokens travel to their experts and back. All of it happens
        again in blocks that are recomputed. Nothing is taken to overlap.
        """
        shape, again = self.shape, learner.recompute
        tokens, layers = learner.tokens / layout.context, shape.layers / layout.pipeline
        hidden = COMPUTE_BYTES * tokens * shape.hidden
        summed = (4 + 2 * again) * layers * _all_reduced(layout.tensor) * hidden
        keys = COMPUTE_BYTES * tokens * shape.cache_values / shape.layers / layout.tensor
        passed = (3 + again) * layers * (layout.context - 1) * keys
        copies = shape.experts_per_token * hidden / (layout.tensor if layout.sequence else 1)
        routed = 2 * (2 + again) * layers * _others(layout.expert) * copies
        stages = 2 * hidden if layout.pipeline > 1 else 0.0
        group = max(layout.tensor * layout.context, layout.expert * layout.expert_tensor)
        return (summed + passed + routed + stages) / (1e9 * self._link(group))

    def _link(self, ranks: int) -> float:
        """Return 1e9 bytes a second between ranks that may be on several hosts."""
        machine = self.hardware
        return machine.link_gb_s if ranks <= machine.gpus_per_host else min(machine.link_gb_s, machine.network_gb_s)

    def exchange_s(self, num_batches: int, learner: LearnerCosts) -> float:
        """Return the seconds in which ranks gather weights and sum gradients, and an offloaded optimizer moves.

        Ranks that reshard gather for every forward and backward pass; others once an update, as those of Megatron that
        hold the same weights.
        """
        ranks, machine, size = learner.num_ranks, self.hardware, self.shape.parameters
        if layout := learner.layout:
            experts = self.shape.experts
            dense = _others(layout.data_parallel(ranks) * layout.context) * (size - experts)
            moved = dense / (layout.tensor * layout.pipeline)
            moved += _others(layout.expert_data_parallel(ranks)) * experts / layout.expert_parallel
            seconds = (COMPUTE_BYTES + GRADIENT_BYTES) * moved / (1e9 * self._link(ranks))
            return seconds + (machine.ranks_s if ranks > 1 else 0.0)
        moved = 2 * 8 * size / ranks / (1e9 * machine.offload_gb_s) if learner.offloads else 0.0
        if ranks == 1:
            return moved
        gathered = (2 if learner.reshards else 1) * COMPUTE_BYTES + GRADIENT_BYTES
        total = gathered * size * (num_batches if learner.reshards else 1) * (ranks - 1) / ranks
        return machine.ranks_s + moved + total / (1e9 * self._link(ranks))

    def sync_s(self, transport: Transport, num_ranks: int = 1) -> float:
        """Return the seconds of a weight push: the ranks gather the weights, and the transport carries them."""
        machine = self.hardware
        rates = {
            "memory": machine.memory_push_gb_s,
            "ipc": machine.ipc_gb_s,
            "nccl": machine.nccl_gb_s,
            "disk": machine.disk_gb_s,
        }
        size = self.value_bytes * self.shape.parameters
        rate = machine.link_gb_s if num_ranks <= machine.gpus_per_host else machine.network_gb_s
        gather = size / (1e9 * rate) if num_ranks > 1 else 0.0
        return machine.push_s + gather + size / (1e9 * rates[transport])


def _others(ranks: int) -> float:
    """Return the share of what ranks exchange evenly that comes from others."""
    return (ranks - 1) / ranks


def _all_reduced(ranks: int) -> float:
    """Return how often a rank sends a tensor that is summed over all ranks: a ring scatters, then gathers."""
    return 2 * _others(ranks)
