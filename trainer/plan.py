"""Plan a run on machines that are not here: `python -m trainer.plan --model 30b-a3b --num-gpus 64 --hardware h200`.

Prints the fastest layout that fits, its memory, the flags of `trainer.run`, samples and tokens a second, and what
limits it. Everything is computed: memory by counting, time from means of the episodes and measured constants.

Predicted is what was within 15 % of measured runs: FSDP2 and started servers with CUDA graphs, on H100 and H200. The
embedded engine, Megatron, offloading, and episodes of under `LEAST_TOKENS` model tokens are not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.commands import command_line, flag_words
from envs.config.settings import Section
from trainer.planning.qwen3_vl import QWEN3_VL, hub_id
from trainer.planning.workload import Schedule, Workload

if TYPE_CHECKING:
    from trainer.planning.layouts import Planned


class MachineConfig(Section):
    """The network, and the machine."""

    model: str = Field(default="2b", description=f"checkpoint folder, hub id, or one of {', '.join(QWEN3_VL)}")
    num_gpus: int = Field(default=8, ge=1, le=4096, description="GPUs of learners and servers together")
    hardware: str = Field(default="h100", description="h100, h200, or a file like trainer/planning/hardware/h100.yaml")


class PlanConfig(Section):
    """What to plan."""

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
    from trainer.planning.memory import empty_network
    from trainer.planning.shape import ModelShape
    from trainer.planning.speed import Speed

    # Errors of the machine come first: the network may take seconds to count.
    machine = config.machine
    hardware = Hardware.read(machine.hardware)
    network = empty_network(machine.model)
    shape = ModelShape.of(network)
    planned = Search(network, Speed(shape, hardware, config.workload, config.run)).best(machine.num_gpus)
    print(f"Computed, not measured: {machine.model} of {shape.parameters / 1e6:,.0f} M parameters on {hardware.name}")
    print_plan(planned, config, hardware.memory_gib)
    return 0


def print_plan(planned: Planned, config: PlanConfig, gpu_gib: float) -> None:
    """Print the layout, its memory, its speed, and the command of `trainer.run`."""
    layout = planned.layout
    forecast = planned.forecast
    servers = f"{layout.num_servers} x {layout.tensor_parallel} for servers"
    unused = config.machine.num_gpus - layout.num_gpus
    tokens_per_s = forecast.samples_per_s * config.workload.model_tokens
    print(f"{layout.placement}: {layout.learner.num_gpus} GPUs for learners, {servers}; {unused} unused")
    print(
        f"memory: a learner {layout.learner_gib:.0f} GiB, a server {layout.mem_fraction * gpu_gib:.0f} GiB with "
        f"{layout.cache_tokens:,.0f} tokens in its cache, of {gpu_gib:g} GiB"
    )
    print(f"{forecast.samples_per_s:.2f} samples/s, {tokens_per_s:,.0f} model tokens/s")
    print(f"step {forecast.step_s:.1f} s, of which training takes {forecast.train_s:.1f} s; limit: {forecast.limit}")
    schedule = config.run
    settings = {
        # What the user fixed stays in the command; defaults differ between the two.
        **schedule.model_dump(exclude_defaults=True),
        "model": hub_id(config.machine.model),
        "dtype": "bfloat16",
        "problems_per_step": schedule.problems_per_step,
        "group_size": schedule.group_size,
        # Otherwise the run would hold back episodes that the forecast counts.
        "max_concurrent": (schedule.max_staleness + 1) * schedule.episodes,
        "num_gpus": layout.learner.num_gpus,
        "num_servers": layout.num_servers,
        "tensor_parallel": layout.tensor_parallel,
        "placement": layout.placement,
        "mem_fraction": round(layout.mem_fraction, 2),
        "max_tokens_per_microbatch": layout.learner.tokens,
        "recompute": layout.learner.recompute,
        "reshard": layout.learner.reshard,
    }
    print(command_line("trainer.run", [word for name, value in settings.items() for word in flag_words(name, value)]))


if __name__ == "__main__":
    sys.exit(exit_code(run))
