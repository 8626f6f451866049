"""What makes a small network faster on a CPU, where its time goes into memory more than into products."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: Parameters of glibc's `mallopt`, see its manual page.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def prepare_for_cpu(model: nn.Module) -> None:
    """Let a network that runs on a CPU reuse memory, and normalise in float32 with fewer passes over it.

    Values change by rounding only; another call changes nothing.
    """
    keep_freed_memory()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module):
            module.forward = functools.partial(_norm, module, module.forward)


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed tensors of up to 32 MiB for the next ones; other C libraries stay as they are.

    By default it returns them to the kernel, which clears every page when it hands it out again: 8 % of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _norm(module: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or module.weight.dtype != torch.float32 or not torch.is_grad_enabled():
        return forward(x)
    return _RMSNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """y = w n with n = x r and r = 1 / sqrt(mean(x^2) + eps) (arXiv 1910.07467):

    d y / d x: r (g w - n mean(g w n))        d y / d w: sum of g n over all vectors
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = (torch.linalg.vecdot(x, x) / x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,), (normed, scale, weight) = grads, ctx.saved_tensors
        product = grad * normed
        mean = (product @ weight).div_(len(weight)).unsqueeze(-1)
        grad_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale), grad_weight, None
