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

from pydantic import Field, field_validator

from envs.config.cli import exit_code, parse
from envs.config.commands import command_line, flag_words
from envs.config.settings import Section
from envs.errors import UserError
from trainer.planning.qwen3_vl import QWEN3_VL, hub_id
from trainer.planning.speed import PlannedLayout, Schedule, Speed, Workload

if TYPE_CHECKING:
    from trainer.planning.hardware import Hardware
    from trainer.planning.layouts import Planned

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


class PlanConfig(Section):
    """What to plan."""

    like: Path | None = Field(default=None, description="run folder whose recorded episodes to take, in place of means")
    machine: MachineConfig = MachineConfig()
    run: Schedule = Schedule()
    workload: Workload = Workload()


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, and print the plan."""
    description = "Compute how fast a run is on any number of GPUs, and what limits it."
    config = parse(PlanConfig, argv, "python -m trainer.plan", description)
    # Imported late, so that --help and a mistyped flag answer at once.
    from trainer.planning.hardware import Hardware
    from trainer.planning.layouts import Search
    from trainer.planning.memory import count_values, empty_network
    from trainer.planning.shape import ModelShape

    machine = config.machine
    hardware = Hardware.read(machine.hardware)
    if config.like:
        workload = Workload.recorded(config.like)
    else:
        workload = config.workload
    if workload.model_tokens < LEAST_TOKENS:
        rule = f"must give episodes of {LEAST_TOKENS} model tokens or more: shorter ones were missed by up to 44 %"
        flag = "--like" if config.like else "--turn-tokens"
        raise UserError(flag, rule, f"{workload.model_tokens:.0f} in {workload.turns:.1f} turns", "measure a short run")
    network = empty_network(machine.model)
    shape = ModelShape.of(network.config, count_values(network.parameters()))
    planned = Search(network, Speed(shape, hardware, workload, config.run)).best(machine.num_gpus)
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
    if idle:
        unused = f"; {idle} of {num_gpus} GPUs would add nothing"
    else:
        unused = ""
    server_gib = layout.mem_fraction * hardware.memory_gib
    cache = f"{layout.cache_tokens:,.0f} tokens in its cache, of {hardware.memory_gib:g} GiB"
    return [
        f"{layout.placement}: {learners} GPUs for learners, {servers}{unused}",
        f"memory: a learner {layout.learner_gib:.0f} GiB, a server {server_gib:.0f} GiB with {cache}",
        f"{forecast.samples_per_s:.2f} samples/s, {forecast.tokens_per_s:,.0f} model tokens/s",
        f"step {forecast.step_s:.1f} s, of which training takes {forecast.train_s:.1f} s; limit: {forecast.limit}",
    ]


def run_command(config: PlanConfig, layout: PlannedLayout) -> str:
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
