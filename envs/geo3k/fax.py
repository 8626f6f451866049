"""Makes a picture look as if it came by fax: coarse and with speckles, so that some digits can be read in two ways."""

from __future__ import annotations

from random import Random

import numpy as np
from PIL import Image

#: How many pixels of the picture become one, least and most.
COARSENESS = 1.4, 3.2
#: Standard deviation of the brightness of a coarse pixel, of 255.
SPECKLES = 20.0


def fax(image: Image.Image, rng: Random) -> Image.Image:
    """Return the picture in the same size, as coarse as `rng` says."""
    coarseness = rng.uniform(*COARSENESS)
    width, height = (round(side / coarseness) for side in image.size)
    coarse = np.asarray(image.convert("L").resize((width, height), Image.Resampling.BOX), dtype=np.float64)
    speckled = coarse + np.random.default_rng(rng.getrandbits(64)).normal(0.0, SPECKLES, coarse.shape)
    arrived = Image.fromarray(speckled.clip(0, 255).astype(np.uint8))
    return arrived.resize(image.size, Image.Resampling.BICUBIC).convert("RGB")
