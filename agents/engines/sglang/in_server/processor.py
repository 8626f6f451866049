"""The image processor of the SGLang servers that we start. Images that come in another way are left to SGLang."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from agents.engines.sglang.in_server.handover import prepared_prompt
from agents.engines.sglang.in_server.kept_images import Grid, ImageError, KeptImages, image_entries
from agents.engines.sglang.in_server.prompts import expand

FAMILIES = ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
ARCHITECTURES = tuple(f"{name}ForConditionalGeneration" for name in FAMILIES)


class ImageProcessor(QwenVLImageProcessor):
    """Reads each image once, and hands prompts over with the addresses of their images."""

    models = tuple(model for model in QwenVLImageProcessor.models if model.__name__ in ARCHITECTURES)

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, server_args, _processor, *args, **kwargs)
        self._images = KeptImages(self._cut)
        # The network casts patches to its own type, so a narrower one would change them; for "auto" it is not known.
        self._type = getattr(torch, server_args.dtype, torch.float32)

    def _cut(self, png: bytes) -> tuple[torch.Tensor, Grid]:
        """Return the patches of an image, as SGLang's own way gives them, and their grid."""
        with Image.open(io.BytesIO(png)) as file:
            image = file.convert("RGB")
        cut = self.process_mm_data(self.mm_tokens.image_token, images=[image])
        (grid,) = cut["image_grid_thw"].tolist()
        return cut["pixel_values"].to("cpu", self._type), tuple(grid)

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
        return prepared_prompt(prompt, addresses, hashes, token_ids)
