"""Seconds of a run's parts, from the network's shape, the machine's constants and the means of its episodes.

The learner's seconds are operations over operations a second. A server's are bytes over bytes a second, plus measured
constants. A step joins both: one after the other without staleness, beside each other with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.config.rollout import OWN_GPU, EngineConfig
from trainer.planning.hardware import Hardware
from trainer.planning.memory import Plan
from trainer.planning.shape import ModelShape, triangle
from trainer.planning.workload import Schedule, Workload

#: A forward, and twice that for the gradients of inputs and of weights.
TRAINING_FACTOR = 3
#: How long a turn waits for others before its server reads.
TURN_WAIT_S = EngineConfig.model_fields["turn_wait_s"].default
#: Bytes of a value that servers compute with, and that ranks gather; of a gradient that ranks sum.
COMPUTE_BYTES = 2
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class PlannedLayout:
    """A run's GPUs. With `split` the servers have GPUs of their own, with `colocate` they share the learners'.

    `cache_tokens` is how many tokens a server's cache holds.

    Example: `PlannedLayout("split", Plan(num_gpus=4), num_servers=2, tensor_parallel=2, ...)` uses 8 GPUs.
    """

    placement: Literal["colocate", "split"]
    learner: Plan
    num_servers: int
    tensor_parallel: int
    cache_tokens: float
    mem_fraction: float = OWN_GPU
    learner_gib: float = 0.0

    @property
    def num_gpus(self) -> int:
        """GPUs of both sides together."""
        if self.placement == "colocate":
            return self.learner.num_gpus
        return self.learner.num_gpus + self.num_servers * self.tensor_parallel


@dataclass(frozen=True)
class Forecast:
    """What a run does with a layout: seconds of a step, those of training in it, and the part that limits it."""

    step_s: float
    train_s: float
    limit: str
    samples_per_s: float


@dataclass(frozen=True)
class Speed:
    """How fast one network runs one workload on one kind of machine.

    Example::

        speed = Speed(ModelShape.of(network), Hardware.read("h100"), Workload(), Schedule())
        speed.forecast(layout).samples_per_s
    """

    shape: ModelShape
    hardware: Hardware
    workload: Workload
    schedule: Schedule

    def forecast(self, layout: PlannedLayout) -> Forecast:
        """Return what a run does with this layout.

        The learner waits for a whole rollout without staleness. With it, for its share: rollouts of staleness + 1 steps
        are on their way at once (measured with staleness 1, 2 and 4: docs/scale.md).
        """
        ahead = self.schedule.max_staleness + 1
        train_s = self.train_s(layout.learner)
        learner_s = train_s + self.sync_s(layout.learner)
        reading_s = self.reading_s(layout)
        again_s = self.read_again_s(layout)
        # A server writes nothing while it reads, or while weights arrive.
        servers_s = self.writing_s(layout) + reading_s + again_s + self.sync_s(layout.learner)
        # Servers that share GPUs with the learner stand still while it trains.
        if layout.placement == "colocate":
            learner_s += self.hardware.release_s
            servers_s += train_s + self.hardware.release_s
        waited_s = (self.latency_s(layout) + reading_s) / ahead + again_s
        # Whoever is busier sets the pace, however far ahead episodes play.
        step_s = max(learner_s + waited_s, servers_s)
        # Neither side is the limit if both wait most of the time, for the longest episode.
        if max(learner_s, servers_s) <= 0.5 * step_s:
            limit = "episode latency"
        elif learner_s > servers_s:
            limit = "learner"
        else:
            limit = "servers"
        return Forecast(step_s, train_s, limit, self.schedule.episodes / step_s)

    def decode_step_s(self, rows: float, layout: PlannedLayout) -> float:
        """Return the seconds in which so many half-written streams get one token each."""
        shape = self.shape
        # Streams are half written on average.
        cached = rows * self.workload.stream / 2
        weights = COMPUTE_BYTES * shape.decode_values(rows) / layout.tensor_parallel
        # More GPUs than key-value heads hold copies of them.
        cache = COMPUTE_BYTES * cached * shape.cache_values / min(layout.tensor_parallel, shape.kv_heads)
        reading_s = (weights + cache) / (1e9 * self.hardware.memory_gb_s)
        flops = shape.read_flops(rows, cached, 0) + 2 * rows * shape.head
        computing_s = flops / (1e12 * self.hardware.tflops * layout.tensor_parallel)
        # Both overlap on a GPU, so the longer one counts.
        return max(reading_s, computing_s) + self.hardware.decode_step_s

    def latency_s(self, layout: PlannedLayout) -> float:
        """Return the seconds from the begin of a step's episodes to the end of the last one.

        The longest episode decides. Meanwhile others end, so its decode steps have the mean number of rows beside it.
        """
        work = self.workload
        longest = work.longest_of(self.schedule.episodes)
        rows = self._rows(layout, 1)
        # A cache that holds fewer streams makes the others wait for their turn.
        waves = max(1.0, self.schedule.episodes / layout.num_servers / rows)
        beside = max(1.0, rows * work.model_tokens / longest)
        decoding_s = longest * self.decode_step_s(beside, layout)
        turns_s = (work.turns - 1) * (TURN_WAIT_S + self.hardware.read_s) + work.turns * work.tool_s
        return self.hardware.read_s + waves * (decoding_s + turns_s)

    def writing_s(self, layout: PlannedLayout) -> float:
        """Return the seconds in which servers decode a step's tokens with all rows that they can get."""
        rows = self._rows(layout, self.schedule.max_staleness + 1)
        tokens = self.schedule.episodes * self.workload.model_tokens / layout.num_servers
        return tokens / rows * self.decode_step_s(rows, layout)

    def reading_s(self, layout: PlannedLayout) -> float:
        """Return the seconds in which servers read a step's prompts, images and observations, and write nothing."""
        work = self.workload
        observed = self.schedule.group_size * (work.turns - 1) * work.observation_tokens
        problem_s = self._prefill_s(work.prompt, triangle(work.prompt), work.image_tokens, layout)
        problem_s += self._prefill_s(observed, observed * work.stream / 2, 0, layout)
        if work.image_tokens:
            problem_s += self.hardware.image_s
        return self.schedule.problems_per_step / layout.num_servers * problem_s

    def read_again_s(self, layout: PlannedLayout) -> float:
        """Return the seconds in which servers read again, after a push, the streams that they were writing.

        Of the episodes that are ahead half are: measured, H200, staleness 2 and 4.
        """
        if self.schedule.keep_kv_cache or not self.schedule.max_staleness:
            return 0.0
        written = self.workload.stream / 2
        streams = self._rows(layout, self.schedule.max_staleness) / 2
        return streams * self._prefill_s(written, triangle(written), 0, layout)

    def train_s(self, learner: Plan) -> float:
        """Return the seconds of the learner's part of a step.

        All samples of a prompt go to one rank, which reads the prompt once.
        """
        work = self.workload
        group = self.schedule.group_size
        tokens = work.prompt + group * (work.stream - work.prompt)
        pairs = triangle(work.prompt) + group * (triangle(work.stream) - triangle(work.prompt))
        forward = self.shape.read_flops(tokens, pairs, work.image_tokens)
        # The output layer runs over the model's own tokens alone.
        forward += group * 2 * work.model_tokens * self.shape.head
        # The rank with the most groups decides, since others wait for it.
        groups = math.ceil(self.schedule.problems_per_step / learner.num_gpus)
        passes_s = groups * forward * (TRAINING_FACTOR + learner.recompute) / (1e12 * self.hardware.tflops)
        num_batches = math.ceil(groups * tokens / learner.tokens)
        return passes_s + self.exchange_s(num_batches, learner) + self.hardware.update_s

    def exchange_s(self, num_batches: int, learner: Plan) -> float:
        """Return the seconds in which ranks gather weights and sum gradients.

        Ranks that reshard gather for every forward and backward pass; others once an update.
        """
        ranks = learner.num_gpus
        if learner.reshards:
            gathered = num_batches * (2 * COMPUTE_BYTES + GRADIENT_BYTES)
        else:
            gathered = COMPUTE_BYTES + GRADIENT_BYTES
        return gathered * self.shape.parameters * (ranks - 1) / ranks / self._link(ranks)

    def sync_s(self, learner: Plan) -> float:
        """Return the seconds of a weight push: the ranks gather the weights, and a transport carries them."""
        size = COMPUTE_BYTES * self.shape.parameters
        carried_s = self.hardware.push_s + size / (1e9 * self.hardware.push_gb_s)
        # One rank holds all weights already.
        if learner.num_gpus == 1:
            return carried_s
        return carried_s + size / self._link(learner.num_gpus)

    def _rows(self, layout: PlannedLayout, ahead: int) -> float:
        """Return how many streams a server writes at once: on average half of each is in its cache."""
        fitting = layout.cache_tokens / (self.workload.stream / 2)
        return max(1.0, min(ahead * self.schedule.episodes / layout.num_servers, fitting))

    def _prefill_s(self, tokens: float, pairs: float, images: float, layout: PlannedLayout) -> float:
        """Return the seconds in which a server reads tokens, of which `pairs` see each other."""
        return self.shape.read_flops(tokens, pairs, images) / (1e12 * self.hardware.tflops * layout.tensor_parallel)

    def _link(self, ranks: int) -> float:
        """Return the bytes a second between ranks, which may be on several hosts."""
        machine = self.hardware
        if ranks <= machine.gpus_per_host:
            return 1e9 * machine.link_gb_s
        return 1e9 * min(machine.link_gb_s, machine.network_gb_s)
