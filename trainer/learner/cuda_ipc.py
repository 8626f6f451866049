"""Lends the learner's weights to other processes of one host over CUDA IPC: handles travel, tensors do not."""

from __future__ import annotations

import base64
import io
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import torch
import torch.multiprocessing  # registers tensors with ForkingPickler
from torch import Tensor
from torch.multiprocessing import reductions

from trainer.learner.buckets import buckets
from trainer.learner.protocol import WeightSource

logger = logging.getLogger(__name__)

#: Values of one message: 2 GiB in bfloat16.
BUCKET_VALUES = 2**30
#: Indices among the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`: of the device, and of the
#: shared memory of the counter and its number there.
DEVICE_PLACE = 6
COUNTER_PLACES = slice(11, 13)
#: Where Linux has shared memory, and the words of 8 bytes before what torch keeps in it.
SHARED_MEMORY = Path("/dev/shm")
HEADER_WORDS = 8


@dataclass(frozen=True)
class WeightHandles:
    """Weights of `num_bytes` that other processes may copy: strings that servers can turn into tensors."""

    payloads: tuple[str, ...] = ()
    num_bytes: int = 0


class Counters:
    """Torch's counters of what was shared: each begins at 1, and a receiver that lets go takes 1 away.

    Torch frees what has 0. They are unsigned: a second receiver, or one that dies, leaves another number for good, and
    with it the memory. So whoever knows that nobody needs it any more sets them to 0.

    Example::

        counters = Counters()
        counters.add(b"/torch_4242_17_0", 3)       # as torch names the third counter of a process
        counters.clear()
    """

    def __init__(self) -> None:
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, name: bytes, number: int) -> None:
        """Note a counter: the name of its shared memory, and its number there."""
        self._numbers[name.decode().lstrip("/")].append(number)

    def are_new(self) -> bool:
        """Return whether all are found, and 1. If not, this torch keeps them in another way."""
        found = list(self._words())
        each = (bool((at < len(words)).all()) and bool((words[at] == 1).all()) for words, at in found)
        return len(found) == len(self._numbers) and all(each)

    def clear(self) -> None:
        """Set all to 0."""
        for words, at in self._words():
            words[at] = 0

    def _words(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, numbers in self._numbers.items():
            file = SHARED_MEMORY / name
            if file.exists():
                words = torch.from_file(str(file), shared=True, size=file.stat().st_size // 8, dtype=torch.int64)
                yield words, torch.tensor(numbers) + HEADER_WORDS


@contextmanager
def share_weights(learner: WeightSource) -> Iterator[WeightHandles]:
    """Share the weights of a learner of this process.

    The weights, in the learner's `dtype`, stay in memory until the context is left: leave it when every receiver has
    copied them, or is lost. Each string may go to any number of receivers. A receiver opens one handle for each
    underlying tensor, so a few large tensors are faster than hundreds of small ones.
    """
    shared = list(buckets(learner.stream(), BUCKET_VALUES))
    counters = Counters()
    try:
        payloads = tuple(handles(bucket.named, counters) for bucket in shared)
        if not counters.are_new():
            logger.warning("torch %s counts what is shared in another way: a push may keep memory", torch.__version__)
            counters = Counters()
        yield WeightHandles(payloads, sum(bucket.flat.nbytes for bucket in shared))
    finally:
        del shared
        counters.clear()
        if learner.device.type == "cuda":
            torch.cuda.ipc_collect()


def handles(named: Sequence[tuple[str, Tensor]], counters: Counters) -> str:
    """Return the pickled handles of tensors, which must stay in memory until the receiver has copied them.

    Notes their counters.
    """
    if named[0][1].is_cuda:
        # A receiver must not copy before this process has finished writing.
        torch.cuda.synchronize()
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = partial(_reduce_by_uuid, counters)  # type: ignore[attr-defined]
    pickler.dump(list(named))
    return base64.b64encode(buffer.getvalue()).decode()


def _reduce_by_uuid(counters: Counters, tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor as torch does, but name its GPU by UUID: processes that see other GPUs number them differently.

    The receiver must expect a UUID; SGLang does (`sglang.srt.utils.patch_torch`).
    """
    rebuild, args = cast(tuple[Any, tuple[Any, ...]], reductions.reduce_tensor(tensor))
    if tensor.is_cuda:
        counters.add(*cast(tuple[bytes, int], args[COUNTER_PLACES]))
        uuid = str(torch.cuda.get_device_properties(args[DEVICE_PLACE]).uuid)
        args = (*args[:DEVICE_PLACE], uuid, *args[DEVICE_PLACE + 1 :])
    return rebuild, args
