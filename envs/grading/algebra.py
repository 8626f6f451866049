r"""Compares two normalised texts by computer algebra, with math-verify in worker processes.

sympy may compute for hours or use all memory (``9^{9^{9}}``), and math-verify's own time limits are signals, which work
in a main thread only.
"""

from __future__ import annotations

import os
import weakref
from functools import lru_cache

from envs.errors import UserError
from envs.grading.algebra_worker import compare, prepare
from envs.workers.worker import AnyWorker, WorkerDied, WorkerError, WorkerPool, WorkerTimeout

#: Processor time of one comparison. With wall time the verdict would depend on the load of the machine.
ALGEBRA_LIMIT_S = 2.0
#: Wall time of one comparison, in case a worker waits instead of computing.
ALGEBRA_WALL_LIMIT_S = 20.0
ALGEBRA_MEMORY_BYTES = 2 * 2**30
#: Wall time to start a worker, which imports sympy: 0.6 s on an idle machine.
START_LIMIT_S = 120.0

_POOL = WorkerPool(max(2, os.cpu_count() or 2))
_STARTED: weakref.WeakSet[AnyWorker] = weakref.WeakSet()


@lru_cache(maxsize=16_384)
def equal_by_algebra(answer: str, label: str) -> bool:
    """Return whether math-verify finds two normalised texts equal; False if it fails, hangs or dies.

    Any thread may call this. The first call starts a process; at most one per processor core runs at a time.

    Raises:
        UserError: math-verify does not run on this machine.
    """
    # Twice: a worker may have died of something else, such as too little memory.
    for _ in range(2):
        with _POOL.worker() as worker:
            try:
                if worker not in _STARTED:
                    _start(worker)
                return worker.call(compare, answer, label, ALGEBRA_LIMIT_S, timeout_s=ALGEBRA_WALL_LIMIT_S)
            except (WorkerError, WorkerTimeout):
                return False
            except WorkerDied as death:
                if "SIGPROF" in str(death):  # its time limit; another death may have a cause outside this pair
                    return False
    return False


def _start(worker: AnyWorker) -> None:
    """Let a new worker import math-verify, outside the time limit of a comparison."""
    try:
        works = worker.call(prepare, ALGEBRA_MEMORY_BYTES, timeout_s=START_LIMIT_S)
        cause = "a wrong verdict"
    except (WorkerError, WorkerDied, WorkerTimeout) as error:
        works = False
        cause = str(error).strip().rpartition("\n")[2]
    if not works:
        worker.kill()
        fix = "install math-verify[antlr4-13-2], and leave 500 MB of memory for it"
        raise UserError("math-verify", "must run in its own process to grade answers", cause, fix)
    _STARTED.add(worker)
