"""The optimizer's state on the CPU while it is not used: Adam's two moments are twice the size of float32 weights.

In: an optimizer between two steps. Out: the same optimizer, its moments' device memory free until the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class OffloadedState:
    """Moves an optimizer's moments between their device and host memory, pinned where the device is a GPU.

    The tensors stay the same objects, sharded ones too: only what they store comes and goes. So while they are away,
    nothing may read them, `optimizer.state_dict()` of a checkpoint included.

    Example::

        offloaded = OffloadedState(optimizer)
        with offloaded.on_device():
            optimizer.step()
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        #: Host memory of each tensor, kept from step to step: pinning costs more than copying.
        self._host: dict[Tensor, Tensor] = {}
        self._away: list[tuple[Tensor, Tensor, int]] = []

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold the state on its device within, and on the host afterwards."""
        self.to_device()
        try:
            yield
        finally:
            self.to_host()

    def to_host(self) -> None:
        """Copy all tensors of the state but `step` to the host and free their memory on the device."""
        assert not self._away, "the state is on the host already"
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if name == "step" or not isinstance(value, Tensor):
                    continue
                local = value.to_local() if isinstance(value, DTensor) else value
                if value not in self._host:
                    self._host[value] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
                self._host[value].copy_(local, non_blocking=True)
                self._away.append((local, self._host[value], local.untyped_storage().nbytes()))
        if any(local.is_cuda for local, _, _ in self._away):
            torch.cuda.synchronize()
        for local, _, _ in self._away:
            local.untyped_storage().resize_(0)

    def to_device(self) -> None:
        """Copy the state back; nothing happens where it is on its device."""
        for local, host, size in self._away:
            local.untyped_storage().resize_(size)
            local.copy_(host, non_blocking=True)
        self._away = []
