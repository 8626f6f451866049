"""Seconds of a run's parts, from the network's shape, the machine's constants and the means of its episodes.

The learner's seconds are operations over operations a second. A server's are bytes over bytes a second, plus measured
constants. A step joins both: one after the other without staleness, beside each other with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from envs.config.settings import Section
from envs.errors import UserError
from trainer.config.rollout import EngineConfig
from trainer.planning.hardware import Hardware
from trainer.planning.shape import ModelShape, triangle

Transport = Literal["ipc", "nccl", "disk"]
#: A forward, and twice that for the gradients of inputs and of weights.
TRAINING_FACTOR = 3
#: How long a turn waits for others before its server reads.
TURN_WAIT_S = EngineConfig.model_fields["turn_wait_s"].default
#: Bytes of a value that servers compute with, and that ranks gather; of a gradient that ranks sum.
COMPUTE_BYTES = 2
GRADIENT_BYTES = 4


class Workload(Section):
    """Means of the episodes.

    Lengths are log-normal with `spread`, the standard deviation of their logarithm.

    Example: `Workload(prompt_tokens=400, image_tokens=256, turns=3, turn_tokens=300)` has streams of 1,676 tokens in
    the mean, 900 of them the model's.
    """

    prompt_tokens: int = Field(default=400, ge=1, description="text tokens of a prompt")
    image_tokens: int = Field(default=256, ge=0, description="tokens of the prompt's images")
    turns: float = Field(default=3.0, ge=1, le=1000, description="model turns of an episode")
    turn_tokens: float = Field(default=300, ge=1, description="tokens that the model writes in a turn")
    observation_tokens: float = Field(default=60, ge=0, description="tokens of the environment's answer to a turn")
    tool_s: float = Field(default=0.1, ge=0, description="seconds of the environment in a turn")
    spread: float = Field(
        default=0.6, ge=0, le=2, description="standard deviation of the logarithm of lengths and seconds; 0: all equal"
    )

    @classmethod
    def recorded(cls, run: Path) -> Workload:
        """Return the means of a run's recorded training episodes.

        Raises:
            UserError: the folder has no recording, or no training episode in it.
        """
        from agents.recording import Recording
        from agents.recording.schema import TRAIN

        episodes = [record for record in Recording.open(run).episodes() if record.phase == TRAIN and record.turns]
        if not episodes:
            raise UserError("--like", "must be a run with recorded training episodes", str(run), "give another run")
        turns = [turn for record in episodes for turn in record.turns]
        written = [sum(turn.end - turn.start for turn in record.turns) for record in episodes]
        streams = sum(record.turns[-1].end for record in episodes)
        prompts = sum(record.prompt_length for record in episodes)
        shown = sum(image.num_tokens for record in episodes for image in record.images)
        images = min(shown, prompts)  # tools may show images after the prompt
        mean = sum(written) / len(written)
        deviation = math.sqrt(sum((tokens - mean) ** 2 for tokens in written) / len(written))
        turns_each = len(turns) / len(episodes)
        # Measured means may be outside the ranges that a user may give.
        return cls.model_construct(
            prompt_tokens=round((prompts - images) / len(episodes)),
            image_tokens=round(images / len(episodes)),
            turns=turns_each,
            turn_tokens=sum(written) / len(turns),
            observation_tokens=(streams - prompts - sum(written)) / max(1, len(turns) - len(episodes)),
            tool_s=sum(turn.env_s for turn in turns) / len(turns),
            # That of a turn: an episode's turns average it out.
            spread=math.sqrt(turns_each * math.log1p((deviation / max(mean, 1)) ** 2)),
        )

    @property
    def model_tokens(self) -> float:
        """Tokens that the model writes in an episode."""
        return self.turns * self.turn_tokens

    @property
    def stream(self) -> float:
        """Tokens of an episode's stream."""
        return self.prompt_tokens + self.image_tokens + self.model_tokens + (self.turns - 1) * self.observation_tokens

    @property
    def longest(self) -> int:
        """The tokens of a stream that hardly any exceeds: three times the mean."""
        return self.image_tokens + round(
            3 * (self.prompt_tokens + self.turns * (self.turn_tokens + self.observation_tokens))
        )

    def longest_of(self, num_episodes: int) -> float:
        """Return how many tokens the model writes in the longest of so many episodes, about."""
        deviation = self.spread / math.sqrt(self.turns)
        normal = math.sqrt(2 * math.log(max(2, num_episodes)))
        return self.model_tokens * math.exp(deviation * normal - deviation**2 / 2)


