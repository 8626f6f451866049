"""Keeps the optimizer's state in host memory between steps: Adam's two moments take twice the float32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class OffloadedState:
    """Moves an optimizer's moments between the device and host memory, which is pinned if the device is a GPU.

    The tensors stay the same objects, sharded ones too; only their storage is freed and allocated again. While the
    state is on the host, nothing may read it: this includes `optimizer.state_dict()` for a checkpoint.

    Example::

        offloaded = OffloadedState(optimizer)
        with offloaded.on_device():
            optimizer.step()
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        #: The host memory of each tensor, kept from step to step: pinning costs more than copying.
        self._host: dict[Tensor, Tensor] = {}
        #: What is on the host now: the tensor on the device, its copy on the host, and its size in bytes.
        self._offloaded: list[tuple[Tensor, Tensor, int]] = []

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold the state on its device within the context, and on the host afterwards."""
        self.to_device()
        try:
            yield
        finally:
            self.to_host()

    def to_host(self) -> None:
        """Copy all tensors of the state but `step` to the host, and free their memory on the device."""
        assert not self._offloaded, "the state is on the host already"
        for state in self._optimizer.state.values():
            for name, value in state.items():
                # A single number is not worth a copy.
                if name == "step" or not isinstance(value, Tensor):
                    continue
                if isinstance(value, DTensor):
                    local = value.to_local()
                else:
                    local = value
                if value not in self._host:
                    self._host[value] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
                self._host[value].copy_(local, non_blocking=True)
                self._offloaded.append((local, self._host[value], local.untyped_storage().nbytes()))
        if any(local.is_cuda for local, _, _ in self._offloaded):
            torch.cuda.synchronize()
        for local, _, _ in self._offloaded:
            local.untyped_storage().resize_(0)

    def to_device(self) -> None:
        """Copy the state back to its device; if it is there already, do nothing."""
        for local, host, size in self._offloaded:
            local.untyped_storage().resize_(size)
            local.copy_(host, non_blocking=True)
        self._offloaded = []
