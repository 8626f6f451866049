"""The experts of one session's stream, as servers report them: which to ask for, and whether answers agree.

Legend: R tokens, L layers, K experts of a token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agents.engines.pending_turn import PendingTurn
from agents.engines.sglang.payloads import AskedRoutes, GenerateAnswer
from agents.engines.weight_servers import ServerLost
from agents.types import RouteShape

#: Tokens whose experts are asked for again with those of the next ones, to compare them.
OVERLAP = 4


class SessionRoutes:
    """Collects the experts of a stream, turn by turn; those that are known stay, whichever server reads on.

    Example, at the second request of a stream with 20 known tokens::

        asked = routes.asked(turn)                      # of the tokens from 16 on
        routes.take(turn, answer, asked, (server, salt, "3"))
        turn.num_routed                                 # 20 and those that the answer adds
    """

    def __init__(self, shape: RouteShape | None) -> None:
        self._shape = shape
        self._last_RLK: NDArray[np.uint8 | np.uint16] | None = None
        self._num_routed = 0
        self._origin: object = None

    def asked(self, turn: PendingTurn) -> AskedRoutes | None:
        """Return which experts the next request of a turn asks for, if any."""
        if self._shape is None or turn.request.num_routed is None:
            return None
        return AskedRoutes(max(0, turn.num_routed - OVERLAP), self._shape)

    def take(self, turn: PendingTurn, answer: GenerateAnswer, asked: AskedRoutes | None, origin: object) -> None:
        """Append the experts of an answer to its turn. `origin` names the server, its weights and its cache.

        Raises:
            ServerLost: tokens that the server has cached have other experts than it said when it read them.
        """
        routes_RLK = answer.routes_RLK
        if asked is None or routes_RLK is None:
            return
        num_known = turn.num_routed - asked.first
        # Only what is cached was not routed anew. A call that was cancelled may have left the stream elsewhere.
        is_same = origin == self._origin and self._num_routed == turn.num_routed <= answer.num_cached
        if is_same and self._last_RLK is not None and _differ(self._last_RLK, routes_RLK[:num_known]):
            raise ServerLost(f"tokens {asked.first} to {turn.num_routed} have other experts than in the turn before")
        turn.routes.append(routes_RLK[num_known:])
        # A copy, because a view would keep the experts of the whole turn.
        self._last_RLK = routes_RLK[-OVERLAP:].copy()
        self._num_routed = turn.num_routed
        self._origin = origin


def _differ(one_RLK: NDArray[np.uint8 | np.uint16], other_RLK: NDArray[np.uint8 | np.uint16]) -> bool:
    """Return whether most sets of experts differ.

    A few may: of two episodes with equal turns a server keeps what one of them has read, and in another batch a tenth
    of the sets are others.
    """
    differ_RL = (np.sort(one_RLK) != np.sort(other_RLK)).any(-1)
    # A layer without experts has zeros in both.
    has_experts_RL = one_RLK.any(-1) | other_RLK.any(-1)
    return bool(2 * differ_RL.sum() > has_experts_RL.sum())
