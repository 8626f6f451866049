"""Checkpoints of Megatron-core's `dist_checkpointing` (`torch_dist`): read again under any layout.

They hold network, optimizer and the steps done. There is no state of random generators: nothing in the step draws.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from envs.errors import UserError
from trainer.learner.dcp_state import reason
from trainer.learner.megatron.network import MegatronNetwork
from trainer.learner.megatron.optimizer import MegatronOptimizer
from trainer.learner.protocol import CheckpointFailed

#: Optimizer states by parameter, not by buffer: a folder can be read under another tensor or pipeline parallel layout.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gathered on the CPU of one data-parallel rank: over NCCL, every GPU would hold all of it for a moment.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
_STEPS = "steps_done"
#: Megatron's own file in a folder; the other backend's folders lack it.
_MARK = "metadata.json"


class MegatronState:
    """Writes checkpoints in the background, one at a time, and reads them.

    Example::

        state = MegatronState(network, optimizer)
        state.begin(folder, steps_done=10)      # every rank
        state.is_written(wait=True)             # True
        state.restore(folder)                   # 10
    """

    def __init__(self, network: MegatronNetwork, optimizer: MegatronOptimizer) -> None:
        self._network = network
        self._optimizer = optimizer
        self._queue: Any = None
        self._is_pending = False

    def _state(self, is_loading: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = {**_METADATA}  # Megatron adds the process group of the layout to it
        state = {"model": self._network.bare.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self._optimizer.inner.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state

    def begin(self, folder: Path, steps_done: int) -> None:
        """Copy the state to host memory and start writing it."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        assert not self._is_pending, "one state is written at a time"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        # No rank may write into a folder that is not there yet.
        dist.barrier()
        self._queue = self._queue or AsyncCallsQueue()
        self._optimizer.begin_moments()
        request = dist_checkpointing.save(
            self._state(is_loading=False) | {_STEPS: steps_done},
            str(folder),
            async_sharded_save=True,
            async_strategy="mcore",
        )
        self._queue.schedule_async_request(request)
        self._is_pending = True

    def is_written(self, wait: bool) -> bool:
        """Return whether all ranks have written; every rank must call it.

        Raises:
            CheckpointFailed: a rank could not write; the message says why.
        """
        if not self._is_pending:
            return True
        try:
            self._queue.maybe_finalize_async_calls(blocking=wait)
            self._is_pending = self._queue.get_num_unfinalized_calls() > 0
        except (CheckpointException, OSError, RuntimeError) as error:
            self._is_pending = False
            raise CheckpointFailed(reason(error)) from error
        return not self._is_pending

    def restore(self, folder: Path, with_optimizer: bool = True) -> int:
        """Fill network and optimizer from a folder that any layout wrote; return the steps done.

        Betas and weight decay stay those of this optimizer.

        Raises:
            UserError: the folder holds another network, or another backend wrote it.
        """
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException

        if not (folder / _MARK).exists():
            fix = "resume with the --backend that wrote it, or export its weights and start from them with --model"
            raise UserError("--resume", "must hold what --backend megatron wrote", folder, fix)
        wanted = self._state(is_loading=True) | {_STEPS: 0}
        if not with_optimizer:
            del wanted["optimizer"]
        try:
            state = dist_checkpointing.load(wanted, str(folder))
        except (CheckpointingException, KeyError) as error:
            rule = "must hold the network that this run trains"
            fix = "leave --model, --freeze-vision and --lora-*"
            raise UserError("--resume", rule, str(error).splitlines()[0], f"{fix} as they were") from error
        self._network.bare.load_state_dict(state["model"])
        if with_optimizer:
            kept = [(group["betas"], group["weight_decay"]) for group in self._optimizer.param_groups]
            self._optimizer.inner.load_state_dict(state["optimizer"])
            for group, (betas, decay) in zip(self._optimizer.param_groups, kept, strict=True):
                group["betas"], group["weight_decay"] = betas, decay
        return int(torch.as_tensor(state[_STEPS]))
