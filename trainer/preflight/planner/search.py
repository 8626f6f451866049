"""Finds the fastest layout of a network on a number of GPUs: all that fit are candidates, the simulation decides."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agents.model.policy import PolicyModel
from envs.errors import UserError
from trainer.config.rollout import OWN_GPU
from trainer.learner.layout import Layout as RankLayout
from trainer.preflight.memory_estimate import empty_network
from trainer.preflight.memory_terms import count_values
from trainer.preflight.planner.costs import Costs, LearnerCosts, Transport
from trainer.preflight.planner.hardware import Hardware
from trainer.preflight.planner.layout import Layout, Memory, Placement, ladder
from trainer.preflight.planner.shape import ModelShape
from trainer.preflight.planner.simulation import Forecast, Schedule, simulate
from trainer.preflight.planner.workload import GroupShape, Workload

#: Layouts of each placement to simulate.
TRIED = 3


@dataclass(frozen=True)
class Wanted:
    """What the user has fixed; None and 0 leave the choice to the planner."""

    placement: Placement | None = None
    num_servers: int = 0
    tensor_parallel: int = 0
    transport: Transport | None = None

    def __post_init__(self) -> None:
        """Raise `UserError` for what a run refuses."""
        if self.placement == "colocate" and self.transport == "nccl":
            rule, fix = "needs servers on GPUs of their own", "give --sync auto, or --placement split"
            raise UserError("--sync nccl", rule, "--placement colocate", fix)

    def transports(self, placement: Placement, is_one_host: bool) -> list[Transport]:
        """Return the ways of the weights, first what a run takes by itself. NCCL has no two processes on one GPU."""
        if self.transport:
            return [] if (placement, self.transport) == ("colocate", "nccl") else [self.transport]
        if placement == "colocate":
            return ["ipc" if is_one_host else "disk"]
        return ["ipc", "nccl"] if is_one_host else ["nccl"]


@dataclass(frozen=True)
class Planned:
    """A layout and its forecast."""

    layout: Layout
    forecast: Forecast


@dataclass(eq=False)
class Search:
    """The layouts of one network and workload. Each is simulated once, for whatever number of GPUs.

    Example::

        search = Search.of("8b", Hardware.read("h200"), Lengths(), Schedule(max_staleness=1))
        best = search.best(64, Wanted())
        best.layout.describe(), best.forecast.samples_per_s
    """

    memory: Memory
    costs: Costs
    workload: Workload
    schedule: Schedule
    seed: int = 0
    _done: dict[Layout, Forecast] = field(default_factory=dict)
    _found: dict[tuple[int, Wanted], Planned | None] = field(default_factory=dict)
    _learner_s: dict[LearnerCosts, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: str | PolicyModel,
        hardware: Hardware,
        workload: Workload,
        schedule: Schedule,
        seed: int = 0,
        layouts: Sequence[RankLayout] | None = (),
    ) -> Search:
        """Return the search for a network, or for a checkpoint folder, hub id or name of `QWEN3_VL`.

        `layouts` are those of Megatron to choose from: none with FSDP2; None: all that the network allows.
        """
        network = empty_network(model) if isinstance(model, str) else model
        shape = ModelShape.of(network.config, count_values(network.parameters()))
        group = next(workload.groups(schedule.group_size, seed))
        share = group.images / group.trained_tokens
        memory = Memory(network, shape, hardware, workload.longest, share, layouts)
        return cls(memory, Costs(shape, hardware), workload, schedule, seed)

    def forecast(self, layout: Layout) -> Forecast:
        """Return what the run does with this layout."""
        if layout not in self._done:
            groups = self.workload.groups(self.schedule.group_size, self.seed)
            self._done[layout] = simulate(self.costs, layout, self.schedule, groups)
        return self._done[layout]

    def best(self, num_gpus: int, wanted: Wanted = Wanted()) -> Planned:
        """Return the layout of at most so many GPUs with the most samples a second. It may leave some idle, so more
        GPUs are never slower.

        Raises:
            UserError: none fits.
        """
        found: Planned | None = None
        for number in (*(n for n in ladder(num_gpus) if n < num_gpus), num_gpus):
            if made := self.fastest(number, wanted):
                found = max(found or made, made, key=lambda planned: planned.forecast.samples_per_s)
        if found is None:
            refused = [layout for layout in self._candidates(num_gpus, wanted) if isinstance(layout, str)]
            fix = refused[-1] if refused else "give more GPUs"  # the last one has the most learners
            raise UserError("--num-gpus", "must hold learners and servers", num_gpus, fix)
        return found

    def fastest(self, num_gpus: int, wanted: Wanted = Wanted()) -> Planned | None:
        """Return the best of the layouts that the estimate puts first, `TRIED` of each placement; None if none fits.

        What costs time that nobody has measured is chosen only where nothing else fits: GPUs that both sides share
        (`release_s`), and servers of more GPUs than they need (`collective_s`).
        """
        if (num_gpus, wanted) not in self._found:
            fitting = [layout for layout in self._candidates(num_gpus, wanted) if isinstance(layout, Layout)]
            tried = []
            for placement in ("split", "colocate"):
                own = [layout for layout in fitting if layout.placement == placement]
                if not tried or self.memory.hardware.is_measured("release_s"):
                    tried += sorted(own, key=self.estimate, reverse=True)[:TRIED]
            made = [Planned(layout, self.forecast(layout)) for layout in tried]
            self._found[num_gpus, wanted] = max(made, key=lambda planned: planned.forecast.samples_per_s, default=None)
        return self._found[num_gpus, wanted]

    def _candidates(self, num_gpus: int, wanted: Wanted) -> Iterator[Layout | str]:
        sizes = [wanted.tensor_parallel] if wanted.tensor_parallel else self._server_sizes()
        gpus_per_host = int(self.memory.hardware.gpus_per_host)
        shared, apart = (wanted.transports(each, num_gpus <= gpus_per_host) for each in ("colocate", "split"))
        for ranks, size in itertools.product(ladder(num_gpus), sizes):
            if size > gpus_per_host:
                continue
            if wanted.placement != "split" and shared and ranks >= size:
                count = wanted.num_servers or ranks // size
                if count * size <= ranks:
                    yield self._first("colocate", ranks, count, size, shared)
            if wanted.placement != "colocate":
                left = (num_gpus - ranks) // size
                counts = [wanted.num_servers] if wanted.num_servers else ladder(left)
                for count in counts:
                    if 0 < count <= left:
                        yield self._first("split", ranks, count, size, apart)

    def _first(
        self, placement: Placement, ranks: int, count: int, size: int, transports: list[Transport]
    ) -> Layout | str:
        """Return the layout with the first transport whose copies of the weights fit."""
        made = [self.memory.layout(placement, ranks, count, size, transport) for transport in transports]
        return next((layout for layout in made if isinstance(layout, Layout)), made[-1])

    def _server_sizes(self) -> list[int]:
        gib = OWN_GPU * self.memory.hardware.memory_gib
        sizes = [size for size in (1, 2, 4, 8) if self.memory.cache_tokens(size, gib) >= self.memory.longest]
        return (sizes if self.memory.hardware.is_measured("collective_s") else sizes[:1]) or [8]

    def estimate(self, layout: Layout) -> float:
        """Return about how many samples a second the layout gives, without playing: the learner's seconds and the
        servers', one after the other where they wait for each other.
        """
        schedule, totals = self.schedule, self._totals
        if layout.learner not in self._learner_s:
            self._learner_s[layout.learner] = self.costs.train_s(totals.groups, layout.learner)
        learner_s = self._learner_s[layout.learner]
        sync_s = self.costs.sync_s(layout.transport, layout.learner.num_ranks)
        ahead = schedule.max_staleness + 1
        # The groups of step k + ahead begin when step k has been pushed, so so many steps share one of each.
        step_s = (self._rollout_s(layout, 1) + learner_s + sync_s) / ahead
        rollout_s, pushed_s = self._rollout_s(layout, ahead), learner_s + sync_s
        step_s = max(step_s, rollout_s + sync_s if layout.placement == "split" else rollout_s + pushed_s, pushed_s)
        return schedule.problems_per_step * schedule.group_size / step_s

    @functools.cached_property
    def _totals(self) -> _Totals:
        drawn = self.workload.groups(self.schedule.group_size, self.seed)
        groups = list(itertools.islice(drawn, self.schedule.problems_per_step))
        num_episodes = len(groups) * self.schedule.group_size
        return _Totals(
            groups=groups,
            written=sum(group.model_tokens for group in groups),
            longest=max(episode.model_tokens for group in groups for episode in group.episodes),
            half_stream=sum(group.stream_tokens for group in groups) / num_episodes / 2,
            reading_s=sum(self.costs.prefill_s(g.trained_tokens - g.model_tokens, 0, g.images) for g in groups),
        )

    def _rollout_s(self, layout: Layout, ahead: int) -> float:
        """Return about how long the servers write a step's tokens: as many streams at once as there are, and the
        longest episode alone where nothing else is ahead.
        """
        servers, size, totals = layout.num_servers, layout.tensor_parallel, self._totals
        streams = min(self.schedule.max_concurrent, ahead * len(totals.groups) * self.schedule.group_size)
        rows = max(1, min(streams // servers, int(layout.cache_tokens / totals.half_stream)))
        step_s = self.costs.decode_step_s(rows, rows * totals.half_stream, size)
        tail_s = totals.longest * self.costs.decode_step_s(1, 2 * totals.half_stream, size) / ahead
        writing_s = totals.written / servers / rows * step_s
        return totals.reading_s / servers / size + max(writing_s + tail_s / 2, tail_s)


@dataclass(frozen=True)
class _Totals:
    """Sums over the groups of one step."""

    groups: list[GroupShape]
    written: int
    longest: int
    half_stream: float
    reading_s: float
