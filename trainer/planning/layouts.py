"""Finds the fastest split of GPUs into learners and servers that fits into memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agents.model.policy import PolicyModel
from envs.errors import UserError
from trainer.config.learner import Reshard
from trainer.config.rollout import OWN_GPU
from trainer.learner.compile_choice import LARGE
from trainer.planning.memory import GIB, MemoryEstimate, Plan, estimate
from trainer.planning.speed import COMPUTE_BYTES, Forecast, PlannedLayout, Speed

#: Share of a GPU's memory that neither a server nor the learner beside it may take.
MARGIN = 0.1
#: Ways of the learner to run, the fastest first: what it recomputes, and whether it reshards.
WAYS: tuple[tuple[float, Reshard], ...] = ((0.0, "never"), (0.0, "always"), (0.5, "always"), (1.0, "always"))
#: Tokens of a micro-batch to try.
MICRO_BATCHES = (16384, 8192, 4096)
#: Larger than any cluster that is planned.
MOST_GPUS = 4096


@dataclass(frozen=True)
class Planned:
    """A layout and its forecast."""

    layout: PlannedLayout
    forecast: Forecast


@dataclass(frozen=True, eq=False)
class Search:
    """The layouts of one network that fit, and the fastest of them.

    Example::

        search = Search(network, Speed(shape, Hardware.read("h200"), Workload(), Schedule(max_staleness=1)))
        best = search.best(64)
        best.layout.num_servers, best.forecast.samples_per_s
    """

    network: PolicyModel
    speed: Speed

    def best(self, num_gpus: int) -> Planned:
        """Return the layout of at most so many GPUs with the most samples a second; of equally fast ones the smallest.

        Raises:
            UserError: none fits.
        """
        planned = [Planned(layout, self.speed.forecast(layout)) for layout in self._layouts(num_gpus)]
        if not planned:
            raise UserError("--num-gpus", "must hold learners and servers", num_gpus, self._what_fits(num_gpus))
        # Of equal speed the smaller one: GPUs that add nothing are left for others.
        return max(planned, key=lambda each: (each.forecast.samples_per_s, -each.layout.num_gpus))

    def _layouts(self, num_gpus: int) -> Iterator[PlannedLayout]:
        """Yield the layouts of at most so many GPUs that fit."""
        wanted = self.speed.schedule
        size = self._server_size()
        for ranks in ladder(num_gpus):
            # Over several hosts servers on learners' GPUs get weights from disk, which takes longer than a step.
            fits_host = size <= ranks <= self.speed.hardware.gpus_per_host
            if wanted.placement != "split" and not wanted.keep_kv_cache and fits_host:
                yield from filter(None, [self.layout("colocate", ranks, ranks // size, size)])
            if wanted.placement != "colocate":
                made = (self.layout("split", ranks, count, size) for count in ladder((num_gpus - ranks) // size))
                yield from filter(None, made)

    def layout(
        self, placement: Literal["colocate", "split"], ranks: int, count: int, size: int
    ) -> PlannedLayout | None:
        """Return the layout of so many learners, and of so many servers of `size` GPUs; None if it does not fit."""
        room = self.speed.hardware.memory_gib * GIB
        chosen = self.learner(ranks)
        if chosen is None:
            return None
        learner, memory = chosen
        is_one_host = placement == "colocate" or ranks + count * size <= self.speed.hardware.gpus_per_host
        # Between hosts NCCL streams the weights. On one, rank 0 holds all of them once, between the steps.
        copy = COMPUTE_BYTES * self.speed.shape.parameters
        if ranks > 1 and is_one_host and memory.between_steps + copy > room:
            return None
        # Servers of their own share the GPU with nobody.
        fraction = OWN_GPU
        if placement == "colocate":
            fraction = max(0.0, min(OWN_GPU, 1 - memory.between_steps / room - MARGIN))
        tokens = self.cache_tokens(size, fraction)
        if tokens < self.speed.workload.longest:
            return None
        return PlannedLayout(placement, learner, count, size, tokens, fraction, memory.total / GIB)

    @functools.cache  # noqa: B019 - lives as long as its command
    def learner(self, num_ranks: int) -> tuple[Plan, MemoryEstimate] | None:
        """Return the fastest way in which so many ranks fit, and its estimate; None if there is none."""
        longest = self.speed.workload.longest
        micro_batches = [tokens for tokens in MICRO_BATCHES if tokens >= longest] or [longest]
        for (recompute, reshard), tokens in itertools.product(WAYS, micro_batches):
            # One rank has nobody to gather from.
            if num_ranks == 1 and reshard == "always":
                reshard = "never"
            plan = self._plan(num_ranks, tokens, recompute, reshard)
            memory = estimate(self.network, plan)
            # The order of WAYS and MICRO_BATCHES makes the first that fits the fastest.
            if memory.total <= self.speed.hardware.memory_gib * GIB:
                return plan, memory
        return None

    def _plan(self, num_ranks: int, tokens: int, recompute: float, reshard: Reshard) -> Plan:
        work = self.speed.workload
        return Plan(
            num_gpus=num_ranks,
            tokens=tokens,
            patches=round(tokens * work.image_tokens / work.stream) * self.network.merge_size**2,
            recompute=recompute,
            reshard=reshard,
            is_compiled=self.speed.shape.parameters >= LARGE,
        )

    def cache_tokens(self, size: int, fraction: float) -> float:
        """Return the tokens in the cache of a server that may take this share of each of its GPUs."""
        shape = self.speed.shape
        # Servers hold the weights in bfloat16, cut over their GPUs.
        free = fraction * self.speed.hardware.memory_gib * GIB - COMPUTE_BYTES * shape.parameters / size
        return max(0.0, free * min(size, shape.kv_heads) / (COMPUTE_BYTES * shape.cache_values))

    def _server_size(self) -> int:
        """Return the GPUs of a server: the fewest that fit. What more of them exchange was not measured."""
        sizes = [size for size in (1, 2, 4) if self.cache_tokens(size, OWN_GPU) >= self.speed.workload.longest]
        return next(iter(sizes), 8)

    def _what_fits(self, num_gpus: int) -> str:
        """Return why nothing fits: what a learner needs at least, and how many do."""
        if self.learner(num_gpus):
            return "give more GPUs, or shorter episodes"
        # The least that any way needs: all recomputed, smallest micro-batch.
        tokens = max(self.speed.workload.longest, MICRO_BATCHES[-1])
        least = estimate(self.network, self._plan(num_gpus, tokens, 1.0, "always")).total
        needed = f"a learner of {num_gpus} needs {least / GIB:.0f} of {self.speed.hardware.memory_gib:g} GiB"
        nearest = next((number for number in ladder(MOST_GPUS) if number > num_gpus and self.learner(number)), None)
        if nearest is None:
            return f"{needed}; no number does: give shorter episodes"
        return f"{needed}; {nearest} learners do"


def ladder(largest: int) -> list[int]:
    """Return the numbers of GPUs to try: powers of two, three quarters of them, and the largest.

    >>> ladder(16)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [2**n for n in range(largest.bit_length()) if 2**n <= largest]
    return sorted({*powers, *(3 * n for n in powers if 3 * n <= largest), largest} - {0})
