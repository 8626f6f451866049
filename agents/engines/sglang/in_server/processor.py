"""The picture processor of the SGLang servers that we start. Pictures that come in another way are left to SGLang."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import io
import threading
from typing import Any

import torch
from PIL import Image
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from agents.engines.sglang.in_server.cutting import PatchCutter
from agents.engines.sglang.in_server.handover import prepared_prompt
from agents.engines.sglang.in_server.kept_pictures import Allocate, Grid, KeptPictures, PictureError, picture_entries
from agents.engines.sglang.in_server.prompts import expand
from agents.rendering.images import stable_size

ARCHITECTURES = tuple(f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"))
#: Types in which patches are kept. The network casts them to its own, so a narrower type than that would change them.
NARROW_TYPES = {"bfloat16": torch.bfloat16, "half": torch.float16, "float16": torch.float16}


class PictureProcessor(QwenVLImageProcessor):
    """Reads each picture once, and hands prompts over without its patches."""

    models = tuple(model for model in QwenVLImageProcessor.models if model.__name__ in ARCHITECTURES)

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, server_args, _processor, *args, **kwargs)
        self._pictures = KeptPictures(self._cut)
        self._type = NARROW_TYPES.get(str(server_args.dtype), torch.float32)
        self._sglang = threading.Lock()  # Transformers' processors are not safe in two threads
        self._image_processor = _processor.image_processor

    @functools.cached_property
    def _cutter(self) -> PatchCutter | None:
        """The fast way to cut; None where SGLang was told to size pictures in its own way (`--mm-process-config`)."""
        if self.image_config:
            return None
        sizes = ("patch_size", "merge_size", "temporal_patch_size")
        return PatchCutter.learn(self._cut_by_sglang, *(getattr(self._image_processor, name) for name in sizes))

    def _cut(self, png: bytes, allocate: Allocate) -> Grid:
        """Write the patches of a picture, those that SGLang's own way gives."""
        with Image.open(io.BytesIO(png)) as file:
            picture = file.convert("RGB")
        size = (picture.height, picture.width)
        if self._cutter and stable_size(self._image_processor, *size) == size:
            return self._cutter.cut(picture, allocate)
        patches, grid = self._cut_by_sglang(picture)
        rows, columns = patches.shape
        allocate((rows, columns), patches.dtype).copy_(patches)
        return grid

    def _cut_by_sglang(self, picture: Image.Image) -> tuple[torch.Tensor, Grid]:
        with self._sglang:
            cut = self.process_mm_data(self.mm_tokens.image_token, images=[picture])
        (grid,) = cut["image_grid_thw"].tolist()
        return cut["pixel_values"].to(self._type), tuple(grid)

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the prompt, expanded and with positions; raises `PictureError`, which the client understands."""
        entries = picture_entries(image_data)
        if entries is None:
            return await super().process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)
        if not isinstance(input_text, list):
            raise PictureError("pictures by key need input_ids")
        addresses = await self._pictures.addresses(entries)
        grids = [address.grid_thw for address in addresses]
        prompt = expand(input_text, grids, self.mm_tokens.image_token_id, self.spatial_merge_size)
        token_ids = {
            "im_token_id": self.mm_tokens.image_token_id,
            "im_start_id": self.vision_start_token_id,
            "im_end_id": self.vision_end_token_id,
            "video_token_id": self.mm_tokens.video_token_id,
            "audio_token_id": self.mm_tokens.audio_token_id,
        }
        return prepared_prompt(prompt, addresses, [int(entry.hash, 16) for entry in entries], token_ids)
