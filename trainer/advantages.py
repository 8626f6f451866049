"""Group-relative advantages: the rewards of one problem's samples in, one advantage per sample out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def group_advantages(rewards_G: Sequence[float], scale_by_std: bool = True, eps: float = 1e-6) -> NDArray[np.float64]:
    """Return A_i = (r_i - mean r) / (std r + eps), the std being the sample one; without the std if not `scale_by_std`.

    GRPO, arXiv 2402.03300, section 4.1.2; without std: Dr. GRPO, arXiv 2503.20783. Equal rewards give exactly 0, which
    the formula alone does not: eight times 0.9 has a mean that is not 0.9 in float32.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], scale_by_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + eps) if scale_by_std else centred
