"""Estimate the GPU memory of a training step without running it: `python -m trainer.memory --model 4b --gpus 2`.

The estimate counts the parameters, and the values that each block keeps for the gradient. Weights and optimizer are
float32; the network computes in bfloat16. The estimate leaves out CUDA's context, NCCL's buffers, fragmentation, and an
engine on the same GPU: leave some GiB for them. When weights go to servers, rank 0 also holds all of them once in
bfloat16.

Networks of 500 M parameters and more are taken to be compiled, as `trainer.run` compiles them by itself. Megatron's
memory is not predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import Field, ValidationInfo, field_validator

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from trainer.config.learner import Offload, Reshard
from trainer.planning.qwen3_vl import QWEN3_VL


class MemoryConfig(Section):
    """A training step, and the GPUs that it runs on."""

    model: str = Field(default="2b", description=f"checkpoint folder, hub id, or one of {', '.join(QWEN3_VL)}")
    gpus: int = Field(default=1, ge=1, description="GPUs that the learner runs on")
    memory_gib: float = Field(default=80.0, gt=0, description="memory of one GPU")
    tokens: int = Field(default=8192, ge=1, description="tokens of a micro-batch")
    image_tokens: int = Field(
        default=2048, ge=0, validate_default=True, description="those that belong to images, each shown once"
    )
    offload: Offload = Field(default="none", description="--offload of trainer.run")
    reshard: Reshard = Field(default="auto", description="--reshard of trainer.run")

    @field_validator("image_tokens")
    @classmethod
    def _are_among_the_tokens(cls, value: int, info: ValidationInfo) -> int:
        tokens = info.data.get("tokens", value)
        if value > tokens:
            raise ValueError(f"must be among the {tokens} --tokens")
        return value


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and print the table."""
    description = "Compute how much GPU memory a training step takes."
    config = parse(MemoryConfig, argv, "python -m trainer.memory", description)
    # Imported late, so that --help and a mistyped flag answer at once.
    from trainer.learner.compile_choice import LARGE
    from trainer.planning.memory import MetaNetworks, Plan, empty_network, memory_table

    # On the meta device: nothing is downloaded but the configuration.
    model = empty_network(config.model)
    networks = MetaNetworks(model)
    plan = Plan(
        num_gpus=config.gpus,
        tokens=config.tokens,
        patches=config.image_tokens * model.merge_size**2,
        reshard=config.reshard,
        offload=config.offload,
        frozen_bytes=2,  # bfloat16
        is_compiled=networks.num_parameters >= LARGE,
    )
    gpus = f"{config.gpus} GPUs with {config.memory_gib:g} GiB"
    parameters = f"{networks.num_parameters / 1e6:,.0f} M parameters"
    print(f"Computed, not measured: GiB on each of {gpus}, {config.model} of")
    print(f"{parameters}, {config.tokens} tokens a micro-batch, {config.image_tokens} of images.")
    print(memory_table(networks, plan, config.memory_gib))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
