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
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agents.types import ProcessedImage
from envs.errors import UserError

# Transformers hands whole ragged batches, with their cumulative lengths, only to attention functions named so.
VISION_ATTENTION = "trueturn_flash_vision"


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


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    num_equal: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention inside each image. Tensors are (1, heads, P, head_dim); returns (1, P, heads, head_dim).

    `num_equal` > 0 says that the P patches are that many images of one size: they become the batch axis. Otherwise
    images of one length are batched together.
    """
    if num_equal:
        heads, patches, dim = query.shape[1:]
        q, k, v = (
            x.view(heads, num_equal, patches // num_equal, dim).transpose(0, 1) for x in (query[0], key[0], value[0])
        )
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).reshape(1, patches, heads, dim), None
    bounds = cu_seq_lens_q.tolist()
    by_length: dict[int, list[int]] = {}
    for start, end in itertools.pairwise(bounds):
        by_length.setdefault(end - start, []).append(start)
    result = torch.empty_like(query[0].transpose(0, 1))  # (P, heads, head_dim)
    for length, starts in by_length.items():
        rows = (torch.tensor(starts)[:, None] + torch.arange(length)).to(query.device)  # (images, length)
        q, k, v = (x[0][:, rows].transpose(0, 1) for x in (query, key, value))  # (images, heads, length, head_dim)
        result[rows.flatten()] = F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)
    return result.unsqueeze(0), None


@functools.lru_cache(maxsize=256)
def _patch_positions(grid: tuple[int, int, int], merge: int) -> Tensor:
    """Return (patches, 2): row and column of each patch, in the merge-block order that the processor writes."""
    time, height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    both = torch.stack([rows, columns], dim=-1).view(height // merge, merge, width // merge, merge, 2)
    return both.transpose(1, 2).reshape(-1, 2).repeat(time, 1)


class PolicyModel(nn.Module):
    """A Qwen3-VL network of Transformers behind one forward pass.

    Example::

        model = PolicyModel.load("path/to/checkpoint")
        logits_NV = model(ids_BT, positions_3BT, None, select_BT, vision)    # rows padded on the right
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.config: Any = backbone.config
        backbone.model.visual.config._attn_implementation = VISION_ATTENTION  # type: ignore[union-attr]

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
        """Read a checkpoint folder. Raises `UserError` where it is no Qwen3-VL checkpoint."""
        from transformers import AutoConfig, Qwen3VLForConditionalGeneration

        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise UserError(
                "--model", "must be a model folder or hub id", str(path), str(error).split("\n")[0]
            ) from error
        if config.model_type != "qwen3_vl":
            raise UserError("--model", "must be a qwen3_vl checkpoint", config.model_type, "give a Qwen3-VL model")
        register_attention()
        backbone = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        return cls(backbone)

    @classmethod
    def from_config(cls, config: Any) -> PolicyModel:
        """Build a network with fresh weights."""
        from transformers import Qwen3VLForConditionalGeneration

        register_attention()
        config._attn_implementation = "sdpa"
        return cls(Qwen3VLForConditionalGeneration(config))

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write configuration and weights as a Hugging Face folder, tied weights once."""
        state = {name: tensor.detach().to("cpu", dtype) for name, tensor in self.backbone.state_dict().items()}
        if self.config.tie_word_embeddings:
            del state["lm_head.weight"]
        backbone: Any = self.backbone
        backbone.save_pretrained(folder, state_dict=state)
        config = copy.deepcopy(self.config)
        for part in (config, config.text_config, config.vision_config):
            part.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)

    @property
    def image_token_id(self) -> int:
        """The placeholder's id."""
        return int(self.config.image_token_id)

    @property
    def merge_size(self) -> int:
        """Patches per token along each side."""
        return int(self.config.vision_config.spatial_merge_size)

    def encode_images(self, pixels_PD: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Return the merged features of all images, then one tensor per DeepStack layer; each (tokens, H)."""
        visual: Any = self.backbone.model.visual  # type: ignore[union-attr]
        device = pixels_PD.device
        positions = torch.cat([_patch_positions(grid, self.merge_size) for grid in grids]).to(device)
        frames = [height * width for time, height, width in grids for _ in range(time)]
        cu_seqlens = torch.tensor([0, *frames]).cumsum(0, dtype=torch.int32).to(device)
        output = visual(
            pixels_PD.to(visual.dtype),
            grid_thw=torch.tensor(grids, device=device),
            position_ids=positions,
            cu_seqlens=cu_seqlens,
            max_seqlen=max(frames),
            num_equal=len(frames) if len(set(frames)) == 1 else 0,
            return_dict=True,
        )
        return [output.pooler_output, *output.deepstack_features]

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
        language_model: Any = self.backbone.model.language_model  # type: ignore[union-attr]
        embeds_BTH = language_model.embed_tokens(ids_BT)
        image_mask, deepstack = None, None
        if vision is not None:
            features = self.encode_images(vision.pixels_PD, vision.grids)
            image_mask = ids_BT == self.image_token_id
            merged = features[0][vision.feature_index_N].to(embeds_BTH.dtype)
            embeds_BTH = embeds_BTH.index_put(image_mask.nonzero(as_tuple=True), merged)
            deepstack = [feature[vision.feature_index_N] for feature in features[1:]]
        output = language_model(
            inputs_embeds=embeds_BTH,
            position_ids=positions_3BT,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=False,
            visual_pos_masks=image_mask,
            deepstack_visual_embeds=deepstack,
        )
        return self.backbone.lm_head(output.last_hidden_state[select])  # type: ignore[operator]


def register_attention() -> None:
    """Make `vision_attention` known to Transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(VISION_ATTENTION, vision_attention)
