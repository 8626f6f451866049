"""The layers that Megatron takes from TransformerEngine, in plain torch: for tests on a CPU.

They compute what TransformerEngine's compute, on shares of a matrix over Megatron's own parallel layers, and attention
over packed rows (THD) one stream after another. There is no context parallelism, and no grouped experts.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def install() -> None:
    """Put the layers where Megatron-core and Megatron-Bridge look for TransformerEngine's, in all loaded modules."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class Column(ColumnParallelLinear):
        def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **options: Any) -> None:
            super().__init__(inputs, outputs, config=config, init_method=init_method, **_known(options))

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
                return super().forward(functional.rms_norm(x, weight.shape, weight, self.eps))
            return super().forward(functional.layer_norm(x, weight.shape, weight, bias, self.eps))

    class Row(RowParallelLinear):
        def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **options: Any) -> None:
            super().__init__(inputs, outputs, config=config, init_method=init_method, **_known(options))

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
        "TEDotProductAttention": Attention,
        "TELinear": type("TELinear", (nn.Module,), {}),
    }
    for name, layer in layers.items():
        layer.__name__ = name  # Megatron-Bridge finds out by the name how a layer is shared
    names = layers | {"TESpecProvider": TESpecProvider, "HAVE_TE": True}
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        # Checkpoints would look for a dtype of TransformerEngine's own.
        if where.startswith("megatron") and "dist_checkpointing" not in where:
            for name in names.keys() & vars(module).keys():
                setattr(module, name, names[name])


def _known(options: dict[str, Any]) -> dict[str, Any]:
    names = ("bias", "skip_bias_add", "is_expert", "tp_group", "gather_output", "input_is_parallel")
    return {name: value for name, value in options.items() if name in names}


class Attention(nn.Module):
    """Attention over one row, or over the streams of a packed one; (T, 1, heads, D) or (T, heads, D) in."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, *_: Any, **options: Any) -> None:
        super().__init__()
        self.kind, self.scale = attn_mask_type, options.get("softmax_scale")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, attn_mask_type: Any = None, **options: Any
    ) -> Tensor:
        """Return (T, heads D) for a packed row, else (T, 1, heads D)."""
        is_causal, packed = "causal" in (attn_mask_type or self.kind).name, options.get("packed_seq_params")
        flat = [part.squeeze(1) if part.dim() == 4 else part for part in (query, key, value)]
        starts = packed.cu_seqlens_q.tolist() if packed is not None else [0, len(query)]
        streams = []
        for start, end in itertools.pairwise(starts):
            q, k, v = (part[start:end].transpose(0, 1)[None] for part in flat)
            seen = functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=self.scale, enable_gqa=True
            )
            streams.append(seen[0].transpose(0, 1).flatten(1))
        joined = torch.cat(streams)
        return joined if packed is not None else joined[:, None]
