"""The policy network that engine and trainer share: one forward pass over token streams with images.

It takes ids, mRoPE positions, an attention mask and the unique images of the batch, and returns logits or log-probs.
The network is a Transformers model with four changes. Each image is encoded once, however many streams show it.
Positions are inputs and not computed again. Attention runs over all images and all packed sequences at once. A training
forward never holds all logits.

Legend: B streams, T tokens, C cached tokens, N chosen tokens, M image placeholders, P patches of all images, D patch
values, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from agents.model.architectures import NO_IMAGE_TOKEN, architecture_of, attention_interval, read_config
from agents.model.attention import TEXT_ATTENTION, VISION_ATTENTION, Span, needs_buckets, register_attention
from agents.model.delta_net import install
from agents.model.linear_logprobs import float32_product, linear_scores
from agents.model.mrope import mrope_positions
from agents.model.packed import PackedStreams, VisionBatch
from agents.model.routing import Routing
from agents.model.state_plan import StatePlan
from agents.model.vision import tower_inputs
from agents.types import ProcessedImage, SamplingDistribution


class PolicyModel(nn.Module):
    """A network of Transformers, any of `ARCHITECTURES`, behind one forward pass.

    Example::

        model = PolicyModel.load("path/to/checkpoint")
        logits_NV = model(ids_BT, positions_3BT, None, select_BT, vision)    # rows padded on the right
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        #: Whether `token_scores` compiles what is outside of blocks, or within chunks, into fused kernels.
        self.compiled_scores = False
        self.config: Any = backbone.config
        self.architecture = architecture_of(self.config)
        #: The id of the image placeholder, and patches per token along each side; without vision no token has the id.
        self.image_token_id = NO_IMAGE_TOKEN
        self.merge_size = 1
        if self.architecture.vision:
            self.image_token_id = int(self.config.image_token_id)
            self.merge_size = int(self.config.vision_config.spatial_merge_size)
            self._vision_tower.config._attn_implementation = VISION_ATTENTION
        if self.architecture.deepstack:
            self._decoder._deepstack_process = add_features
        self.routing = Routing(self._decoder)
        if self.architecture.states:
            install(self._decoder)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
        """Read a checkpoint folder. Raises `UserError` where it is none, or its architecture is not supported."""
        register_attention()
        architecture = architecture_of(read_config(path))
        return cls(architecture.read(path, dtype=dtype, attn_implementation=TEXT_ATTENTION))

    @classmethod
    def from_config(cls, config: Any) -> PolicyModel:
        """Build a network with fresh weights. Raises `UserError` where its architecture is not supported."""
        register_attention()
        config._attn_implementation = TEXT_ATTENTION
        return cls(architecture_of(config).build(config))

    def save(
        self, folder: str | Path, dtype: torch.dtype = torch.bfloat16, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write configuration and weights as a Hugging Face folder, tied weights once.

        `weights`, by the names of `named_parameters`, replace the network's own, which are incomplete in a sharded one.
        """
        backbone: Any = self.backbone
        if weights is None:
            weights = dict(self.named_parameters())  # names a tied weight once
        # Transformers knows the network without our prefix.
        named = {n.removeprefix("backbone."): tensor.detach().to("cpu", dtype) for n, tensor in weights.items()}
        state = {self.architecture.saved_name(name): self.as_saved(name, weight) for name, weight in named.items()}
        # Transformers would write the experts of a mixture in a way of its own.
        backbone.save_pretrained(folder, state_dict=state, save_original_format=False)
        self.save_settings(folder, dtype)

    def save_settings(self, folder: str | Path, dtype: torch.dtype) -> None:
        """Write the configuration of a Hugging Face folder whose weights are in `dtype`."""
        config = copy.deepcopy(self.config)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            part.dtype = str(dtype).removeprefix("torch.")
        if self.architecture.states:  # SGLang needs both, and Transformers leaves them out
            text = config.get_text_config()
            text.full_attention_interval = attention_interval(text)
            config.vision_config.deepstack_visual_indexes = []
        config.save_pretrained(folder)
        if self.architecture.processor:  # for servers; TrueTurn does not read it
            text = json.dumps({"processor_class": self.architecture.processor}, indent=1) + "\n"
            (Path(folder) / "processor_config.json").write_text(text, encoding="utf-8")

    def as_saved(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight as it lies in a checkpoint, given as it lies there or in memory; only experts differ."""
        lies_as_in_memory = self._is_expert(name, weight) and weight.shape[1:] == self._expert_shape(name)
        # Nobody could tell how a square matrix lies: Transformers reads it as one of its own.
        if lies_as_in_memory and weight.shape[1] != weight.shape[2]:
            return weight.transpose(1, 2).contiguous()
        return weight

    def as_in_memory(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of a checkpoint, or some of its rows, as it lies in the network."""
        if self._is_expert(name, weight) and weight.shape[1:] != self._expert_shape(name):
            return weight.transpose(1, 2)
        return weight

    def _is_expert(self, name: str, weight: Tensor) -> bool:
        return self.architecture.transposes_experts and ".mlp.experts." in name and weight.dim() == 3

    def _expert_shape(self, name: str) -> torch.Size:
        return self.backbone.get_parameter(name).shape[1:]

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of decoder and vision tower; each is compiled and recomputed separately."""
        tower = self._vision_tower
        return [*self._decoder.layers, *(tower.blocks if tower is not None else ())]

    @property
    def units(self) -> list[nn.Module]:
        """The parts that are sharded separately: each of the decoder's blocks, and the vision tower as a whole.

        The tower's blocks are small; gathering them one by one would cost more time than it saves memory.
        """
        tower = self._vision_tower
        return [*self._decoder.layers, *([tower] if tower is not None else ())]

    @property
    def _decoder(self) -> Any:
        return self.architecture.decoder(self.backbone)

    @property
    def _vision_tower(self) -> Any:
        return self.architecture.vision_tower(self.backbone)

    def encode_images(
        self, pixels_PD: Tensor, grids: Sequence[tuple[int, int, int]], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return the merged features of all images, then one tensor per DeepStack layer; each (tokens, H).

        The tower computes in `dtype`; None means the dtype of its weights.
        """
        tower = self._vision_tower
        assert tower is not None, f"a {self.config.model_type} network takes no images, got {len(grids)}"
        window = None
        if self.architecture.windows:
            window = tower.config.window_size // tower.config.patch_size // self.merge_size
        pixels_PD = pixels_PD.to(tower.dtype if dtype is None else dtype)
        kind = pixels_PD.device.type
        # Under autocast queries and keys have its type, whatever the pixels have.
        if torch.is_autocast_enabled(kind):
            attends_in = torch.get_autocast_dtype(kind)
        else:
            attends_in = pixels_PD.dtype
        with_buckets = needs_buckets(pixels_PD.device, attends_in)
        inputs = tower_inputs(grids, self.merge_size, window, pixels_PD.device, with_buckets)
        output = tower(pixels_PD, return_dict=True, **inputs)
        return [output.pooler_output, *(output.deepstack_features if self.architecture.deepstack else ())]

    def positions(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.int64]:
        """Return the mRoPE positions of a stream, (3, T)."""
        ids_T = np.asarray(ids, dtype=np.int64)
        return mrope_positions(ids_T, [image.grid_thw for image in images], self.image_token_id, self.merge_size)

    def forward(
        self,
        ids_BT: Tensor,
        positions_3BT: Tensor,
        attention_mask: Tensor | None,
        select: Tensor | tuple[Tensor, Tensor],
        vision: VisionBatch | None = None,
        cache: Any | None = None,
    ) -> Tensor:
        """Return the logits (N, V) at the chosen places: where a boolean (B, T) is True, or at row and column indices.

        `attention_mask` is a boolean (B, 1, T, C + T) mask, True where a query sees a column; None is causal over rows
        padded on the right. Logits are computed at the chosen places only.
        """
        if not self.architecture.vision and attention_mask is None:
            # Without a mask, Transformers mistakes the positions of padding for further packed sequences.
            attention_mask = torch.ones_like(ids_BT)
        if vision:
            places = (ids_BT == self.image_token_id).nonzero(as_tuple=True)
        else:
            places = ()
        inputs: dict[str, Any] = {_cache_name(type(self._decoder)): cache, "attention_mask": attention_mask}
        if self.architecture.states and cache is None:
            rows, width = ids_BT.shape
            spans = [Span(row * width, width) for row in range(rows)]
            inputs["state_plan"] = StatePlan.build(spans, ids_BT.device)
        with self.routing.forward(None, keeps_chosen=cache is not None):
            hidden_BTH = self._hidden(ids_BT, positions_3BT, vision, places, **inputs)
            if cache is not None and self.routing.shape:
                cache.add_routes(self.routing.chosen())
        return float32_logits(hidden_BTH[select], self.backbone.lm_head)

    def next_logits(self, ids_B: Tensor, positions_B: Tensor, seen_BC: Tensor, cache: Any) -> Tensor:
        """Return the logits (B, V) after one new token a row, and append its keys and values to the cache.

        `seen_BC` is True where a row sees a column; the last column is the new token's.
        """
        positions_3B1 = positions_B[None, :, None].expand(3, -1, -1)
        rows_B = torch.arange(len(ids_B), device=ids_B.device)  # a mask would make the program wait for the GPU
        last = (rows_B, torch.zeros_like(rows_B))
        return self(ids_B[:, None], positions_3B1, seen_BC[:, None, None], last, None, cache)

    def token_scores(
        self, packed: PackedStreams, distribution: SamplingDistribution, keeps_chosen: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the log-prob of each chosen token and the entropy in nats at its place, both (N,) float32.

        This is the network of `forward` over one packed row: nothing is padded, and only one chunk of logits
        (`agents.model.linear_logprobs`) exists at a time. A mixture's tokens go to the experts of `packed.routes_TLK`;
        with `keeps_chosen`, `routing.chosen()` then has those that they went to.
        """
        row = torch.zeros_like(packed.placeholders_M)
        # Transformers passes on a mask of four dimensions unchanged, so it makes none over the whole row.
        unused_1111 = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.device)
        inputs: dict[str, Any] = {}
        if self.architecture.states:
            inputs["state_plan"] = replace(packed.state_plan, is_compiled=self.compiled_scores)
        with self.routing.forward(packed.routes_TLK, keeps_chosen):
            hidden_1TH = self._hidden(
                packed.ids_T[None],
                packed.positions_3T[:, None],
                packed.vision,
                (row, packed.placeholders_M),
                attention_mask=unused_1111,
                segments=packed.segments,
                **inputs,
            )
        hidden_NH = hidden_1TH[0].index_select(0, packed.before_N)
        lm_head: Any = self.backbone.lm_head
        return linear_scores(
            hidden_NH, lm_head.weight, packed.targets_N, distribution, self.compiled_scores, packed.kept_NK
        )

    def _hidden(
        self,
        ids_BT: Tensor,
        positions_3BT: Tensor,
        vision: VisionBatch | None,
        placeholders: tuple[Tensor, ...],
        **inputs: Any,
    ) -> Tensor:
        """Return the decoder's hidden states (B, T, H); `placeholders` are the rows and columns of image tokens."""
        decoder = self._decoder
        embeds_BTH = decoder.embed_tokens(ids_BT)
        if vision is not None:
            features = self.encode_images(vision.pixels_PD, vision.grids, embeds_BTH.dtype)
            merged = features[0].index_select(0, vision.feature_index_M).to(embeds_BTH.dtype)
            embeds_BTH = embeds_BTH.index_put(placeholders, merged)
            if self.architecture.deepstack:
                inputs["visual_pos_masks"] = torch.stack(placeholders)
                inputs["deepstack_visual_embeds"] = [f.index_select(0, vision.feature_index_M) for f in features[1:]]
        if self.architecture.vision:
            positions = positions_3BT
        else:
            positions = positions_3BT[0]
        return decoder(inputs_embeds=embeds_BTH, position_ids=positions, use_cache=False, **inputs).last_hidden_state


@functools.cache
def _cache_name(decoder: type[nn.Module]) -> str:
    """Return what a decoder calls its cache: "cache", or "past_key_values" in older versions of Transformers."""
    if "cache" in inspect.signature(decoder.forward).parameters:
        return "cache"
    return "past_key_values"


def add_features(hidden_BTH: Tensor, places_2M: Tensor, features_MH: Tensor) -> Tensor:
    """Return the hidden states with features added at rows and columns: DeepStack's step (arXiv 2406.04334).

    Replaces Transformers' own, which finds the places by a mask: on a GPU the program then waits for the device.
    """
    rows, columns = places_2M
    features_MH = features_MH.to(hidden_BTH.dtype)
    return hidden_BTH.index_put((rows, columns), hidden_BTH[rows, columns] + features_MH)


def float32_logits(hidden_NH: Tensor, lm_head: Any) -> Tensor:
    """Return the logits (N, V) in float32 at any compute dtype; `agents.model.linear_logprobs` says why."""
    if hidden_NH.dtype == torch.float32:
        return lm_head(hidden_NH)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        if torch.is_grad_enabled():
            return functional.linear(hidden_NH.float(), lm_head.weight.float())
        return float32_product(hidden_NH, lm_head.weight.to(hidden_NH.dtype).T)
