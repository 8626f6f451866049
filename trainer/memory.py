"""How much GPU memory a training step takes, computed and not measured: `python -m trainer.memory --model 4b --gpus 2`.

In: the configuration of a network, what of it is trained, and how many tokens a micro-batch has. Out: bytes of each
kind on one of n GPUs, from counting parameters and from what each block keeps for the gradient. Weights and optimizer
are float32, the network computes in bfloat16. Left out are CUDA's context, NCCL's buffers, fragments, and an engine on
the same GPU: leave some GiB for them. When weights go to servers, rank 0 holds all of them once in bfloat16 besides.

The formulas are those of blocks that are not compiled; compiled ones keep less.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agents.model import PolicyModel
from agents.scores import CHUNK_VALUES
from envs.errors import UserError
from trainer.loading import empty_model, meta_model
from trainer.lora import LoraOptions, add_lora
from trainer.trainable import freeze_vision

GIB = 2**30
Offload = Literal["none", "optimizer", "all"]
Reshard = Literal["auto", "always", "never"]
_COLUMNS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "total")

#: Qwen3-VL: hidden size, layers, heads, MLP, tied embedding; tower's hidden size, layers, MLP, DeepStack layers.
#: From the config.json of the Instruct checkpoints.
QWEN3_VL: dict[str, tuple[int, int, int, int, bool, int, int, int, tuple[int, int, int]]] = {
    "2b": (2048, 28, 16, 6144, True, 1024, 24, 4096, (5, 11, 17)),
    "4b": (2560, 36, 32, 9728, True, 1024, 24, 4096, (5, 11, 17)),
    "8b": (4096, 36, 32, 12288, False, 1152, 27, 4304, (8, 16, 24)),
    "32b": (5120, 64, 64, 25600, False, 1152, 27, 4304, (8, 16, 24)),
}


@dataclass(frozen=True)
class Parameters:
    """Counts of a network's parameters. A unit is what is sharded and gathered together, the root is all the rest.

    Example, Qwen3-VL-2B trained in full: 2,127,532,032 trained, 0 frozen, 406,957,312 in the largest unit, its tower.
    """

    trained: int
    frozen: int
    units: int
    largest_unit: int
    next_unit: int
    largest_trained_unit: int
    root: int
    trained_root: int

    @classmethod
    def of(cls, model: PolicyModel) -> Parameters:
        """Count, on the meta device too; what has gradients is trained."""
        every = [_count(unit.parameters()) for unit in model.units]
        trained = [_count(p for p in unit.parameters() if p.requires_grad) for unit in model.units]
        total, total_trained = _count(model.parameters()), _count(p for p in model.parameters() if p.requires_grad)
        largest, following = sorted(every, reverse=True)[:2]
        return cls(
            trained=total_trained,
            frozen=total - total_trained,
            units=sum(every),
            largest_unit=largest,
            next_unit=following,
            largest_trained_unit=max(trained),
            root=total - sum(every),
            trained_root=total_trained - sum(trained),
        )


@dataclass(frozen=True)
class Plan:
    """How a step is taken. `tokens` and `patches` are those of a micro-batch, `frozen_bytes` those of a frozen weight.

    An image of N tokens has 4 N patches. `recompute`, `reshard` and `offload` are the learner's options. A value that
    is computed with takes `compute_bytes`: 2 in bfloat16; with 4, in float32, activations count double, a little high.
    """

    num_gpus: int = 1
    tokens: int = 4096
    patches: int = 4096
    recompute: float = 0.0
    reshard: Reshard = "auto"
    offload: Offload = "none"
    frozen_bytes: int = 4
    compute_bytes: int = 2

    @property
    def gives_up(self) -> bool:
        """Whether gathered weights are given up between forward and backward."""
        return self.reshard == "always" or (self.reshard == "auto" and self.num_gpus > 1)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU. `gathered` are the computed-with weights of the units in use, `optimizer` Adam's two moments.

    `gradients` are the sharded float32 ones and those of a unit and the root before they are added up over ranks.
    """

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it at once: what is needed at most."""
        whole = self.weights + self.gathered + self.gradients
        return whole + self.optimizer + self.activations + self.logits


def estimate(model: PolicyModel, plan: Plan) -> MemoryEstimate:
    """Return what a step of this network takes; it may be on the meta device. What has gradients is trained.

    An offloaded optimizer counts only where a step of it takes more than forward and backward do.
    """
    count, n = Parameters.of(model), plan.num_gpus
    weights = _split(4 * count.trained + plan.frozen_bytes * count.frozen, n)
    sharded_gradients, optimizer = _split(4 * count.trained, n), _split(8 * count.trained, n)
    # One unit is used while the next one is gathered.
    size = plan.compute_bytes
    gathered = size * (count.root + (count.largest_unit + count.next_unit if plan.gives_up else count.units))
    # Gradients come as computed; a float32 copy of one unit at a time, or of all, is added up over the ranks.
    whole = size * (count.trained_root + count.largest_trained_unit)
    whole += 4 * (count.trained if plan.reshard == "never" else max(count.trained_root, count.largest_trained_unit))
    activations, logits = _activations(model, plan), _logits(model, plan)
    if plan.offload == "all":
        weights, sharded_gradients, optimizer = 0, 0, 0
    elif plan.offload == "optimizer":
        optimizer = max(0, optimizer - gathered - whole - activations - logits)
    return MemoryEstimate(weights, gathered, sharded_gradients + whole, optimizer, activations, logits)


def decoder_block_bytes(config: Any) -> int:
    """Return the bytes a decoder block keeps of each token for the gradient, with a text configuration's sizes.

    A norm keeps its input in float32, what it multiplies with its weight, and its output, which the linear layers keep:
    8 H bytes for hidden size H. Attention keeps queries, keys, values and its output. A gated MLP of size M keeps what
    both input layers give, the activation and the product: 8 M bytes. Queries and keys of Qwen3 are normed, their
    output is not kept. A token that k experts see is copied for each: input and output, 4 H bytes.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * size, config.num_key_value_heads * size
    kept = 2 * 8 * hidden + 4 * queries + 4 * keys
    if config.model_type.startswith("qwen3"):
        kept += 6 * (queries + keys)
    if experts := getattr(config, "num_experts_per_tok", 0):
        return kept + experts * (8 * config.moe_intermediate_size + 4 * hidden)
    return kept + 8 * config.intermediate_size


