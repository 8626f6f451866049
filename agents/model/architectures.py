"""The supported architectures, one row each: where Transformers keeps the parts of a network, and how they differ.

`architecture_of` returns the row for the configuration of a checkpoint, or raises a `UserError` that lists all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agents.model.state_plan import WIDTH
from agents.types import RouteShape
from envs.datasets.hub import check_is_there
from envs.errors import UserError, first_line


@dataclass(frozen=True)
class Architecture:
    """One row: the classes of the network and its processor in Transformers, and the inputs of a forward pass.

    A network with `vision` has a decoder and a vision tower and takes positions on three axes; one without is only a
    decoder and takes one position. `deepstack`: features of several layers of the tower enter the decoder (arXiv
    2406.04334). `windows`: most layers of the tower attend only within windows of `window_size` pixels (Qwen2.5-VL,
    arXiv 2502.13923, section 2.1.1). `states`: most layers of the decoder carry a state from token to token in place of
    attention (`agents.model.delta_net`). A checkpoint holds the weights with the same names and shapes as the network
    in memory; but names that begin with a key of `saved_prefixes` begin with its value there, and with
    `transposes_experts` it holds the matrices of a mixture's experts as (experts, inputs, outputs), where the network
    has (experts, outputs, inputs). So they lie on the hub, and servers read nothing else; Transformers reads other
    ways too, and writes experts in its own.

    Example::

        ARCHITECTURES["qwen2_5_vl"].decoder(network).layers     # the decoder's layers
        ARCHITECTURES["llama"].vision_tower(network)            # None
    """

    network: str
    processor: str = ""
    vision: bool = False
    deepstack: bool = False
    windows: bool = False
    states: bool = False
    transposes_experts: bool = False
    saved_prefixes: Mapping[str, str] = field(default_factory=dict)

    def saved_name(self, name: str) -> str:
        """Return the name in a checkpoint of a weight of the network.

        >>> ARCHITECTURES["qwen2_5_vl"].saved_name("model.language_model.norm.weight")
        'model.norm.weight'
        """
        for prefix, saved in self.saved_prefixes.items():
            if name.startswith(prefix):
                return saved + name.removeprefix(prefix)
        return name

    def decoder(self, network: nn.Module) -> Any:
        """Return the module with `embed_tokens` and `layers`."""
        return network.model.language_model if self.vision else network.model  # type: ignore[union-attr]

    def vision_tower(self, network: nn.Module) -> Any | None:
        """Return the module with the vision `blocks`; None without `vision`."""
        return network.model.visual if self.vision else None  # type: ignore[union-attr]

    def build(self, config: Any) -> nn.Module:
        """Return the network with fresh weights. Raises `UserError` where the configuration describes none."""
        with _checkpoint_errors(config.name_or_path):
            return self._class()(config)

    def read(self, path: Any, **options: Any) -> nn.Module:
        """Return the network with the weights of a checkpoint.

        Raises `UserError` where it cannot be read, or lacks weights: Transformers would draw them at random.
        """
        with _checkpoint_errors(path):
            # Transformers itself only logs what a checkpoint lacks.
            network, report = self._class().from_pretrained(path, output_loading_info=True, **options)
        if missing := sorted(report["missing_keys"]):
            rule, got = "must hold every weight of the network in its config.json", f"none named {missing[0]}"
            raise UserError("--model", rule, got, "give a whole checkpoint, or the config.json that belongs to it")
        return network

    def _class(self) -> Any:
        import transformers

        return getattr(transformers, self.network)


@contextlib.contextmanager
def _checkpoint_errors(path: Any) -> Iterator[None]:
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        fix = f"give a folder with config.json ({first_line(error)})"
        raise UserError("--model", "must be a model folder or hub id", str(path), fix) from error
    except RuntimeError as error:  # of Transformers, where shapes differ
        fix = f"give a whole checkpoint ({first_line(error)})"
        raise UserError("--model", "must hold weights of the shapes in its config.json", str(path), fix) from error
    except Exception as error:  # whatever a value of config.json, or a damaged file, leads to
        cause = " ".join(str(error).split())
        fix = f"take the files of the model's repository ({type(error).__name__}: {cause})"
        raise UserError("--model", "must be a checkpoint that Transformers can read", str(path), fix) from error


#: The most layers of a network, those of its vision tower included.
MAX_BLOCKS = 10_000
#: The most experts of a layer: 16 bits with a sign hold their numbers.
MAX_EXPERTS = 2**15

#: By the `model_type` of config.json.
ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3_vl": Architecture("Qwen3VLForConditionalGeneration", "Qwen3VLProcessor", vision=True, deepstack=True),
    "qwen3_vl_moe": Architecture(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLProcessor",
        vision=True,
        deepstack=True,
        transposes_experts=True,
    ),
    "qwen2_5_vl": Architecture(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLProcessor",
        vision=True,
        windows=True,
        saved_prefixes={"model.visual.": "visual.", "model.language_model.": "model."},
    ),
    "qwen3_5": Architecture("Qwen3_5ForConditionalGeneration", "Qwen3VLProcessor", vision=True, states=True),
    "qwen3_5_moe": Architecture("Qwen3_5MoeForConditionalGeneration", "Qwen3VLProcessor", vision=True, states=True),
    "glm4v": Architecture("Glm4vForConditionalGeneration", "Glm4vProcessor", vision=True),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "llama": Architecture("LlamaForCausalLM"),
}


def read_config(path: str | Path) -> Any:
    """Return the Transformers configuration of a checkpoint folder or hub id. Raises `UserError` if there is none."""
    from transformers import AutoConfig

    check_is_there(path)
    with _checkpoint_errors(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)  # None would ask on the terminal


def architecture_of(config: Any) -> Architecture:
    """Return the row of a Transformers configuration.

    Raises:
        UserError: there is no row for its type, it has more than `MAX_BLOCKS` layers, or a layer forgets tokens (a
            sliding window), which neither shared prompts nor the engine's cache support.
    """
    if config.model_type not in ARCHITECTURES:
        rule = f"must be one of {', '.join(ARCHITECTURES)}"
        raise UserError("--model", rule, config.model_type, "give a checkpoint of one of these types")
    architecture = ARCHITECTURES[config.model_type]
    text = config.get_text_config()
    blocks = text.num_hidden_layers + (config.vision_config.depth if architecture.vision else 0)
    if blocks > MAX_BLOCKS:  # they are made one after the other, long before the weights are looked at
        rule, fix = f"must have at most {MAX_BLOCKS} layers", "take the config.json of the model's repository"
        raise UserError("--model", rule, blocks, fix)
    known = {"full_attention"}
    if architecture.states:
        known.add("linear_attention")
        _check_states(text)
    # Absent where every layer attends to all tokens.
    kinds = set(text.to_dict().get("layer_types") or ()) - known
    if kinds:
        fix = "give a model whose config.json has use_sliding_window false"
        raise UserError("--model", "must attend to all earlier tokens in every layer", ", ".join(sorted(kinds)), fix)
    return architecture


def attention_interval(text: Any) -> int:
    """Return n where every n-th layer of a text configuration has attention and the others carry states; else 0."""
    kinds = list(text.layer_types)
    for interval in range(1, len(kinds) + 1):
        if all((kind == "full_attention") == (number % interval == 0) for number, kind in enumerate(kinds, 1)):
            return interval
    return 0


def _check_states(text: Any) -> None:
    """Raise `UserError` if layers with states are not as in the family's checkpoints."""
    width = text.linear_conv_kernel_dim
    heads = (text.linear_num_value_heads, text.linear_num_key_heads)
    fix = "take the config.json of the model's repository"
    if width != WIDTH + 1:
        raise UserError("--model", f"must have linear_conv_kernel_dim {WIDTH + 1}", width, fix)
    if min(heads) < 1 or heads[0] % heads[1]:
        rule = "must have linear_num_value_heads that are a multiple of linear_num_key_heads"
        raise UserError("--model", rule, f"{heads[0]} and {heads[1]}", fix)
    # Servers know the layers by this interval alone.
    if not attention_interval(text):
        found = ", ".join(text.layer_types[:8])
        raise UserError("--model", "must have full_attention in every n-th layer_types", found, fix)


