"""Has a server read a prompt twice at most, where the samples of a group arrive together.

A server shares what earlier requests have read, but those that it reads at once read all for themselves, images too.
So while the first request with a prompt is under way, the second asks for one token, and others wait until that is
there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agents.engines.sglang.routing import MAX_PROMPTS

#: Tokens of a prompt that are worth another request.
MIN_TOKENS = 128


@dataclass(eq=False)
class _Prompt:
    num_asked: int = 0
    is_read: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Asked:
    """A request with a prompt: whether others wait for its first token, and whether the server has read it."""

    for_others: bool = False
    has_read: bool = False


class PromptReads:
    """Which prompts servers have read, and which they are reading.

    Example: of eight samples that ask at once, the first asks for its whole turn, the second for one token, and six
    wait. Once either has an answer, the six ask, and the second asks for the rest.
    """

    def __init__(self) -> None:
        self._prompts: OrderedDict[Hashable, _Prompt] = OrderedDict()

    async def wait(self, prompt: Hashable) -> bool:
        """Wait while another request reads the prompt for others; return whether one did."""
        known = self._prompts.get(prompt)
        if known is None or known.is_read or known.num_asked < 2:
            return False
        await known.changed.wait()
        return True

    @contextmanager
    def asking(self, prompt: Hashable, num_tokens: int) -> Iterator[Asked]:
        """Note that a request with a prompt of so many tokens is under way; set `has_read` before the end."""
        if num_tokens < MIN_TOKENS:
            yield Asked()
            return
        known = self._prompts.setdefault(prompt, _Prompt())
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        known.num_asked += 1
        asked = Asked(for_others=known.num_asked == 2 and not known.is_read)
        try:
            yield asked
        finally:
            known.is_read |= asked.has_read
            if not known.is_read and self._prompts.get(prompt) is known:
                del self._prompts[prompt]
            known.changed.set()
