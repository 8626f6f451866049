"""Estimate the GPU memory of a training step without running it: `python -m trainer.memory --model 4b --gpus 2`.

The estimate counts the parameters, and the values that each block keeps for the gradient. Weights and optimizer are
float32; the network computes in bfloat16. The estimate leaves out CUDA's context, NCCL's buffers, fragmentation, and an
engine on the same GPU: leave some GiB for them. When weights go to servers, rank 0 also holds all of them once in
bfloat16.

The formulas hold for blocks that are not compiled; compiled blocks keep less.

With `--backend megatron` and `--tp` to `--sp` the table is that of the pipeline stage that needs the most: weights in
bfloat16 and float32 gradients of a rank's part, the optimizer shared by ranks with the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import Field, ValidationInfo, field_validator

from envs.config.cli import exit_code, parse
from trainer.config.learner import LayoutConfig, Offload, Reshard
from trainer.learner.layout import Layout
from trainer.preflight.qwen3_vl import QWEN3_VL


class MemoryConfig(LayoutConfig):
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
    frozen_bytes: int = Field(default=2, ge=2, le=4, multiple_of=2, description="bytes of a frozen weight, 2 or 4")
    lora_rank: int = Field(default=32, ge=1, description="rank of the adapters")

    @field_validator("image_tokens")
    @classmethod
    def _are_among_the_tokens(cls, value: int, info: ValidationInfo) -> int:
        tokens = info.data.get("tokens", value)
        if value > tokens:
            raise ValueError(f"must be among the {tokens} --tokens")
        return value

    @field_validator("offload")
    @classmethod
    def _is_done(cls, value: Offload, info: ValidationInfo) -> Offload:
        if value != "none" and info.data.get("backend") == "megatron":
            raise ValueError("must be none with --backend megatron")
        return value


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and print the table."""
    description = "Compute how much GPU memory a training step takes."
    config = parse(MemoryConfig, argv, "python -m trainer.memory", description)
    # Imported late, so that --help and a mistyped flag answer at once.
    from trainer.learner.layout_rules import check_layout
    from trainer.preflight.memory_estimate import MetaNetworks, empty_network, memory_table
    from trainer.preflight.memory_terms import Plan

    model = empty_network(config.model)
    layout = None
    if config.backend == "megatron":
        layout = Layout.of(config)
        check_layout(layout, config.gpus, model.config, "--gpus")
    plan = Plan(
        num_gpus=config.gpus,
        tokens=config.tokens,
        patches=config.image_tokens * model.merge_size**2,
        reshard=config.reshard,
        offload=config.offload,
        frozen_bytes=config.frozen_bytes,
        layout=layout,
    )
    networks = MetaNetworks(model)
    gpus = f"{config.gpus} GPUs with {config.memory_gib:g} GiB"
    parameters = f"{networks.num_parameters / 1e6:,.0f} M parameters"
    print(f"Computed, not measured: GiB on each of {gpus}, {config.model} of")
    print(f"{parameters}, {config.tokens} tokens a micro-batch, {config.image_tokens} of images.")
    if layout:
        print(f"{layout.flags()}, on a rank of the pipeline stage that needs the most.")
    print(memory_table(networks, plan, config.lora_rank, config.memory_gib))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
