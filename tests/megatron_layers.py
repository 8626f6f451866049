"""The layers that Megatron takes from TransformerEngine, in plain torch: for tests on a CPU.

They compute what TransformerEngine's compute: products on shares of a matrix over Megatron's own parallel layers, those
of experts one after another, and attention over packed rows (THD) stream by stream. Under context parallelism each rank
gathers all keys and values; TransformerEngine passes them round in a ring.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainer.learner.megatron.thd import zigzag


def install() -> None:
    """Put the layers where Megatron-core and Megatron-Bridge look for TransformerEngine's, in all loaded modules."""
    names = _names()
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        # Checkpoints would look for a dtype of TransformerEngine's own.
        if where.startswith("megatron") and "dist_checkpointing" not in where:
            for name in names.keys() & vars(module).keys():
                setattr(module, name, names[name])


@functools.cache
def _names() -> dict[str, Any]:
    """Return what stands under TransformerEngine's names."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class Column(ColumnParallelLinear):
        def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **options: Any) -> None:
            super().__init__(inputs, outputs, config=config, init_method=init_method, **_known(options))
            self.out_features, self.in_features = self.weight.shape  # of this rank

    class NormColumn(Column):
        def __init__(self, inputs: int, outputs: int, *, config: Any, **options: Any) -> None:
            super().__init__(inputs, outputs, config=config, **options)
            self.layer_norm_weight = nn.Parameter(torch.ones(inputs))
            self.layer_norm_bias = nn.Parameter(torch.zeros(inputs)) if config.normalization == "LayerNorm" else None
            self.eps = config.layernorm_epsilon
            for parameter in (self.layer_norm_weight, self.layer_norm_bias):
                if parameter is not None:
                    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
            weight, bias = self.layer_norm_weight, self.layer_norm_bias
            if bias is None:
                x = functional.rms_norm(x, weight.shape, weight, self.eps)
            else:
                x = functional.layer_norm(x, weight.shape, weight, bias, self.eps)
            output, skipped_bias = super().forward(x)
            if not getattr(self, "return_layernorm_output", False):
                return output, skipped_bias
            if getattr(self, "return_layernorm_output_gathered", False):
                x = gather_from_sequence_parallel_region(x)
            return (output, x), skipped_bias  # what an adapter takes

    class Row(RowParallelLinear):
        def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **options: Any) -> None:
            super().__init__(inputs, outputs, config=config, init_method=init_method, **_known(options))
            self.out_features, self.in_features = self.weight.shape  # of this rank

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            norm = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
            made = norm(hidden_size, eps)
            for parameter in made.parameters():
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            return made

    layers: dict[str, Any] = {
        "TEColumnParallelLinear": Column,
        "TELayerNormColumnParallelLinear": NormColumn,
        "TERowParallelLinear": Row,
        "TENorm": Norm,
        "TEColumnParallelGroupedLinear": type("Experts", (_Experts,), {"split": 0}),
        "TERowParallelGroupedLinear": type("Experts", (_Experts,), {"split": 1}),
        "TEDotProductAttention": Attention,
        "TELinear": type("TELinear", (nn.Module,), {}),
        "TECudaRNGStatesTracker": type("TECudaRNGStatesTracker", (), {}),
    }
    for name, layer in layers.items():
        layer.__name__ = name  # Megatron-Bridge finds out by the name how a layer is shared
    kernels = types.SimpleNamespace(
        thd_get_partitioned_indices=lambda starts, _, ranks, rank: torch.from_numpy(
            zigzag(starts.numpy().astype(np.int32), ranks)[rank]
        )
    )
    return layers | {"TESpecProvider": TESpecProvider, "HAVE_TE": True, "LayerNormImpl": Norm, "tex": kernels}


def _known(options: dict[str, Any]) -> dict[str, Any]:
    names = ("bias", "skip_bias_add", "is_expert", "tp_group", "gather_output", "input_is_parallel")
    return {name: value for name, value in options.items() if name in names}


class _Experts(nn.Module):
    """The same linear layer of each expert on this rank; each is cut over ranks along dimension `split`."""

    split: int

    def __init__(
        self, num_experts: int, inputs: int, outputs: int, *, config: Any, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        ranks = dist.get_world_size(pg_collection.expt_tp)
        shape = [outputs, inputs]
        shape[self.split] //= ranks
        for number in range(num_experts):
            weight = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            weight.tensor_model_parallel, weight.partition_dim = ranks > 1, self.split  # type: ignore[attr-defined]
            # Ranks with other experts take other tokens: their gradients are not of this weight.
            is_shared = config.expert_model_parallel_size > 1 or ranks != config.tensor_model_parallel_size
            weight.allreduce = not is_shared  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, tokens_per_expert: Any) -> tuple[Tensor, None]:
        """Return the outputs of tokens (T, inputs) that lie expert by expert."""
        parts = x.split(torch.as_tensor(tokens_per_expert).tolist())
        return torch.cat([part @ weight.T for part, weight in zip(parts, self.parameters(), strict=True)]), None


class _AllGather(torch.autograd.Function):
    """The parts (T, ...) of all ranks, one after another; the gradient of a part is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole = grads[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    """Attention over one row, or over the streams of a packed one; (T, 1, heads, D) or (T, heads, D) in."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, *_: Any, pg_collection: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.kind, self.scale = attn_mask_type, options.get("softmax_scale")
        self.context = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, attn_mask_type: Any = None, **options: Any
    ) -> Tensor:
        """Return (T, heads D) for a packed row, else (T, 1, heads D)."""
        is_causal, packed = "causal" in (attn_mask_type or self.kind).name, options.get("packed_seq_params")
        flat = [part.squeeze(1) if part.dim() == 4 else part for part in (query, key, value)]
        starts = packed.cu_seqlens_q.tolist() if packed is not None else [0, len(query)]
        mine: Any = slice(None)
        if self.context is not None:
            ranks = zigzag(np.asarray(starts, dtype=np.int32), dist.get_world_size(self.context))
            mine = torch.from_numpy(ranks[dist.get_rank(self.context)])
            order = torch.from_numpy(np.concatenate(ranks)).argsort()
            flat = [_AllGather.apply(part, self.context)[order] for part in flat]
        streams = []
        for start, end in itertools.pairwise(starts):
            q, k, v = (part[start:end].transpose(0, 1)[None] for part in flat)
            seen = functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=self.scale, enable_gqa=True
            )
            streams.append(seen[0].transpose(0, 1).flatten(1))
        joined = torch.cat(streams)[mine]
        return joined if packed is not None else joined[:, None]
