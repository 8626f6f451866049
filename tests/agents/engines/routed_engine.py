"""An engine of one's own for a mixture: the plain engine, which also says which experts each token took."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from agents.engines.base import Capabilities, EngineSetup
from agents.types import Completion, GenerateRequest
from tests.agents.engines.plain_engine import PlainEngine


class RoutedEngine(PlainEngine):
    """Reads each finished turn once more, and keeps what the routers of the network chose."""

    capabilities = Capabilities(gives_routes=True)

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        if request.num_routed is None:
            return completion
        async with self.lock:
            rows = await asyncio.to_thread(self.experts, request, completion)
        return replace(completion, routes_RLK=rows[request.num_routed :])

    def experts(self, request: GenerateRequest, completion: Completion) -> NDArray[np.uint8]:
        found: list[torch.Tensor] = []
        routers = [module for module in self.network.modules() if type(module).__name__.endswith("TopKRouter")]
        hooks = [router.register_forward_hook(lambda *call: found.append(call[2][2])) for router in routers]
        self.logits((*request.ids, *completion.ids[:-1]), request.images)
        for hook in hooks:
            hook.remove()
        return torch.stack(found, 1).cpu().numpy().astype(np.uint8)


def make_engine(setup: EngineSetup) -> RoutedEngine:
    return RoutedEngine(setup)
