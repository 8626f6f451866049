"""Finds the fastest split of GPUs into learners and servers that fits into memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agents.model.policy import PolicyModel
from envs.errors import UserError
from trainer.config.rollout import OWN_GPU
from trainer.learner.compile_choice import LARGE
from trainer.planning.memory import GIB, MemoryEstimate, Plan, estimate
from trainer.planning.speed import COMPUTE_BYTES, Forecast, LearnerLayout, PlannedLayout, Speed, Transport

#: Share of a GPU's memory that neither a server nor the learner beside it may take.
MARGIN = 0.1
#: Ways of the learner to run, the fastest first: recompute, reshard, offload.
WAYS = ((0.0, False, False), (0.0, True, False), (0.5, True, False), (1.0, True, False), (1.0, True, True))
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
            UserError: none fits, or a run refuses what the schedule asks for.
        """
        if self.speed.schedule.placement == "colocate" and self.speed.schedule.sync == "nccl":
            rule = "needs servers on GPUs of their own"
            fix = "give --sync auto, or --placement split"
            raise UserError("--sync nccl", rule, "--placement colocate", fix)
        found: Planned | None = None
        refused = "give more GPUs"
        for layout in self._candidates(num_gpus):
            if isinstance(layout, str):
                refused = layout  # the last one has the most learners
                continue
            made = Planned(layout, self.speed.forecast(layout))
            if found is None or _order(made) > _order(found):
                found = made
        if found is None:
            raise UserError("--num-gpus", "must hold learners and servers", num_gpus, refused)
        return found

    def layout(
        self,
        placement: Literal["colocate", "split"],
        num_ranks: int,
        num_servers: int,
        tensor_parallel: int,
        transport: Transport,
    ) -> PlannedLayout | str:
        """Return the layout, or what does not fit, by how much, and the nearest that does."""
        gpu_gib = self.speed.hardware.memory_gib
        chosen = self.learner(num_ranks, transport != "nccl")
        if chosen is None:
            return self._learner_too_large(num_ranks, transport != "nccl")
        learner, found = chosen
        fraction = OWN_GPU
        if placement == "colocate":
            fraction = max(0.0, min(OWN_GPU, 1 - found.between_steps / GIB / gpu_gib - MARGIN))
        tokens = self.cache_tokens(tensor_parallel, fraction * gpu_gib)
        if tokens < self.speed.workload.longest:
            return self._server_too_large(tensor_parallel, fraction * gpu_gib)
        return PlannedLayout(
            placement=placement,
            learner=learner,
            num_servers=num_servers,
            tensor_parallel=tensor_parallel,
            transport=transport,
            cache_tokens=tokens,
            mem_fraction=fraction,
            learner_gib=found.total / GIB,
        )

    @functools.cache  # noqa: B019 - lives as long as its command
    def learner(self, num_ranks: int, whole_copy: bool) -> tuple[LearnerLayout, MemoryEstimate] | None:
        """Return the fastest way in which so many ranks fit, and its estimate; None if there is none.

        `whole_copy`: the first rank also holds all weights once in bfloat16, which a push needs that does not stream.
        """
        longest = self.speed.workload.longest
        if whole_copy and num_ranks > 1:
            copy = COMPUTE_BYTES * self.speed.shape.parameters
        else:
            copy = 0
        micro_batches = [tokens for tokens in MICRO_BATCHES if tokens >= longest] or [longest]
        for (recompute, reshards, offloads), tokens in itertools.product(WAYS, micro_batches):
            learner = LearnerLayout(num_ranks, tokens, recompute, reshards and num_ranks > 1, offloads)
            found = self.estimate(learner)
            # A push comes between steps: gathered weights, activations and logits are free again.
            if max(found.total, found.between_steps + copy) <= self.speed.hardware.memory_gib * GIB:
                return learner, found
        return None

    @functools.cache  # noqa: B019
    def estimate(self, learner: LearnerLayout) -> MemoryEstimate:
        """Return what one rank takes; `trainer.memory` prints the same."""
        work = self.speed.workload
        image_tokens = round(learner.tokens * work.image_tokens / work.stream)
        plan = Plan(
            num_gpus=learner.num_ranks,
            tokens=learner.tokens,
            patches=image_tokens * self.speed.shape.patches_per_token,
            recompute=learner.recompute,
            reshard="always" if learner.reshards else "never",
            offload="optimizer" if learner.offloads else "none",
            is_compiled=self.speed.shape.parameters >= LARGE,
        )
        return estimate(self.network, plan)

    def cache_tokens(self, tensor_parallel: int, gib: float) -> float:
        """Return the tokens that fit into a server's cache if it may take so many GiB of each of its GPUs."""
        shape = self.speed.shape
        free = gib * GIB - COMPUTE_BYTES * shape.parameters / tensor_parallel
        return max(0.0, free * min(tensor_parallel, shape.kv_heads) / (COMPUTE_BYTES * shape.cache_values))

    def _candidates(self, num_gpus: int) -> Iterator[PlannedLayout | str]:
        """Yield the layouts of at most so many GPUs, or why one does not fit."""
        wanted = self.speed.schedule
        if wanted.tensor_parallel:
            sizes = [wanted.tensor_parallel]
        else:
            sizes = self._server_sizes()
        for ranks, size in itertools.product(ladder(num_gpus), sizes):
            if size > self.speed.hardware.gpus_per_host:
                continue
            if wanted.allows_colocate and ranks >= size:
                count = wanted.num_servers or ranks // size
                if count * size <= ranks:
                    yield self._first("colocate", ranks, count, size)
            left = (num_gpus - ranks) // size
            if wanted.placement != "colocate" and left:
                for count in [wanted.num_servers] if wanted.num_servers else ladder(left):
                    if count <= left:
                        yield self._first("split", ranks, count, size)

    def _first(self, placement: Literal["colocate", "split"], ranks: int, count: int, size: int) -> PlannedLayout | str:
        """Return the layout with the first transport whose copies of the weights fit, in the order of a run."""
        if placement == "colocate":
            used = ranks
        else:
            used = ranks + count * size
        is_one_host = used <= self.speed.hardware.gpus_per_host
        transports: list[Transport] = ["ipc", "nccl"] if is_one_host else ["nccl"]
        if placement == "colocate":  # NCCL has no two processes on one GPU
            if is_one_host:
                transports = ["ipc"]
            else:
                transports = ["disk"]
        if self.speed.schedule.sync != "auto":
            transports = [self.speed.schedule.sync]
        made = [self.layout(placement, ranks, count, size, transport) for transport in transports]
        return next((layout for layout in made if isinstance(layout, PlannedLayout)), made[-1])

    def _server_sizes(self) -> list[int]:
        """Return the GPUs of a server to try: the fewest that fit. What more of them exchange was not measured."""
        room = OWN_GPU * self.speed.hardware.memory_gib
        fitting = [size for size in (1, 2, 4, 8) if self.cache_tokens(size, room) >= self.speed.workload.longest]
        return fitting[:1] or [8]

    def _learner_too_large(self, num_ranks: int, whole_copy: bool) -> str:
        gpu_gib = self.speed.hardware.memory_gib
        if whole_copy and self.learner(num_ranks, whole_copy=False):
            return (
                f"rank 0 of {num_ranks} learners has no room in {gpu_gib:g} GiB to push weights whole; give --sync nccl"
            )
        tokens = max(self.speed.workload.longest, MICRO_BATCHES[-1])
        saving = [LearnerLayout(num_ranks, tokens, 1.0, num_ranks > 1, offloads) for offloads in (False, True)]
        least_gib = min(self.estimate(learner).total for learner in saving) / GIB
        more = (number for number in ladder(MOST_GPUS) if number > num_ranks and self.learner(number, whole_copy=False))
        nearest = next(more, None)
        if nearest:
            fix = f"{nearest} learners do"
        else:
            fix = "no number does: give shorter episodes"
        return f"a learner of {num_ranks} needs {least_gib:.0f} of {gpu_gib:g} GiB; {fix}"

    def _server_too_large(self, tensor_parallel: int, room_gib: float) -> str:
        shape = self.speed.shape
        longest = self.speed.workload.longest
        weights = COMPUTE_BYTES * shape.parameters / tensor_parallel
        cache = COMPUTE_BYTES * shape.cache_values * longest / min(tensor_parallel, shape.kv_heads)
        needed = (weights + cache) / GIB
        fitting = [size for size in (1, 2, 4, 8) if self.cache_tokens(size, room_gib) >= longest]
        if fitting:
            fix = f"--tensor-parallel {fitting[0]} does"
        else:
            fix = "no --tensor-parallel up to 8 does"
        return f"a server of {tensor_parallel} GPUs needs {needed:.0f} GiB on each and may take {room_gib:.0f}; {fix}"


def _order(planned: Planned) -> tuple[float, int]:
    return planned.forecast.samples_per_s, -planned.layout.num_gpus


def ladder(largest: int) -> list[int]:
    """Return the numbers of GPUs to try: powers of two, three quarters of them, and the largest.

    >>> ladder(16)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [2**n for n in range(largest.bit_length()) if 2**n <= largest]
    return sorted({*powers, *(3 * n for n in powers if 3 * n <= largest), largest})
