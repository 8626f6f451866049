"""Lends the learner's weights to other processes of one host over CUDA IPC: handles travel, tensors do not."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
import torch.multiprocessing  # registers tensors with ForkingPickler
from torch import Tensor
from torch.multiprocessing import reductions

from trainer.learner.buckets import buckets
from trainer.learner.protocol import WeightSource

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
def lend_weights(learner: WeightSource) -> Iterator[Loan]:
    """Lend the weights of a learner of this process.

    The weights, in the learner's `dtype`, stay in memory until the context is left: leave it when every receiver has
    copied them. Each string may go to any number of receivers. A receiver opens one handle for each underlying tensor,
    so a few large tensors are faster than hundreds of small ones.
    """
    lent = list(buckets(learner.stream(), BUCKET_VALUES))
    yield Loan(tuple(handles(bucket.named) for bucket in lent), sum(bucket.flat.nbytes for bucket in lent))
    del lent
    if learner.device.type == "cuda":  # frees the memory that receivers have released
        torch.cuda.ipc_collect()


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
