"""The public command with `--backend megatron` on CPUs: `python -m tests.megatron_run --num-learners 2 --pp 2 ...`.

In this process and in the learner ranks that Ray starts, `tests.megatron_cpu` answers for CUDA. All else of the run is
as on GPUs: the ranks, the step, checkpoints, the weights that the engine gets.
"""

from __future__ import annotations

import functools
import sys

import ray

import trainer.setup.backend
from envs.config.cli import exit_code
from tests.megatron_cpu import on_cpu, without_kernels
from trainer.run import run


def begin() -> None:
    """Let a process of the run build Megatron's network on its CPU."""
    on_cpu()
    from trainer.learner.megatron.learner import MegatronLearner

    built = functools.partialmethod(MegatronLearner.__init__, changed=without_kernels)
    MegatronLearner.__init__ = built  # type: ignore[method-assign,assignment]


def main() -> int:
    """Run the command; return its exit code."""
    trainer.setup.backend._check_host = lambda *_: None
    hook = {"worker_process_setup_hook": "tests.megatron_run.begin"}
    ray.init("local", runtime_env=hook, include_dashboard=False, logging_level="error", log_to_driver=False)
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(exit_code(main))
