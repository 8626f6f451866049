"""Checks image preprocessing: the checkpoint's settings, and the patches that are cut from an image.

Settings must fit the network and its family. Patches must equal those of Transformers and the image's own pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from agents.types import ProcessedImage
from envs.checks import Verdict, fault, ok

#: Patches may differ by this much, because float32 operations have another order.
MAX_GAP = 1e-4
#: The mean of a channel may differ by this much from the mean of the image's bytes.
MAX_MEAN_GAP = 1e-3


@dataclass(frozen=True)
class Colours:
    """Mean and standard deviation by channel, of pixels over 255, that a family of networks was trained with."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


_HALF = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
#: By `model_type`; from preprocessor_config.json of Qwen/Qwen3-VL-2B-Instruct, Qwen/Qwen3-VL-30B-A3B-Instruct, and
#: Qwen/Qwen2.5-VL-3B-Instruct, which has CLIP's values.
FAMILIES: Mapping[str, Colours] = {
    "qwen3_vl": _HALF,
    "qwen3_vl_moe": _HALF,
    "qwen2_5_vl": Colours((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


def read_settings(path: str | Path) -> Mapping[str, Any]:
    """Return the settings of a checkpoint's image processor."""
    from transformers import ImageProcessingMixin

    return ImageProcessingMixin.get_image_processor_dict(path)[0]


def check_settings(settings: Mapping[str, Any], vision: Any, model_type: str) -> Verdict:
    """Return whether preprocessor_config.json fits the network, and has the values of its family."""
    sizes = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    wrong = [
        f"{name} {settings[name]}, its network has {wanted}"
        for name, wanted in sizes.items()
        if settings.get(name, wanted) != wanted
    ]
    family = FAMILIES[model_type]
    fix = "take preprocessor_config.json from the model's own repository"
    for name, wanted in (("image_mean", family.mean), ("image_std", family.std)):
        given = settings.get(name)
        if given is None or not np.allclose(given, wanted, atol=1e-4):
            wrong.append(f"{name} {_rounded(given)}, {model_type} was trained with {_rounded(wanted)}")
    wrong += [f"{name} false" for name in ("do_rescale", "do_normalize") if not settings.get(name, True)]
    if not np.isclose(settings.get("rescale_factor", 1 / 255), 1 / 255):
        wrong.append(f"rescale_factor {settings['rescale_factor']:g}, not 1/255")
    if wrong:
        return fault(f"preprocessor_config.json has {'; '.join(wrong)}", fix)
    return ok(f"settings are those of {model_type}")


def _rounded(values: Any) -> str:
    if values is None:
        return "none"
    return str([round(float(value), 3) for value in values])


def check_patches(
    ours: ProcessedImage, theirs_PD: NDArray[np.float32], grid: tuple[int, ...], settings: Mapping[str, Any]
) -> Verdict:
    """Return whether our patches of an image equal Transformers' patches and the image's normalised pixels."""
    if ours.grid_thw != grid:
        return fault(f"the image has the grid {ours.grid_thw} here and {grid} in Transformers", _OURS)
    gap = float(np.abs(ours.pixels_PD - theirs_PD).max())
    if not gap <= MAX_GAP:
        return fault(f"patches differ from those of Transformers by up to {gap:.3g}", _OURS)
    assert ours.resized is not None
    pixels_HWC = np.asarray(ours.resized, dtype=np.float64) / 255
    expected_C = (pixels_HWC.mean((0, 1)) - settings["image_mean"]) / settings["image_std"]
    means_C = ours.pixels_PD.astype(np.float64).reshape(len(ours.pixels_PD), 3, -1).mean((0, 2))
    if not np.allclose(means_C, expected_C, atol=MAX_MEAN_GAP):
        return fault(f"channels have the means {_rounded(means_C)}, the image's are {_rounded(expected_C)}", _OURS)
    return ok(f"{len(theirs_PD)} patches are those of Transformers")


_OURS = "look at agents/rendering/images.py and the installed transformers"


def transformers_patches(path: str | Path, image: Image.Image) -> tuple[NDArray[np.float32], tuple[int, ...]]:
    """Return the patches, and their grid, that Transformers' own Pillow processor makes of an image."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made = Qwen2VLImageProcessorPil.from_pretrained(path)(images=[image], return_tensors="np")
    return np.asarray(made["pixel_values"], dtype=np.float32), tuple(int(n) for n in made["image_grid_thw"][0])


def test_image(size: tuple[int, int] = (201, 153)) -> Image.Image:
    """Return an image of coloured noise whose sides are not multiples of a patch."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    pixels[:, : size[0] // 2, 0] //= 4  # so that channels differ, and halves differ
    return Image.fromarray(pixels)
