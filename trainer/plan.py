"""Plan a run on machines that are not here: `python -m trainer.plan --model 30b-a3b --num-gpus 64 --hardware h200`.

Prints the fastest layout that fits, its memory, the flags of `trainer.run`, samples and tokens a second, how long each
side idles, and what limits it. Everything is computed: memory by counting, time by simulating the run event by event
with the constants of a machine. `--calibrate FILE` measures the machine that it runs on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError
from trainer.config.learner import LayoutConfig
from trainer.learner.layout import Layout
from trainer.preflight.qwen3_vl import QWEN3_VL, hub_id


class MachineConfig(Section):
    """The network, and the machine."""

    model: str = Field(default="2b", description=f"checkpoint folder, hub id, or one of {', '.join(QWEN3_VL)}")
    num_gpus: int = Field(default=8, ge=1, le=4096, description="GPUs of learners and servers together")
    hardware: str = Field(default="h100", description="h100, h200, or a file of --calibrate")
    calibrate: Path | None = Field(
        default=None, description="measure this machine, with this --model, write the constants to a file, and end"
    )
    engine_url: str = Field(default="", description="running SGLang server whose decoding --calibrate measures")


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
    steps: int = Field(default=8, ge=1, description="steps to simulate")
    seed: int = Field(default=0, ge=0, description="seed of the lengths")

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
    image_tokens: int = Field(default=256, ge=0, description="tokens of the prompt's pictures")
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
    learner: LayoutConfig = LayoutConfig()
    run: ScheduleConfig = ScheduleConfig()
    workload: WorkloadConfig = WorkloadConfig()


def layouts_of(config: LayoutConfig) -> tuple[Layout, ...] | None:
    """Return the layouts of Megatron to choose from: the given one, None for all, and none with FSDP2."""
    if config.backend == "fsdp":
        return ()
    return (Layout.of(config),) if config.model_fields_set - {"backend"} else None


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, and print the plan."""
    description = "Compute how fast a run is on any number of GPUs, and what limits it."
    config = parse(PlanConfig, argv, "python -m trainer.plan", description)
    # Imported late, so that --help and a mistyped flag answer at once.
    from trainer.preflight.planner.hardware import Hardware
    from trainer.preflight.planner.report import plan_text
    from trainer.preflight.planner.search import Search, Wanted
    from trainer.preflight.planner.simulation import Schedule
    from trainer.preflight.planner.workload import Lengths, Recorded

    machine, schedule = config.machine, config.run
    if machine.calibrate is not None:
        from trainer.preflight.planner.calibrate import calibrate

        if not machine.calibrate.absolute().parent.is_dir():  # before minutes of measuring
            rule, fix = "must be a file in a folder that exists", "make the folder"
            raise UserError("--calibrate", rule, str(machine.calibrate), fix)
        hardware = calibrate(machine.model, machine.engine_url)
        hardware.write(machine.calibrate)
        print(f"measured {hardware.name}; constants in {machine.calibrate}", *hardware.notes(), sep="\n")
        return 0
    if machine.engine_url:
        fix = "give --calibrate FILE, or leave it out"
        raise UserError("--engine-url", "needs --calibrate, or nothing reads it", machine.engine_url, fix)
    given = config.workload
    scheduled = {"problems_per_step", "group_size", "max_staleness", "keep_kv_cache", "max_concurrent", "steps"}
    lengths = Lengths(
        given.prompt_tokens,
        given.image_tokens,
        given.turns,
        given.turn_tokens,
        given.observation_tokens,
        given.tool_s,
        given.spread,
    )
    search = Search.of(
        machine.model,
        Hardware.read(machine.hardware),
        Recorded.read(given.like) if given.like else lengths,
        Schedule(**schedule.model_dump(include=scheduled)),
        schedule.seed,
        layouts_of(config.learner),
    )
    wanted = Wanted(
        schedule.wanted_placement,
        schedule.num_servers,
        schedule.tensor_parallel,
        None if schedule.sync == "auto" else schedule.sync,
    )
    planned = search.best(machine.num_gpus, wanted)
    settings = {
        "model": hub_id(machine.model),
        "dtype": "bfloat16",
        "problems_per_step": schedule.problems_per_step,
        "group_size": schedule.group_size,
        "max_concurrent": schedule.max_concurrent,
        "max_staleness": schedule.max_staleness,
        "keep_kv_cache": schedule.keep_kv_cache,
        "sync": schedule.sync,
    }
    parameters = search.memory.shape.parameters / 1e6
    print(f"Computed, not measured: {machine.model} of {parameters:,.0f} M parameters on {search.costs.hardware.name}")
    print(plan_text(planned, search.costs.hardware, settings, machine.num_gpus))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
