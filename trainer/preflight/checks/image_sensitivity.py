"""Checks that a network sees: a changed image must move the log-probs of the text after it.

The original stream is scored twice, which gives the noise. A network that moves no more than the noise is blind.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.preflight.finding import Verdict, fault, ok, warning
from trainer.preflight.probe_streams import ImageVariants, Score

#: A changed image must move the text by more than this many nats, and more than this many times the noise.
LEAST_MOVE = 1e-6
NOISE_TIMES = 5.0
#: An image that moves the text by less than this, in nats, hardly matters to the network.
WEAK_MOVE = 1e-3


async def score_variants(score: Score, variants: ImageVariants) -> tuple[NDArray[np.float32], ...]:
    """Return the log-probs of the text after the image: original, original again, changed image, no image."""
    v = variants
    original, again = [await score(v.original.ids, v.original.images) for _ in range(2)]
    changed = await score(v.changed.ids, v.changed.images)
    removed = await score(v.removed.ids, ())
    return original[v.after_N], again[v.after_N], changed[v.after_N], removed[v.after_removed_N]


def check_image_sensitivity(
    original_N: NDArray[np.float32],
    again_N: NDArray[np.float32],
    changed_N: NDArray[np.float32],
    removed_N: NDArray[np.float32],
) -> Verdict:
    """Return whether images change the log-probs of the text after them.

    >>> import numpy as np
    >>> original = np.array([-1.0, -2.0])
    >>> check_image_sensitivity(original, original, original, original - 0.5).status
    'fault'
    """
    noise, moved, gone = (float(np.abs(original_N - x).mean()) for x in (again_N, changed_N, removed_N))
    if not np.isfinite([noise, moved, gone]).all():
        return fault("log-probs after an image are not finite", "look at weights and image preprocessing")
    found = f"another image moves the text after it by {moved:.2g} nats, none by {gone:.2g}; noise {noise:.1g}"
    if moved <= max(LEAST_MOVE, NOISE_TIMES * noise):
        return fault(f"blind: {found}", "images do not reach the network: look at the engine's version and arguments")
    if moved < WEAK_MOVE:
        return warning(found, "images hardly matter to this network: is its vision tower trained?")
    return ok(found)