class Schedule(Section):
    """The run. Empty and 0 leave the choice to the planner."""

    placement: Literal["auto", "colocate", "split"] = Field(default="auto", description="--placement of trainer.run")
    max_staleness: int = Field(default=0, ge=0, description="--max-staleness of trainer.run")
    keep_kv_cache: bool = Field(default=False, description="--keep-kv-cache of trainer.run; means --placement split")
    num_servers: int = Field(default=0, ge=0, description="--num-servers of trainer.run")
    tensor_parallel: int = Field(default=0, ge=0, description="--tensor-parallel of trainer.run")
    sync: Literal["auto", "ipc", "nccl", "disk"] = Field(default="auto", description="--sync of trainer.run")
    problems_per_step: int = Field(default=32, ge=1, description="--problems-per-step of trainer.run")
    group_size: int = Field(default=8, ge=2, description="--group-size of trainer.run")
    max_concurrent: int = Field(default=1024, ge=1, description="--max-concurrent of trainer.run")

    @field_validator("keep_kv_cache")
    @classmethod
    def _has_episodes_at_a_push(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (info.data.get("placement") == "colocate" or not info.data.get("max_staleness")):
            raise ValueError("is for --max-staleness above 0 and --placement split")
        return value

    @property
    def allows_colocate(self) -> bool:
        """Whether servers may share the learners' GPUs: no cache is kept there, and NCCL has one process a GPU."""
        return self.placement != "split" and not self.keep_kv_cache and self.sync != "nccl"

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.problems_per_step * self.group_size


@dataclass(frozen=True)
class LearnerLayout:
    """How the learner runs: its ranks, the tokens of a micro-batch, and what it does to save memory."""

    num_ranks: int = 1
    tokens: int = 16384
    recompute: float = 0.0
    reshards: bool = False
    offloads: bool = False


@dataclass(frozen=True)
class PlannedLayout:
    """A run's GPUs. With `split` the servers have GPUs of their own, with `colocate` they share the learners'.

    `cache_tokens` is how many tokens a server's cache holds.

    Example: `PlannedLayout("split", LearnerLayout(num_ranks=4), num_servers=2, tensor_parallel=2, ...)` uses 8 GPUs.
    """

    placement: Literal["colocate", "split"]
    learner: LearnerLayout
    num_servers: int
    tensor_parallel: int
    transport: Transport
    cache_tokens: float
    mem_fraction: float = 0.8
    learner_gib: float = 0.0

    @property
    def num_gpus(self) -> int:
        """GPUs of both sides together."""
        if self.placement == "colocate":
            return self.learner.num_ranks
        return self.learner.num_ranks + self.num_servers * self.tensor_parallel


@dataclass(frozen=True)
class Forecast:
    """What a run does with a layout: seconds of a step, those of training in it, and the part that limits it."""

    step_s: float
    train_s: float
    limit: str
    samples_per_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Speed:
    """How fast one network runs one workload on one kind of machine.

    Example::

        speed = Speed(ModelShape.of(config, parameters), Hardware.read("h100"), Workload(), Schedule())
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
        schedule = self.schedule
        ahead = schedule.max_staleness + 1
        train_s = self.train_s(layout.learner)
        sync_s = self.sync_s(layout)
        if layout.placement == "colocate":
            released_s = self.hardware.release_s
        else:
            released_s = 0.0
        reading_s = self.reading_s(layout) + self.read_again_s(layout)
        busy = {
            "learner": train_s + sync_s,
            "servers": self.writing_s(layout) + reading_s + sync_s,
            "tokenizer process": self.requests_s(layout) + sync_s,
            "driver": schedule.episodes * self.workload.turns * self.hardware.turn_s,
        }
        waited_s = (self.latency_s(layout) + self.reading_s(layout)) / ahead + self.read_again_s(layout)
        limit = max(busy, key=lambda name: busy[name])
        # Servers that share GPUs with the learner stand still while it trains.
        if layout.placement == "colocate":
            still_s = train_s + released_s
        else:
            still_s = 0.0
        step_s = max(train_s + sync_s + released_s + waited_s, busy["servers"] + still_s, busy[limit])
        samples_per_s = schedule.episodes / step_s
        return Forecast(
            step_s=step_s,
            train_s=train_s,
            limit=limit if busy[limit] > 0.5 * step_s else "episode latency",
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * self.workload.model_tokens,
        )

    def decode_step_s(self, rows: float, cached: float, tensor_parallel: int = 1) -> float:
        """Return the seconds in which `rows` streams of `cached` tokens together get one token each."""
        machine = self.hardware
        shape = self.shape
        weights = COMPUTE_BYTES * shape.decode_values(rows) / tensor_parallel
        # More GPUs than key-value heads hold copies of them.
        cache = COMPUTE_BYTES * cached * shape.cache_values / min(tensor_parallel, shape.kv_heads)
        reading = (weights + cache) / (1e9 * machine.memory_gb_s)
        flops = shape.read_flops(rows, cached, 0) + shape.head_flops(rows)
        computing = flops / (1e12 * machine.prefill_tflops * tensor_parallel)
        if tensor_parallel > 1:
            sums = 2 * shape.layers * machine.collective_s
        else:
            sums = 0.0
        return max(reading, computing) + machine.decode_step_s + machine.decode_row_s * rows + sums

    def latency_s(self, layout: PlannedLayout) -> float:
        """Return the seconds from the begin of a step's episodes to the end of the last one.

        The longest episode decides. Meanwhile others end, so its decode steps have the mean number of rows beside it.
        """
        work = self.workload
        longest = work.longest_of(self.schedule.episodes)
        rows = self._rows(layout, 1)
        waves = max(1.0, self.schedule.episodes / layout.num_servers / rows)
        beside = max(1.0, rows * work.model_tokens / longest)
        decoding_s = longest * self.decode_step_s(beside, beside * self._half_stream, layout.tensor_parallel)
        turns_s = (work.turns - 1) * (TURN_WAIT_S + self.hardware.read_s) + work.turns * work.tool_s
        return self.hardware.read_s + waves * (decoding_s + turns_s)

    def writing_s(self, layout: PlannedLayout) -> float:
        """Return the seconds in which servers decode a step's tokens with all rows that they can get."""
        rows = self._rows(layout, self.schedule.max_staleness + 1)
        step_s = self.decode_step_s(rows, rows * self._half_stream, layout.tensor_parallel)
        return self.schedule.episodes * self.workload.model_tokens / layout.num_servers / rows * step_s

    def reading_s(self, layout: PlannedLayout) -> float:
        """Return the seconds in which servers read a step's prompts, images and observations, and write nothing."""
        work = self.workload
        problems = self.schedule.problems_per_step / layout.num_servers
        observed = self.schedule.episodes / layout.num_servers * (work.turns - 1) * work.observation_tokens
        if work.image_tokens:
            images = self.hardware.image_s
        else:
            images = 0.0
        prompt = work.prompt_tokens + work.image_tokens
        prompt_s = self._prefill_s(prompt, triangle(prompt), work.image_tokens, layout)
        return problems * (prompt_s + images) + self._prefill_s(observed, observed * self._half_stream, 0, layout)

    def read_again_s(self, layout: PlannedLayout) -> float:
        """Return the seconds in which servers read again, after a push, the streams that they were writing.

        Of the episodes that are ahead half are: measured, H200, staleness 2 and 4.
        """
        if self.schedule.keep_kv_cache or not self.schedule.max_staleness:
            return 0.0
        streams = self._rows(layout, self.schedule.max_staleness) / 2
        return streams * self._prefill_s(self._half_stream, triangle(self._half_stream), 0, layout)

    def train_s(self, learner: LearnerLayout) -> float:
        """Return the seconds of the learner's part of a step.

        All samples of a prompt go to one rank, which reads the prompt once.
        """
        work = self.workload
        group = self.schedule.group_size
        prompt = work.prompt_tokens + work.image_tokens
        added = work.stream - prompt
        pairs = triangle(prompt) + group * (triangle(work.stream) - triangle(prompt))
        forward = self.shape.read_flops(prompt + group * added, pairs, work.image_tokens)
        forward += group * self.shape.head_flops(work.model_tokens)
        groups = math.ceil(self.schedule.problems_per_step / learner.num_ranks)
        operations = groups * forward * (TRAINING_FACTOR + learner.recompute)
        num_batches = math.ceil(groups * (prompt + group * added) / learner.tokens)
        passes = operations / (1e12 * self.hardware.train_tflops)
        return passes + self.exchange_s(num_batches, learner) + self.hardware.update_s

    def exchange_s(self, num_batches: int, learner: LearnerLayout) -> float:
        """Return the seconds in which ranks gather weights and sum gradients, and an offloaded optimizer moves.

        Ranks that reshard gather for every forward and backward pass; others once an update.
        """
        ranks = learner.num_ranks
        machine = self.hardware
        size = self.shape.parameters
        if learner.offloads:
            moved = 2 * 8 * size / ranks / (1e9 * machine.offload_gb_s)
        else:
            moved = 0.0
        if ranks == 1:
            return moved
        gathered = COMPUTE_BYTES + GRADIENT_BYTES
        if learner.reshards:
            gathered = num_batches * (2 * COMPUTE_BYTES + GRADIENT_BYTES)
        total = gathered * size * (ranks - 1) / ranks
        return machine.ranks_s + moved + total / (1e9 * self._link(ranks))

    def sync_s(self, layout: PlannedLayout) -> float:
        """Return the seconds of a weight push: the ranks gather the weights, and the transport carries them."""
        machine = self.hardware
        ranks = layout.learner.num_ranks
        rates = {"ipc": machine.ipc_gb_s, "nccl": machine.nccl_gb_s, "disk": machine.disk_gb_s}
        size = COMPUTE_BYTES * self.shape.parameters / 1e9
        if ranks > 1:
            gather = size / self._link(ranks)
        else:
            gather = 0.0
        return machine.push_s + gather + size / rates[layout.transport]

    @property
    def _half_stream(self) -> float:
        """Tokens of a stream in the cache, on average while it is written."""
        return self.workload.stream / 2

    def _rows(self, layout: PlannedLayout, ahead: int) -> float:
        """Return how many streams a server writes at once."""
        streams = min(self.schedule.max_concurrent, ahead * self.schedule.episodes)
        return max(1.0, min(streams / layout.num_servers, layout.cache_tokens / self._half_stream))

    def _prefill_s(self, tokens: float, pairs: float, images: float, layout: PlannedLayout) -> float:
        """Return the seconds in which a server reads tokens, of which `pairs` see each other."""
        flops = self.shape.read_flops(tokens, pairs, images)
        return flops / (1e12 * self.hardware.prefill_tflops * layout.tensor_parallel)

    def requests_s(self, layout: PlannedLayout) -> float:
        """Return what a server's tokenizer process takes for the turns of a step."""
        each = self.hardware.request_s + self.workload.image_tokens * self.hardware.image_token_s
        return self.schedule.episodes * self.workload.turns * each / layout.num_servers

    def _link(self, ranks: int) -> float:
        """Return 1e9 bytes a second between ranks that may be on several hosts."""
        machine = self.hardware
        if ranks <= machine.gpus_per_host:
            return machine.link_gb_s
        return min(machine.link_gb_s, machine.network_gb_s)
