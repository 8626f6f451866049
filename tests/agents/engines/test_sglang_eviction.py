"""Claims about the room that SGLang's prefix cache makes: for many steps at once."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from agents.engines.sglang.in_server.scheduler import eviction


@dataclass
class EvictParams:
    num_tokens: int = 0
    mamba_num: int = 0


@pytest.mark.parametrize(("asked", "evicted"), [(1, 100), (128, 128), (0, 0)])
def test_a_full_cache_drops_a_part_of_itself_at_least(asked: int, evicted: int) -> None:
    class RadixCache:
        token_to_kv_pool_allocator = SimpleNamespace(size=100 * eviction.PART)

        def evict(self, params: EvictParams) -> EvictParams:
            return params

    eviction.install(SimpleNamespace(RadixCache=RadixCache))
    params = EvictParams(asked, mamba_num=3)
    assert RadixCache().evict(params) == EvictParams(evicted, mamba_num=3)
    assert params.num_tokens == asked
