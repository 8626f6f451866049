"""Claims about what a server of one rank gathers from all its ranks: its own numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agents.engines.sglang.in_server.scheduler import one_rank


@pytest.mark.parametrize(("ranks", "gathered"), [((1, 1), [[1, 0, 7]]), ((1, 2), [[-1, -1, -1]]), ((2, 1), [[-1] * 3])])
def test_one_rank_asks_nobody_and_several_ask_each_other(ranks: tuple[int, int], gathered: list[list[int]]) -> None:
    class PrefillDelayer:
        _global_info_buffer = torch.full((*ranks, 3), -1)

        def _gather_info(self, prefillable: bool, is_forced: bool, running: int = 0) -> Tensor:
            return self._global_info_buffer[:1, 0]

    one_rank.install(SimpleNamespace(PrefillDelayer=PrefillDelayer))
    delayer: Any = PrefillDelayer()
    numbers = delayer._gather_info(prefillable=True, running=7, is_forced=False)
    assert numbers.dtype == torch.int64 and numbers.tolist() == gathered
    assert delayer._gather_info(prefillable=True, is_forced=False).shape == (1, 3)
