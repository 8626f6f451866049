"""The policy network shared by engine and trainer: one forward pass over token streams with images.

In: ids, mRoPE positions, an attention mask, and the unique images of the batch. Out: hidden states or logits. The
network is a Transformers model; what is ours is that images are encoded once each however many streams show them, that
positions are given and not recomputed, and that the vision tower's attention runs over all images at once instead of
one by one.

Legend: B streams, T tokens, C cached tokens, N chosen tokens, P patches of all images, D patch values, H hidden size,
V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from agents.architectures import architecture_of
from agents.types import ProcessedImage
from agents.vision import VISION_ATTENTION, register_attention, tower_inputs
from envs.errors import UserError

#: The image token of a network that takes no images: an id that no token has.
NO_IMAGE_TOKEN = -1


@dataclass(frozen=True)
class VisionBatch:
    """The unique images of a batch and where their features go.

    `feature_index_N[i]` is the row of the merged features (all images after each other) that belongs to the i-th image
    placeholder of the batch, streams in order. Two streams that show one image point to the same rows.
    """

    pixels_PD: Tensor
    grids: tuple[tuple[int, int, int], ...]
    feature_index_N: Tensor

    @classmethod
    def build(cls, images: Sequence[Sequence[ProcessedImage]], device: torch.device | str) -> VisionBatch | None:
        """Collect the images of each stream; None when there is none.

        Example: two streams that both show one 20-token image give 80 patch rows and 40 feature indices 0..19, 0..19.
        """
        start_of: dict[str, int] = {}
        unique: list[ProcessedImage] = []
        index: list[np.ndarray] = []
        total = 0
        for stream in images:
            for image in stream:
                if image.digest not in start_of:
                    start_of[image.digest] = total
                    unique.append(image)
                    total += image.num_tokens
                index.append(np.arange(image.num_tokens) + start_of[image.digest])
        if not unique:
            return None
        return cls(
            pixels_PD=torch.from_numpy(np.concatenate([image.pixels_PD for image in unique])).to(device),
            grids=tuple(image.grid_thw for image in unique),
            feature_index_N=torch.from_numpy(np.concatenate(index)).to(device),
        )


class PolicyModel(nn.Module):
    """A network of Transformers, any of `ARCHITECTURES`, behind one forward pass.

    Example::

        model = PolicyModel.load("path/to/checkpoint")
        logits_NV = model(ids_BT, positions_3BT, None, select_BT, vision)    # rows padded on the right
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.config: Any = backbone.config
        self.architecture = architecture_of(self.config)
        if self.architecture.vision:
            self._vision_tower.config._attn_implementation = VISION_ATTENTION

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
        """Read a checkpoint folder. Raises `UserError` where it is none, or of no supported architecture."""
        from transformers import AutoConfig

        register_attention()
        try:
            architecture = architecture_of(AutoConfig.from_pretrained(path))
            backbone = architecture.read(path, dtype=dtype, attn_implementation="sdpa")
        except (OSError, ValueError) as error:
            raise UserError(
                "--model", "must be a model folder or hub id", str(path), str(error).split("\n")[0]
            ) from error
        return cls(backbone)

    @classmethod
    def from_config(cls, config: Any) -> PolicyModel:
        """Build a network with fresh weights. Raises `UserError` where its architecture is not supported."""
        register_attention()
        config._attn_implementation = "sdpa"
        return cls(architecture_of(config).build(config))

    def save(
        self, folder: str | Path, dtype: torch.dtype = torch.bfloat16, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write configuration and weights as a Hugging Face folder, tied weights once.

        `weights`, by the names of `named_parameters`, stand in for the network's own: a sharded one has no whole ones.
        """
        backbone: Any = self.backbone
        weights = weights if weights is not None else dict(self.named_parameters())  # names a tied weight once
        state = {n.removeprefix("backbone."): tensor.detach().to("cpu", dtype) for n, tensor in weights.items()}
        backbone.save_pretrained(folder, state_dict=state)
        config = copy.deepcopy(self.config)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            part.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        if self.architecture.processor:  # we need none, servers do
            text = json.dumps({"processor_class": self.architecture.processor}, indent=1) + "\n"
            (Path(folder) / "processor_config.json").write_text(text, encoding="utf-8")

    @property
    def image_token_id(self) -> int:
        """The placeholder's id; -1, which no token has, where the network takes no images."""
        return int(self.config.image_token_id) if self.architecture.vision else NO_IMAGE_TOKEN

    @property
    def merge_size(self) -> int:
        """Patches per token along each side; 1 where the network takes no images."""
        return int(self.config.vision_config.spatial_merge_size) if self.architecture.vision else 1

    @property
    def max_positions(self) -> int:
        """How many positions the network was made for."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of decoder and vision tower, the units of sharding."""
        tower = self._vision_tower
        return [*self._decoder.layers, *(tower.blocks if tower is not None else ())]

    @property
    def _decoder(self) -> Any:
        return self.architecture.decoder(self.backbone)

    @property
    def _vision_tower(self) -> Any:
        return self.architecture.vision_tower(self.backbone)

    def encode_images(self, pixels_PD: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Return the merged features of all images, then one tensor per DeepStack layer; each (tokens, H)."""
        tower = self._vision_tower
        assert tower is not None, f"a {self.config.model_type} network takes no images, got {len(grids)}"
        window = None
        if self.architecture.windows:
            window = tower.config.window_size // tower.config.patch_size // self.merge_size
        inputs = tower_inputs(grids, self.merge_size, window, pixels_PD.device)
        output = tower(pixels_PD.to(tower.dtype), return_dict=True, **inputs)
        return [output.pooler_output, *(output.deepstack_features if self.architecture.deepstack else ())]

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
        padded on the right. Only the chosen places are multiplied out to the vocabulary.
        """
        decoder = self._decoder
        embeds_BTH = decoder.embed_tokens(ids_BT)
        deepstack: dict[str, Any] = {}
        if vision is not None:
            features = self.encode_images(vision.pixels_PD, vision.grids)
            image_mask = ids_BT == self.image_token_id
            merged = features[0][vision.feature_index_N].to(embeds_BTH.dtype)
            embeds_BTH = embeds_BTH.index_put(image_mask.nonzero(as_tuple=True), merged)
            if self.architecture.deepstack:
                deepstack["visual_pos_masks"] = image_mask
                deepstack["deepstack_visual_embeds"] = [feature[vision.feature_index_N] for feature in features[1:]]
        if not self.architecture.vision and attention_mask is None:
            # Without a mask, Transformers takes the positions of padding for those of further packed sequences.
            attention_mask = torch.ones_like(ids_BT)
        output = decoder(
            inputs_embeds=embeds_BTH,
            position_ids=positions_3BT if self.architecture.vision else positions_3BT[0],
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=False,
            **deepstack,
        )
        return float32_logits(output.last_hidden_state[select], self.backbone.lm_head)


def float32_logits(hidden_NH: Tensor, lm_head: Any) -> Tensor:
    """Return the logits (N, V) in float32, whatever the network computes in.

    Logits of 16 stand 1/16 apart in bfloat16, which moves log-probs by hundredths of a nat: most of the gap between two
    engines that round differently (MiniMax-M1, arXiv 2506.13585, section 3.2). SGLang: `--enable-fp32-lm-head`.
    """
    if hidden_NH.dtype == torch.float32:
        return lm_head(hidden_NH)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return functional.linear(hidden_NH.float(), lm_head.weight.float())
