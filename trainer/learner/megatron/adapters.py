"""LoRA through Megatron-Bridge's adapters, under the names of the layers in a checkpoint."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from envs.errors import UserError, did_you_mean
from trainer.config.learner import LearnerConfig

#: Megatron holds some linear layers of a checkpoint as one. An adapter of one of them is an adapter of all of these.
LAYERS = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}


def megatron_targets(targets: Sequence[str], reads_images: bool) -> list[str]:
    """Return the names of Megatron's layers for `--lora-targets`; the tower of a network that `sees` gets no adapter.

    >>> megatron_targets(["q_proj", "down_proj"], sees=False)
    ['linear_qkv', 'linear_fc2']

    Raises:
        UserError: a target is no linear layer of the decoder.
    """
    chosen: dict[str, None] = {}
    for target in targets or tuple(LAYERS):
        name = target.rsplit(".", 1)[-1]
        if name == "all-linear":
            chosen.update(dict.fromkeys(LAYERS.values()))
        elif name in LAYERS:
            chosen[LAYERS[name]] = None
        else:
            rule = "must end a linear layer's name"
            known = {"all-linear", *LAYERS}
            raise UserError("--lora-targets", rule, target, did_you_mean(target, known))
    # The tower has layers of the same names.
    return [f"*language_model*.{name}" if reads_images else name for name in chosen]


def add_adapters(provider: Any, config: LearnerConfig) -> None:
    """Let the provider add trainable adapters to the loaded network and freeze all other weights."""
    from megatron.bridge.peft.lora import LoRA

    lora = LoRA(
        target_modules=megatron_targets(config.lora_targets, hasattr(provider, "vision_config")),
        dim=config.lora_rank,
        alpha=config.lora_alpha,  # type: ignore[arg-type]
        # An engine has none, so with it the trainer would score another policy.
        dropout=0.0,
        lora_A_init_method="kaiming",
    )
    provider.register_pre_wrap_hook(lambda chunks: lora(chunks, training=True))


@contextlib.contextmanager
def disabled(chunks: Sequence[Any]) -> Iterator[None]:
    """Switch the adapters off within the context: the network is then the reference policy of a KL penalty."""
    wrappers = [m for chunk in chunks for m in chunk.modules() if hasattr(m, "disable_adapter_layers")]
    try:
        for wrapper in wrappers:
            wrapper.disable_adapter_layers()
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()
