"""Plan a run on machines that are not here: `python -m trainer.plan --model 30b-a3b --num-gpus 64 --hardware h200`.

Prints the fastest layout that fits, its memory, the flags of `trainer.run`, samples and tokens a second, and what
limits it. Everything is computed: memory by counting, time from means of the episodes and measured constants.

Predicted is what was within 15 % of measured runs: FSDP2 and started servers with CUDA graphs, on H100 and H200. The
embedded engine, Megatron, and episodes of under `LEAST_TOKENS` model tokens are not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from envs.config.cli import exit_code, parse
from envs.config.commands import command_line, flag_words
from envs.config.settings import Section
from envs.errors import UserError
from trainer.planning.qwen3_vl import QWEN3_VL, hub_id

if TYPE_CHECKING:
    from trainer.planning.hardware import Hardware
    from trainer.planning.layouts import Planned
    from trainer.planning.speed import Layout

#: Model tokens of an episode below which forecasts missed by up to 44 % (docs/scale.md).
LEAST_TOKENS = 300


class MachineConfig(Section):
    """The network, and the machine."""

    model: str = Field(default="2b", description=f"checkpoint folder, hub id, or one of {', '.join(QWEN3_VL)}")
    num_gpus: int = Field(default=8, ge=1, le=4096, description="GPUs of learners and servers together")
    hardware: str = Field(default="h100", description="h100, h200, or a file like trainer/planning/hardware/h100.json")
    backend: Literal["fsdp", "megatron"] = Field(default="fsdp", description="--backend of trainer.run")

    @field_validator("backend")
    @classmethod
    def _is_predicted(cls, value: str) -> str:
        if value == "megatron":
            raise ValueError("must be fsdp: Megatron took about twice as long as predicted, so it is not planned")
        return value


class ScheduleConfig(Section):
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
    def wanted_placement(self) -> Literal["colocate", "split"] | None:
        """The placement to plan; None leaves the choice to the planner."""
        if self.keep_kv_cache:
            return "split"
        return None if self.placement == "auto" else self.placement


class WorkloadConfig(Section):
    """The episodes: means, or a recorded run."""

    like: Path | None = Field(default=None, description="run folder whose recorded episodes to take, in place of means")
    prompt_tokens: int = Field(default=400, ge=1, description="text tokens of a prompt")
    image_tokens: int = Field(default=256, ge=0, description="tokens of the prompt's images")
    turns: float = Field(default=3.0, ge=1, le=1000, description="model turns of an episode")
    turn_tokens: int = Field(default=300, ge=1, description="tokens that the model writes in a turn")
    observation_tokens: int = Field(default=60, ge=0, description="tokens of the environment's answer to a turn")
    tool_s: float = Field(default=0.1, ge=0, description="seconds of the environment in a turn")
    spread: float = Field(
        default=0.6, ge=0, le=2, description="standard deviation of the logarithm of lengths and seconds; 0: all equal"
    )


class PlanConfig(Section):
    """What to plan."""

    machine: MachineConfig = MachineConfig()
    run: ScheduleConfig = ScheduleConfig()
    workload: WorkloadConfig = WorkloadConfig()


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, and print the plan."""
    description = "Compute how fast a run is on any number of GPUs, and what limits it."
    config = parse(PlanConfig, argv, "python -m trainer.plan", description)
    # Imported late, so that --help and a mistyped flag answer at once.
    from trainer.planning.hardware import Hardware
    from trainer.planning.layouts import Search, Wanted
    from trainer.planning.memory import count_values, empty_network
    from trainer.planning.shape import ModelShape
    from trainer.planning.speed import Schedule, Speed, Workload

    machine = config.machine
    schedule = config.run
    given = config.workload
    hardware = Hardware.read(machine.hardware)
    workload = Workload(
        prompt=given.prompt_tokens,
        images=given.image_tokens,
        turns=given.turns,
        turn_tokens=given.turn_tokens,
        observation=given.observation_tokens,
        tool_s=given.tool_s,
        spread=given.spread,
    )
    if given.like:
        workload = Workload.recorded(given.like)
    if workload.model_tokens < LEAST_TOKENS:
        rule = f"must give episodes of {LEAST_TOKENS} model tokens or more: shorter ones were missed by up to 44 %"
        flag = "--like" if given.like else "--turn-tokens"
        raise UserError(flag, rule, f"{workload.model_tokens:.0f} in {workload.turns:.1f} turns", "measure a short run")
    wanted = Wanted(
        placement=schedule.wanted_placement,
        num_servers=schedule.num_servers,
        tensor_parallel=schedule.tensor_parallel,
        transport=None if schedule.sync == "auto" else schedule.sync,
    )
    network = empty_network(machine.model)
    shape = ModelShape.of(network.config, count_values(network.parameters()))
    scheduled = {"problems_per_step", "group_size", "max_staleness", "max_concurrent", "keep_kv_cache"}
    speed = Speed(shape, hardware, workload, Schedule(**schedule.model_dump(include=scheduled)))
    planned = Search(network, speed).best(machine.num_gpus, wanted)
    print(f"Computed, not measured: {machine.model} of {shape.parameters / 1e6:,.0f} M parameters on {hardware.name}")
    print("\n".join(plan_lines(planned, hardware, machine.num_gpus)))
    print(run_command(config, planned.layout))
    print(*hardware.notes(), sep="\n")
    return 0


def plan_lines(planned: Planned, hardware: Hardware, num_gpus: int) -> list[str]:
    """Return the lines on the layout, its memory and its speed."""
    layout = planned.layout
    forecast = planned.forecast
    learners = layout.learner.num_ranks
    servers = f"{layout.num_servers} x {layout.tensor_parallel} for servers"
    idle = num_gpus - layout.num_gpus
    unused = f"; {idle} of {num_gpus} GPUs would add nothing" if idle else ""
    server_gib = layout.mem_fraction * hardware.memory_gib
    cache = f"{layout.cache_tokens:,.0f} tokens in its cache, of {hardware.memory_gib:g} GiB"
    return [
        f"{layout.placement}: {learners} GPUs for learners, {servers}{unused}",
        f"memory: a learner {layout.learner_gib:.0f} GiB, a server {server_gib:.0f} GiB with {cache}",
        f"{forecast.samples_per_s:.2f} samples/s, {forecast.tokens_per_s:,.0f} model tokens/s",
        f"step {forecast.step_s:.1f} s, of which training takes {forecast.train_s:.1f} s; limit: {forecast.limit}",
    ]


def run_command(config: PlanConfig, layout: Layout) -> str:
    """Return the command of `trainer.run` for a layout."""
    schedule = config.run
    learner = layout.learner
    settings = {
        "model": hub_id(config.machine.model),
        "dtype": "bfloat16",
        "problems_per_step": schedule.problems_per_step,
        "group_size": schedule.group_size,
        "max_concurrent": schedule.max_concurrent,
        "max_staleness": schedule.max_staleness,
        "keep_kv_cache": schedule.keep_kv_cache,
        "sync": schedule.sync,
        "num_gpus": learner.num_ranks,
        "num_servers": layout.num_servers,
        "tensor_parallel": layout.tensor_parallel,
        "placement": layout.placement,
        "mem_fraction": round(layout.mem_fraction, 2),
        "max_tokens_per_microbatch": learner.tokens,
        "recompute": learner.recompute,
        "reshard": "always" if learner.reshards else "never",
        "offload": "optimizer" if learner.offloads else "none",
    }
    words = [word for name, value in settings.items() if value is not False for word in flag_words(name, value)]
    return command_line("trainer.run", words)


if __name__ == "__main__":
    sys.exit(exit_code(run))
