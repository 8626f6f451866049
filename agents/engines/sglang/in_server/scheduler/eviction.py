"""Has SGLang's prefix cache make room for many steps at once.

To free the tokens of one step, SGLang sorts all leaves of a full cache: a quarter of its scheduler's time was measured,
with thousands of streams of 200 tokens. What it drops is what was used least recently, here as there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

#: The part of the cache that is dropped at least: with 450,000 tokens, room for fifty steps of 128 streams.
PART = 64


def install(radix_cache: Any) -> None:
    """Change SGLang's module of that name."""
    theirs = radix_cache.RadixCache.evict

    @functools.wraps(theirs)
    def evict(self: Any, params: Any) -> Any:
        if params.num_tokens > 0:
            least = self.token_to_kv_pool_allocator.size // PART
            params = dataclasses.replace(params, num_tokens=max(params.num_tokens, least))
        return theirs(self, params)

    radix_cache.RadixCache.evict = evict