#: The image token id of a network without vision; no token has it.
NO_IMAGE_TOKEN = -1


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a network that its configuration gives without loading it.

    `routes` is None for a network that is no mixture of experts.

    Example: Qwen3-VL has image token 151655 and merges 2 x 2 patches; a network without vision has -1 and 1.
    """

    model_type: str
    architectures: tuple[str, ...]
    image_token_id: int
    merge_size: int
    max_positions: int
    routes: RouteShape | None = None

    @classmethod
    def load(cls, path: str | Path) -> ModelFacts:
        """Read a checkpoint's configuration.

        Raises:
            UserError: there is none, or its architecture is not supported.
        """
        config = read_config(path)
        architecture = architecture_of(config)
        reads_images = architecture.vision
        with _checkpoint_errors(path):
            if reads_images:
                image_token_id = int(config.image_token_id)
                merge_size = int(config.vision_config.spatial_merge_size)
            else:
                image_token_id = NO_IMAGE_TOKEN
                merge_size = 1
            if merge_size < 1 or (reads_images and image_token_id < 0):
                raise ValueError(f"image_token_id {image_token_id}, spatial_merge_size {merge_size}")
            return cls(
                model_type=config.model_type,
                architectures=tuple(config.architectures or ()),
                image_token_id=image_token_id,
                merge_size=merge_size,
                max_positions=int(config.get_text_config().max_position_embeddings),
                routes=_routes_of(config.get_text_config()),
            )


def _routes_of(text: Any) -> RouteShape | None:
    """Return the routes of a network with this configuration of its decoder; None without experts."""
    num_experts = int(getattr(text, "num_experts", None) or 0)  # absent in a dense one
    if not num_experts:
        return None
    shape = RouteShape(int(text.num_hidden_layers), num_experts, int(text.num_experts_per_tok))
    if not 1 <= shape.top_k <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts {num_experts}, num_experts_per_tok {shape.top_k}")
    return shape