def vision_block_bytes(config: Any) -> int:
    """Return the bytes a block of the vision tower keeps of each patch, with a vision configuration's sizes.

    Qwen3-VL's layer norms keep input and output, its MLP its activation before and after; Qwen2.5-VL's are as in its
    decoder. Attention keeps queries, keys, values and its output, 2 C bytes each for hidden size C.
    """
    is_gated = config.model_type.startswith("qwen2_5")
    norm, mlp = (8, 8) if is_gated else (4, 4)
    return (2 * norm + 8) * config.hidden_size + mlp * config.intermediate_size


def _activations(model: PolicyModel, plan: Plan) -> int:
    """Kept and recomputed blocks, and one more: that whose gradient is being taken holds as much again."""
    text, share = model.config.get_text_config(), plan.recompute
    parts = [(decoder_block_bytes(text) * plan.tokens, 2 * text.hidden_size * plan.tokens, text.num_hidden_layers)]
    tower = model.architecture.vision_tower(model.backbone)
    if tower is not None and any(parameter.requires_grad for parameter in tower.parameters()):
        vision = tower.config
        block = vision_block_bytes(vision) * plan.patches
        parts.append((block, 2 * vision.hidden_size * plan.patches, len(tower.blocks)))
    total = 0
    for block, block_input, layers in parts:
        recomputed = int(layers * share)
        total += (layers - recomputed) * block + recomputed * block_input
    return (total + max(block for block, _, _ in parts)) * plan.compute_bytes // 2


def _logits(model: PolicyModel, plan: Plan) -> int:
    """One chunk in float32, its gradient in float32 and as computed, and the output layer's gradient in float32."""
    weight = model.backbone.lm_head.weight  # type: ignore[union-attr]
    chunk = min(CHUNK_VALUES, plan.tokens * weight.shape[0])  # type: ignore[operator,index]
    return (8 + plan.compute_bytes) * chunk + (4 * weight.numel() if weight.requires_grad else 0)  # type: ignore[operator,union-attr]


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _split(size: int, num_gpus: int) -> int:
    return -(-size // num_gpus)


def qwen3_vl_config(name: str) -> Any:
    """Return the Transformers configuration of a dense Qwen3-VL: "2b", "4b", "8b" or "32b"."""
    from transformers import AutoConfig

    hidden, layers, heads, mlp, tied, vision_hidden, vision_layers, vision_mlp, deepstack = QWEN3_VL[name]
    text = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
    }
    vision = {
        "hidden_size": vision_hidden,
        "depth": vision_layers,
        "num_heads": 16,
        "intermediate_size": vision_mlp,
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": list(deepstack),
    }
    return AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, tie_word_embeddings=tied)


def table(config: Any, plan: Plan, lora: LoraOptions, memory_gib: float) -> str:
    """Return a line in GiB for each choice of what is trained and recomputed, as far as the network allows it."""
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
    parser.add_argument("--image-tokens", type=int, default=2048, help="those that are of images, each shown once")
    parser.add_argument("--offload", choices=("none", "optimizer", "all"), default="none", help="as of the learner")
    parser.add_argument("--reshard", choices=("auto", "always", "never"), default="auto", help="likewise")
    parser.add_argument("--frozen-bytes", type=int, choices=(2, 4), default=2, help="bytes of a weight not trained")
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
        total = _count(model.parameters())
        print(f"Computed, not measured: GiB on each of {args.gpus} GPUs with {args.memory_gib:g} GiB, {args.model} of")
        print(f"{total / 1e6:,.0f} M parameters, {args.tokens} tokens a micro-batch, {args.image_tokens} of images.")
        print(table(config, plan, LoraOptions(rank=args.lora_rank), args.memory_gib))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
