"""Estimate the GPU memory of a training step without running it: `python -m trainer.memory --model 4b --gpus 2`.

The estimate counts the parameters, and the values that each block keeps for the gradient. Weights and optimizer are
float32; the network computes in bfloat16. The estimate leaves out CUDA's context, NCCL's buffers, fragmentation, and an
engine on the same GPU: leave some GiB for them. When weights go to servers, rank 0 also holds all of them once in
bfloat16.

The formulas hold for blocks that are not compiled; compiled blocks keep less.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.errors import UserError
from trainer.learner.lora import LoraOptions, add_lora
from trainer.learner.sharding import freeze_vision
from trainer.learner.weights_io import empty_model, meta_model
from trainer.preflight.memory_estimate import GIB, QWEN3_VL, Plan, count_values, estimate, qwen3_vl_config

_COLUMNS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "total")


def table(config: Any, plan: Plan, lora: LoraOptions, memory_gib: float) -> str:
    """Return a line in GiB for each choice of what to train and recompute that the network allows."""
    lines = [f"{'trained':<10} {'recomputed':>10} " + " ".join(f"{name:>11}" for name in _COLUMNS) + "  fits"]
    for trained in ("all", "no vision", "LoRA"):
        model = meta_model(config)
        if trained == "no vision":
            if not model.architecture.vision:
                continue
            freeze_vision(model)
        elif trained == "LoRA":
            if not importlib.util.find_spec("peft"):
                continue
            add_lora(model, lora)
        for recompute in (0.0, 0.5, 1.0):
            found = estimate(model, replace(plan, recompute=recompute))
            fits = "yes" if found.total <= memory_gib * GIB else "no"
            cells = " ".join(f"{getattr(found, name) / GIB:>11.1f}" for name in _COLUMNS)
            lines.append(f"{trained:<10} {recompute:>10.0%} {cells}  {fits}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; a user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m trainer.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="2b", help=f"checkpoint folder, hub id, or one of {', '.join(QWEN3_VL)}")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the weights are sharded over")
    parser.add_argument("--memory-gib", type=float, default=80.0, help="memory of one GPU")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--image-tokens", type=int, default=2048, help="those that belong to images, each shown once")
    parser.add_argument(
        "--offload", choices=("none", "optimizer", "all"), default="none", help="--offload of trainer.run"
    )
    parser.add_argument(
        "--reshard", choices=("auto", "always", "never"), default="auto", help="--reshard of trainer.run"
    )
    parser.add_argument("--frozen-bytes", type=int, choices=(2, 4), default=2, help="bytes of a frozen weight")
    parser.add_argument("--lora-rank", type=int, default=32, help="rank of the adapters")
    args = parser.parse_args(argv)
    try:
        for name, least in (("gpus", 1), ("tokens", 1), ("lora_rank", 1), ("image_tokens", 0)):
            if getattr(args, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(flag, f"must be at least {least}", getattr(args, name), f"give {least} or more")
        if args.image_tokens > args.tokens:
            raise UserError(
                "--image-tokens", f"must be among the {args.tokens} --tokens", args.image_tokens, "give less"
            )
        is_named = args.model in QWEN3_VL and not Path(args.model).exists()
        config = qwen3_vl_config(args.model) if is_named else empty_model(args.model).config
        model = meta_model(config)
        patches = args.image_tokens * model.merge_size**2
        plan = Plan(args.gpus, args.tokens, patches, 0.0, args.reshard, args.offload, args.frozen_bytes)
        total = count_values(model.parameters())
        print(f"Computed, not measured: GiB on each of {args.gpus} GPUs with {args.memory_gib:g} GiB, {args.model} of")
        print(f"{total / 1e6:,.0f} M parameters, {args.tokens} tokens a micro-batch, {args.image_tokens} of images.")
        print(table(config, plan, LoraOptions(rank=args.lora_rank), args.memory_gib))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
