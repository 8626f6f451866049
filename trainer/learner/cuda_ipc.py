"""Lends the learner's weights to other processes of one host over CUDA IPC: handles travel, tensors do not."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
import torch.multiprocessing  # registers tensors with ForkingPickler
from torch import Tensor
from torch.multiprocessing import reductions

from trainer.learner.fsdp_learner import FSDPLearner

#: Values of one message: 2 GiB in bfloat16.
BUCKET_VALUES = 2**30
#: Index of the device among the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.
DEVICE_PLACE = 6


@dataclass(frozen=True)
class Loan:
    """Weights of `num_bytes` that other processes may copy: strings that servers can turn into tensors."""

    payloads: tuple[str, ...] = ()
    num_bytes: int = 0


@contextmanager
def lend_weights(learner: FSDPLearner) -> Iterator[Loan]:
    """Lend the weights of a learner of this process.

    The weights, in the learner's `dtype`, stay in memory until the context is left: leave it when every receiver has
    copied them. Each string may go to any number of receivers.
    """
    buckets = list(flat_buckets(learner.weights(learner.dtype), learner.dtype, BUCKET_VALUES, learner.device))
    num_bytes = sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)
    yield Loan(tuple(handles(bucket) for bucket in buckets), num_bytes)
    del buckets
    if learner.device.type == "cuda":  # frees the memory that receivers have released
        torch.cuda.ipc_collect()


def flat_buckets(
    weights: Mapping[str, Tensor], dtype: torch.dtype, max_values: int, device: torch.device
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights, under their names in a checkpoint, as views of a few large tensors.

    A receiver opens one handle for each underlying tensor, so a few large tensors are faster than hundreds of small
    ones.
    """
    waiting: list[tuple[str, Tensor]] = []
    for name, weight in weights.items():
        if waiting and sum(w.numel() for _, w in waiting) + weight.numel() > max_values:
            yield _flat(waiting, dtype, device)
            waiting = []
        waiting.append((name.removeprefix("backbone."), weight))
    yield _flat(waiting, dtype, device)


def _flat(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> list[tuple[str, Tensor]]:
    flat = torch.cat([weight.to(device, dtype).flatten() for _, weight in named])
    pieces = flat.split([weight.numel() for _, weight in named])
    return [(name, piece.view(weight.shape)) for (name, weight), piece in zip(named, pieces, strict=True)]


def handles(named: Sequence[tuple[str, Tensor]]) -> str:
    """Return the pickled handles of tensors; the tensors must stay in memory until the receiver has copied them."""
    if named[0][1].is_cuda:
        torch.cuda.synchronize()
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = _reduce_by_uuid  # type: ignore[attr-defined]
    pickler.dump(list(named))
    return base64.b64encode(buffer.getvalue()).decode()


def _reduce_by_uuid(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor as torch does, but name its GPU by UUID: processes that see other GPUs number them differently.

    The receiver must expect a UUID; SGLang does (`sglang.srt.utils.patch_torch`).
    """
    rebuild, args = cast(tuple[Any, tuple[Any, ...]], reductions.reduce_tensor(tensor))
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(args[DEVICE_PLACE]).uuid)
        args = (*args[:DEVICE_PLACE], uuid, *args[DEVICE_PLACE + 1 :])
    return rebuild, args
