"""AdamW over Megatron-core's distributed optimizer: float32 weights and moments, sharded over data-parallel ranks."""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
from typing import Any

import torch

from trainer.config.learner import OptimConfig


class MegatronOptimizer:
    """The optimizer of a `MegatronNetwork`.

    Example::

        optimizer = MegatronOptimizer(network.chunks, OptimConfig(), torch.bfloat16)
        if optimizer.norm() < math.inf:     # of the gradient of the whole network, before clipping
            optimizer.step()
    """

    def __init__(self, chunks: list[Any], optim: OptimConfig, dtype: torch.dtype) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        # 0: never
        if math.isfinite(optim.max_grad_norm):
            clip = optim.max_grad_norm
        else:
            clip = 0.0
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=0.0,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=1e-8,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=clip,
        )
        # No overrides: Megatron's own take the weight decay from biases and norms, which the other backend decays.
        self.inner: Any = get_megatron_optimizer(config, chunks, config_overrides={})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, whose learning rate is set before each step."""
        return self.inner.param_groups

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.inner.zero_grad()

    def begin_moments(self) -> None:
        """Make the moments that the first step would make, each 0: a checkpoint holds them, also before that step."""
        # A rank that has no parameters of a kind has a stub for them.
        for part in self.inner.chained_optimizers:
            if not part.is_stub_optimizer:
                part.init_state_fn(part.optimizer, part.config)

    def norm(self) -> float:
        """Return the norm of the gradient."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm() or 0.0)

    def step(self) -> None:
        """Clip the gradient, whose `norm` is finite, and step."""
        self.inner.step()
