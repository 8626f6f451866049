r"""Equality by computer algebra: two normalised texts come in, math-verify's verdict goes out.

It runs in worker processes, for sympy may compute for hours or take all memory (``9^{9^{9}}``), and the time limits of
math-verify itself are signals, which only a main thread may use.
"""

from __future__ import annotations

import os
import weakref
from functools import lru_cache

from envs.errors import UserError
from envs.grading.algebra_worker import compare, prepare
from envs.isolation.worker import Worker, WorkerDied, WorkerError, WorkerPool, WorkerTimeout

#: Processor time of one comparison. Wall time would make a verdict depend on what else the machine does.
ALGEBRA_LIMIT_S = 2.0
#: Wall time of one comparison, for the case that a worker waits instead of computing.
ALGEBRA_WALL_LIMIT_S = 20.0
ALGEBRA_MEMORY_BYTES = 2 * 2**30
#: Wall time to start a worker, which imports sympy: 0.6 s on an idle machine.
START_LIMIT_S = 120.0

_POOL = WorkerPool(max(2, os.cpu_count() or 2))
_STARTED: weakref.WeakSet[Worker] = weakref.WeakSet()


@lru_cache(maxsize=16_384)
def equal_by_algebra(answer: str, label: str) -> bool:
    """Tell whether math-verify shows two normalised texts to be equal; False where it fails, hangs or dies.

    May be called from any thread. The first call starts a process; at most one per processor core runs at a time.

    Raises:
        UserError: math-verify does not run here at all.
    """
    for _ in range(2):
        with _POOL.worker() as worker:
            try:
                if worker not in _STARTED:
                    _start(worker)
                return worker.call(compare, answer, label, ALGEBRA_LIMIT_S, timeout_s=ALGEBRA_WALL_LIMIT_S)
            except (WorkerError, WorkerTimeout):
                return False
            except WorkerDied as death:
                if "SIGPROF" in str(death):  # its time limit; any other death may have nothing to do with this pair
                    return False
    return False


def _start(worker: Worker) -> None:
    """Let a new worker import math-verify, outside of any comparison's time limit."""
    try:
        works = worker.call(prepare, ALGEBRA_MEMORY_BYTES, timeout_s=START_LIMIT_S)
        cause = "a wrong verdict"
    except (WorkerError, WorkerDied, WorkerTimeout) as error:
        works, cause = False, str(error).strip().rpartition("\n")[2]
    if not works:
        worker.kill()
        fix = "install math-verify[antlr4-13-2], and leave 500 MB of memory for it"
        raise UserError("math-verify", "must run in a process of its own to grade answers", cause, fix)
    _STARTED.add(worker)
