"""Whether a network sees: another picture in place of the right one must move the log-probs of the text after it.

The same stream is scored twice first, which tells the noise: what is no more than that is blindness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.diagnosis.finding import Verdict, fault, ok, warning
from trainer.diagnosis.streams import Score, Views

#: Nats by which another picture must move the text, on average, beyond so many times the noise.
LEAST_MOVE, NOISE_TIMES = 1e-6, 5.0
#: Below this a picture says next to nothing.
WEAK_MOVE = 1e-3


async def look(score: Score, views: Views) -> tuple[NDArray[np.float32], ...]:
    """Return the log-probs of the text after the picture: right, right again, with another picture, with none."""
    right, again = [await score(views.right.ids, views.right.images) for _ in range(2)]
    other, none = await score(views.other.ids, views.other.images), await score(views.none.ids, ())
    return right[views.after_N], again[views.after_N], other[views.after_N], none[views.after_none_N]


def check_sight(
    right_N: NDArray[np.float32],
    again_N: NDArray[np.float32],
    other_N: NDArray[np.float32],
    none_N: NDArray[np.float32],
) -> Verdict:
    """Return whether pictures reach the text.

    >>> import numpy as np
    >>> right = np.array([-1.0, -2.0])
    >>> check_sight(right, right, right, right - 0.5).status
    'fault'
    """
    noise, moved, gone = (float(np.abs(right_N - x).mean()) for x in (again_N, other_N, none_N))
    if not np.isfinite([noise, moved, gone]).all():
        return fault("log-probs after a picture are not finite", "look at weights and image preprocessing")
    found = f"another picture moves the text after it by {moved:.2g} nats, none by {gone:.2g}; noise {noise:.1g}"
    if moved <= max(LEAST_MOVE, NOISE_TIMES * noise):
        return fault(f"blind: {found}", "pictures do not reach the network: look at the engine's version and arguments")
    if moved < WEAK_MOVE:
        return warning(found, "the pictures say next to nothing to this network: is its vision tower trained?")
    return ok(found)
