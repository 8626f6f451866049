"""The networks that a policy may be, one row each: where Transformers keeps their parts and what sets them apart.

In: the configuration of a checkpoint. Out: its row of `ARCHITECTURES`, or a `UserError` that lists the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from envs.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """One row: the names of the network's class and of its processor's in Transformers, and what a forward pass takes.

    A network with `vision` has its decoder and its vision tower side by side and takes a position on each of three
    axes; one without is its decoder and takes one position. `deepstack` says that features of several layers of the
    tower enter the decoder (arXiv 2406.04334), `windows` that most layers of the tower attend within windows of
    `window_size` pixels only (Qwen2.5-VL, arXiv 2502.13923, section 2.1.1). `names_are_saved` says that a checkpoint
    holds the weights under the names, and in the shapes, that the network has them in memory.

    Example::

        ARCHITECTURES["qwen2_5_vl"].decoder(network).layers     # the decoder's layers
        ARCHITECTURES["llama"].vision_tower(network)            # None
    """

    network: str
    processor: str = ""
    names_are_saved: bool = True
    vision: bool = False
    deepstack: bool = False
    windows: bool = False

    def decoder(self, network: nn.Module) -> Any:
        """Return the module with `embed_tokens` and `layers`."""
        return network.model.language_model if self.vision else network.model  # type: ignore[union-attr]

    def vision_tower(self, network: nn.Module) -> Any | None:
        """Return the module with the vision `blocks`; None where there is none."""
        return network.model.visual if self.vision else None  # type: ignore[union-attr]

    def build(self, config: Any) -> nn.Module:
        """Return the network with fresh weights."""
        return self._class()(config)

    def read(self, path: Any, **options: Any) -> nn.Module:
        """Return the network with the weights of a checkpoint."""
        return self._class().from_pretrained(path, **options)

    def _class(self) -> Any:
        import transformers

        return getattr(transformers, self.network)


#: By the `model_type` of config.json.
ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3_vl": Architecture("Qwen3VLForConditionalGeneration", "Qwen3VLProcessor", vision=True, deepstack=True),
    "qwen3_vl_moe": Architecture(
        "Qwen3VLMoeForConditionalGeneration", "Qwen3VLProcessor", names_are_saved=False, vision=True, deepstack=True
    ),
    "qwen2_5_vl": Architecture(
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor", names_are_saved=False, vision=True, windows=True
    ),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "llama": Architecture("LlamaForCausalLM"),
}


def read_config(path: str | Path) -> Any:
    """Return the Transformers configuration of a checkpoint folder or hub id.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError("--model", "must be a model folder or hub id", str(path), reason) from error


def architecture_of(config: Any) -> Architecture:
    """Return the row of a Transformers configuration.

    Raises:
        UserError: no row is of its type, or a layer of it forgets tokens (a sliding window), which neither the prompt
            shared by samples nor the engine's cache allows for.
    """
    if config.model_type not in ARCHITECTURES:
        rule = f"must be one of {', '.join(ARCHITECTURES)}"
        raise UserError("--model", rule, config.model_type, "give a checkpoint of one of these types")
    kinds = set(config.get_text_config().to_dict().get("layer_types") or ()) - {"full_attention"}
    if kinds:
        fix = "give a model whose config.json has use_sliding_window false"
        raise UserError("--model", "must attend to all earlier tokens in every layer", ", ".join(sorted(kinds)), fix)
    return ARCHITECTURES[config.model_type]
