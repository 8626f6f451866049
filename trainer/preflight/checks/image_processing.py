"""Checks image preprocessing: settings must be those of the network's family, and patches the image's own pixels.

`ImageStore` uses the image processor of Transformers, and has refused one that cuts other patches than the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agents.types import ProcessedImage
from envs.checks import Verdict, fault, ok

#: The mean of a channel of patches may differ by this much from that of the image's bytes, which rounds otherwise.
MAX_MEAN_GAP = 1e-3
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
#: Mean and standard deviation by channel, of pixels over 255, that a family of networks was trained with. By
#: `model_type`, from preprocessor_config.json of Qwen/Qwen3-VL-2B-Instruct, Qwen/Qwen3-VL-30B-A3B-Instruct and
#: Qwen/Qwen2.5-VL-3B-Instruct, and from the defaults of GLM's image processor in Transformers.
FAMILIES: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "qwen3_vl": _HALF,
    "qwen3_vl_moe": _HALF,
    "qwen3_5": _HALF,
    "qwen3_5_moe": _HALF,
    "qwen2_5_vl": _CLIP,
    "glm4v": _CLIP,
}


def read_settings(path: str | Path) -> Mapping[str, Any]:
    """Return the settings of a checkpoint's image processor."""
    from transformers import ImageProcessingMixin

    return ImageProcessingMixin.get_image_processor_dict(path)[0]


def check_patches(image: ProcessedImage, settings: Mapping[str, Any], model_type: str) -> Verdict:
    """Return whether the settings are those of the network's family, and the patches the image's normalised pixels."""
    family = FAMILIES[model_type]
    wrong = [
        f"{name} {settings.get(name)}, {model_type} was trained with {list(wanted)}"
        for name, wanted in family.items()
        if not np.allclose(settings.get(name) or np.nan, wanted, atol=1e-4)
    ]
    if wrong:
        fix = "take preprocessor_config.json from the model's own repository"
        return fault(f"preprocessor_config.json has {'; '.join(wrong)}", fix)
    assert image.resized is not None
    pixels_HWC = np.asarray(image.resized, dtype=np.float64) / 255
    expected_C = (pixels_HWC.mean((0, 1)) - family["image_mean"]) / np.array(family["image_std"])
    # A patch holds its channels one after the other. A wrong rescale_factor or do_normalize shows in the means.
    means_C = image.pixels_PD.astype(np.float64).reshape(len(image.pixels_PD), 3, -1).mean((0, 2))
    if not np.allclose(means_C, expected_C, atol=MAX_MEAN_GAP):
        found = f"channels have the means {means_C.round(3).tolist()}, the image's are {expected_C.round(3).tolist()}"
        return fault(found, "look at do_rescale, rescale_factor and do_normalize of preprocessor_config.json")
    return ok(f"settings are those of {model_type}, {len(image.pixels_PD)} patches have the image's colours")


def noise_image() -> Image.Image:
    """Return an image of coloured noise whose sides are not multiples of a patch, and whose channels differ."""
    pixels = np.random.default_rng(0).integers(0, 256, (153, 201, 3), dtype=np.uint8)
    pixels[:, :100, 0] //= 4
    return Image.fromarray(pixels)
