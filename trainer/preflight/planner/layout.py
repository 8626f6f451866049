"""Which GPUs learn and which generate, whether both fit into their memory, and the flags of `trainer.run` for it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agents.model.policy import PolicyModel
from trainer.config.rollout import OWN_GPU
from trainer.learner.layout import Layout as RankLayout
from trainer.learner.layout_rules import is_possible, num_experts
from trainer.preflight.memory_estimate import estimate
from trainer.preflight.memory_terms import GIB, MemoryEstimate, Plan
from trainer.preflight.planner.costs import COMPUTE_BYTES, LearnerCosts, Transport
from trainer.preflight.planner.hardware import Hardware
from trainer.preflight.planner.shape import ModelShape

Placement = Literal["colocate", "split"]
#: Share of a GPU's memory that neither a server nor the learner beside it may take.
MARGIN = 0.1
#: Ways of the learner to run, the fastest first: recompute, reshard, offload.
WAYS = (
    (0.0, False, False),
    (0.0, True, False),
    (0.5, True, False),
    (1.0, True, False),
    (1.0, True, True),
)
#: Those of Megatron: recompute.
RECOMPUTED = (0.0, 0.5, 1.0)
#: Tokens of a micro-batch to try.
MICRO_BATCHES = (16384, 8192, 4096)


@dataclass(frozen=True)
class Layout:
    """A run's GPUs. With `split` the servers have GPUs of their own, with `colocate` they share the learners'.

    `cache_tokens` is how many tokens a server's cache holds. 0 servers: the embedded engine, in the command's process.

    Example: `Layout("split", LearnerCosts(num_ranks=4), num_servers=2, tensor_parallel=2, ...)` uses 8 GPUs.
    """

    placement: Placement
    learner: LearnerCosts
    num_servers: int
    tensor_parallel: int
    transport: Transport
    cache_tokens: float
    mem_fraction: float = OWN_GPU
    learner_gib: float = 0.0
    server_gib: float = 0.0

    @property
    def num_gpus(self) -> int:
        """GPUs of both sides together."""
        learners = self.learner.num_ranks
        return learners if self.placement == "colocate" else learners + self.num_servers * self.tensor_parallel

    def describe(self) -> str:
        """Return one line: "split: 4 GPUs for learners, 2 x 2 for servers"."""
        servers = f"{self.num_servers} x {self.tensor_parallel} for servers"
        shared = f" ({self.learner.layout.flags()})" if self.learner.layout else ""
        return f"{self.placement}: {self.learner.num_ranks} GPUs for learners{shared}, {servers}"

    def flags(self) -> dict[str, object]:
        """Return the flags of `trainer.run`, by field name."""
        return {
            "num_gpus": self.learner.num_ranks,
            "num_servers": self.num_servers,
            "tensor_parallel": self.tensor_parallel,
            "placement": self.placement,
            "mem_fraction": round(self.mem_fraction, 2),
            "max_tokens_per_microbatch": self.learner.tokens,
            "recompute": self.learner.recompute,
            **({} if self.learner.layout else self._fsdp_flags()),
        }

    def _fsdp_flags(self) -> dict[str, object]:
        return {
            "reshard": "always" if self.learner.reshards else "never",
            "offload": "optimizer" if self.learner.offloads else "none",
        }


class Memory:
    """What fits: a network on a machine's GPUs, with streams of at most `longest` tokens, `image_share` of pictures.

    Example::

        memory = Memory(model, shape, Hardware.read("h100"), longest=4096, image_share=0.2)
        memory.learner(8)                   # LearnerCosts(num_ranks=8, tokens=16384, recompute=0.0, ...), and its GiB
        memory.cache_tokens(1, 80 * 0.8)    # 1,100,000 tokens
    """

    def __init__(
        self,
        model: PolicyModel,
        shape: ModelShape,
        hardware: Hardware,
        longest: int,
        image_share: float,
        layouts: Sequence[RankLayout] | None = (),
    ) -> None:
        """`layouts` are those of Megatron to choose from: none with FSDP2; None: all that the network allows."""
        self.model, self.shape, self.hardware, self.longest = model, shape, hardware, longest
        self.image_share, self.layouts = image_share, layouts

    @functools.cache  # noqa: B019 - lives as long as its command
    def estimate(
        self,
        num_ranks: int,
        tokens: int,
        recompute: float,
        reshards: bool,
        offloads: bool,
        layout: RankLayout | None = None,
    ) -> MemoryEstimate:
        """Return what one rank takes; `trainer.memory` prints the same."""
        patches = round(self.image_share * tokens) * self.shape.patches_per_token
        reshard, offload = "always" if reshards else "never", "optimizer" if offloads else "none"
        plan = Plan(num_ranks, tokens, patches, recompute, reshard, offload, layout=layout)
        return estimate(self.model, plan)

    @functools.cache  # noqa: B019
    def learner(self, num_ranks: int, whole_copy: bool = False) -> tuple[LearnerCosts, MemoryEstimate] | None:
        """Return the fastest way in which so many ranks fit, and its estimate; None if there is none.

        `whole_copy`: the first rank also holds all weights once in bfloat16, which a push needs that does not stream.
        Of the layouts of Megatron, the one with the least sharing that fits is taken.
        """
        extra = COMPUTE_BYTES * self.shape.parameters if whole_copy and num_ranks > 1 else 0
        micro_batches = [tokens for tokens in MICRO_BATCHES if tokens >= self.longest] or [self.longest]
        for recompute, reshards, offloads, layout in self._ways(num_ranks):
            for tokens in micro_batches:
                found = self.estimate(num_ranks, tokens, recompute, reshards, offloads, layout)
                # A push comes between steps: gathered weights, activations and logits are free again.
                if max(found.total, found.between_steps + extra) <= self.hardware.memory_gib * GIB:
                    made = LearnerCosts(num_ranks, tokens, recompute, reshards, offloads, layout=layout)
                    return made, found
        return None

    def _ways(self, num_ranks: int) -> list[tuple[float, bool, bool, RankLayout | None]]:
        """Return how so many ranks may run, the fastest first: recompute, reshard, offload, layout."""
        if self.layouts == ():
            return [(recompute, reshards and num_ranks > 1, offloads, None) for recompute, reshards, offloads in WAYS]
        room = self.hardware.memory_gib * GIB
        layouts = [layout for layout in self._layouts(num_ranks) if self._least(num_ranks, layout) <= room]
        return [(recompute, False, False, layout) for layout in layouts for recompute in RECOMPUTED]

    def _layouts(self, num_ranks: int) -> list[RankLayout]:
        """Return the layouts that so many ranks can have, those that share the least first.

        Experts are spread over as many ranks of a host as possible. Streams are shared only if they are longer than the
        largest micro-batch.
        """
        config, host = self.model.config, int(self.hardware.gpus_per_host)
        made = self.layouts
        if made is None:
            contexts = (1, 2, 4, 8) if self.longest > MICRO_BATCHES[0] else (1,)
            experts = (32, 16, 8, 4, 2, 1) if num_experts(config) else (1,)
            sizes = itertools.product(contexts, (1, 2, 4, 8, 16), (1, 2, 4, 8), experts)
            made = [
                RankLayout(tensor, stages, expert, 1, context, tensor > 1)
                for context, stages, tensor, expert in sizes
                if max(tensor * context, expert) <= host
            ]
        possible = [layout for layout in made if is_possible(layout, num_ranks, config)]
        # A stable sort: of the same amount of sharing, more experts apart come first.
        return sorted(possible, key=lambda layout: (layout.model_parallel, layout.pipeline))

    def _least(self, num_ranks: int, layout: RankLayout | None) -> int:
        """Return the bytes that a rank needs if it saves memory wherever it can."""
        tokens, offloads = max(self.longest, MICRO_BATCHES[-1]), (False,) if layout else (False, True)
        reshards = num_ranks > 1 and layout is None
        return min(self.estimate(num_ranks, tokens, 1.0, reshards, offload, layout).total for offload in offloads)

    def cache_tokens(self, tensor_parallel: int, gib: float) -> float:
        """Return the tokens that fit into a server's cache if it may take so many GiB of each of its GPUs."""
        free = gib * GIB - COMPUTE_BYTES * self.shape.parameters / tensor_parallel
        copies = min(tensor_parallel, self.shape.kv_heads)
        return max(0.0, free * copies / (COMPUTE_BYTES * self.shape.cache_values))

    def layout(
        self, placement: Placement, num_ranks: int, num_servers: int, tensor_parallel: int, transport: Transport
    ) -> Layout | str:
        """Return the layout, or what does not fit, by how much, and the nearest that does."""
        gpu_gib = self.hardware.memory_gib
        streams = transport in ("nccl", "memory")
        chosen = self.learner(num_ranks, not streams)
        if chosen is None:
            return self._learner_too_large(num_ranks, streams)
        learner, found = chosen
        resident = found.between_steps / GIB if placement == "colocate" else 0.0
        fraction = min(OWN_GPU, (1 - resident / gpu_gib) - MARGIN) if resident else OWN_GPU
        tokens = self.cache_tokens(tensor_parallel, max(0.0, fraction) * gpu_gib)
        if tokens < self.longest:
            return self._server_too_large(tensor_parallel, fraction)
        return Layout(
            placement=placement,
            learner=learner,
            num_servers=num_servers,
            tensor_parallel=tensor_parallel,
            transport=transport,
            cache_tokens=tokens,
            mem_fraction=fraction,
            learner_gib=found.total / GIB,
            server_gib=fraction * gpu_gib,
        )

    def _learner_too_large(self, num_ranks: int, streams: bool) -> str:
        layouts = [None] if self.layouts == () else self._layouts(num_ranks)
        if not layouts:
            return f"{num_ranks} learners cannot share the network in this way: give more, or another --tp to --sp"
        least = min(self._least(num_ranks, layout) for layout in layouts)
        whole = COMPUTE_BYTES * self.shape.parameters
        gpu = self.hardware.memory_gib
        nearest = next((n for n in ladder(4096) if n > num_ranks and self.learner(n, not streams)), None)
        fix = f"{nearest} learners do" if nearest else "no number does: give shorter episodes, or --sync nccl"
        if least <= gpu * GIB:
            held = (whole + least) / GIB
            return f"rank 0 of {num_ranks} learners needs {held:.0f} of {gpu:g} GiB to push weights whole; {fix}"
        return f"a learner of {num_ranks} needs {least / GIB:.0f} of {gpu:g} GiB; {fix}"

    def _server_too_large(self, tensor_parallel: int, fraction: float) -> str:
        gpu, weights = self.hardware.memory_gib, COMPUTE_BYTES * self.shape.parameters / GIB
        cache = COMPUTE_BYTES * self.shape.cache_values * self.longest / GIB
        needed = weights / tensor_parallel + cache / min(tensor_parallel, self.shape.kv_heads)
        nearest = [n for n in (1, 2, 4, 8) if self.cache_tokens(n, max(0.0, fraction) * gpu) >= self.longest]
        fix = f"--tensor-parallel {nearest[0]} does" if nearest else "no --tensor-parallel up to 8 does"
        has = max(0.0, fraction) * gpu
        return f"a server of {tensor_parallel} GPUs needs {needed:.0f} GiB on each and may take {has:.0f}; {fix}"


def ladder(largest: int) -> list[int]:
    """Return the numbers of GPUs to try: powers of two, and three quarters of them.

    >>> ladder(16)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [2**n for n in range(largest.bit_length()) if 2**n <= largest]
    return sorted({*powers, *(3 * n for n in powers if 3 * n <= largest)})
