"""The image processor of the SGLang servers that we start. Images that come in another way are left to SGLang."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import io
import threading
from typing import Any

import torch
from PIL import Image
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from agents.engines.sglang.in_server.cutting import PatchForm, learn_values, ordered_levels, patch_values
from agents.engines.sglang.in_server.handover import prepared_prompt, takes_levels
from agents.engines.sglang.in_server.kept_images import Allocate, Grid, ImageError, KeptImages, image_entries
from agents.engines.sglang.in_server.prompts import expand
from agents.rendering.images import stable_size

ARCHITECTURES = tuple(f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"))
#: Types in which patches are kept. The network casts them to its own, so a narrower type than that would change them.
NARROW_TYPES = {"bfloat16": torch.bfloat16, "half": torch.float16, "float16": torch.float16}


class ImageProcessor(QwenVLImageProcessor):
    """Reads each image once, and hands prompts over with the addresses of their images."""

    models = tuple(model for model in QwenVLImageProcessor.models if model.__name__ in ARCHITECTURES)

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, server_args, _processor, *args, **kwargs)
        self._images = KeptImages(self._read)
        self._type = NARROW_TYPES.get(str(server_args.dtype), torch.float32)
        self._sglang = threading.Lock()  # Transformers' processors are not safe in two threads
        self._image_processor = _processor.image_processor
        sizes = ("patch_size", "merge_size", "temporal_patch_size")
        self._form = PatchForm(*(getattr(self._image_processor, name) for name in sizes))

    @functools.cached_property
    def _level_values(self) -> torch.Tensor | None:
        """The values of levels; None where SGLang was told to size images in its own way (`--mm-process-config`)."""
        if self.image_config:
            return None
        return learn_values(self._cut_by_sglang, self._form)

    def _read(self, png: bytes, allocate: Allocate) -> Grid:
        """Write the levels of an image, or else its patches, those that SGLang's own way gives; return their grid."""
        with Image.open(io.BytesIO(png)) as file:
            file.load()
            if file.mode == "RGB":
                image = file
            else:
                image = file.convert("RGB")
        size = (image.height, image.width)
        if self._level_values is None or stable_size(self._image_processor, *size) != size:
            kept_PN, grid = self._cut_by_sglang(image)
        else:
            kept_PN, grid = ordered_levels(image, self._form)
            if not takes_levels():
                kept_PN = patch_values(kept_PN, self._level_values, self._form.frames)
        rows, columns = kept_PN.shape
        allocate((rows, columns), kept_PN.dtype).copy_(kept_PN)
        return grid

    def _cut_by_sglang(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        with self._sglang:
            cut = self.process_mm_data(self.mm_tokens.image_token, images=[image])
        (grid,) = cut["image_grid_thw"].tolist()
        return cut["pixel_values"].to(self._type), tuple(grid)

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the prompt, expanded and with positions; raises `ImageError`, which the client understands."""
        entries = image_entries(image_data)
        if entries is None:
            return await super().process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)
        if not isinstance(input_text, list):
            raise ImageError("images by key need input_ids")
        addresses = await self._images.addresses(entries)
        grids = [address.grid_thw for address in addresses]
        prompt = expand(input_text, grids, self.mm_tokens.image_token_id, self.spatial_merge_size)
        token_ids = {
            "im_token_id": self.mm_tokens.image_token_id,
            "im_start_id": self.vision_start_token_id,
            "im_end_id": self.vision_end_token_id,
            "video_token_id": self.mm_tokens.video_token_id,
            "audio_token_id": self.mm_tokens.audio_token_id,
        }
        hashes = [int(entry.hash, 16) for entry in entries]
        return prepared_prompt(prompt, addresses, hashes, self._level_values, token_ids)
