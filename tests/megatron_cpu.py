"""Lets Megatron-core and Megatron-Bridge run on a CPU, for tests: gloo, local layers, no TransformerEngine.

Megatron names CUDA in many places where the current device would do; `on_cpu` answers for it. What is left of Megatron
is its own: the networks, the parallel layers, the pipeline schedules, the distributed optimizer, the conversion of
checkpoints. `tests.megatron_layers` stands for TransformerEngine's layers; there is no context parallelism.
"""

from __future__ import annotations

import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._device
import typing_extensions

from tests import megatron_layers


class _Stream:
    """The one stream of a CPU."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def on_cpu() -> None:
    """Make this process answer for CUDA with its CPU; for a process that runs nothing else."""
    cpu, stream = torch.device("cpu"), _Stream()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if not hasattr(typing, "override"):  # the packages are for Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.pipeline_parallel
    import megatron.core.tensor_parallel.random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda *_: stream
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    megatron.core.tensor_parallel.random._set_cuda_rng_state = lambda *_, **__: None  # nothing draws
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    cuda.manual_seed = torch.manual_seed
    cuda.nvtx = types.SimpleNamespace(range_push=lambda *_: None, range_pop=lambda *_: None)
    cuda.FloatTensor = torch.FloatTensor
    cuda.memory_allocated = cuda.memory_reserved = cuda.max_memory_allocated = lambda *_: 0
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.")  # type: ignore
    _name_cpu("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "rand", "randn")
    _keep_steps()
    _name_transformer_engine()
    megatron_layers.install()
    import megatron.bridge

    megatron_layers.install()


def _keep_steps() -> None:
    """Let the distributed optimizer read a folder with torch's AdamW, whose step it keeps beside the moments.

    Only TransformerEngine's AdamW, which a GPU uses, has none there.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    fill: Any = DistributedOptimizer._set_main_param_and_optimizer_states
    sharded: Any = DistributedOptimizer.sharded_state_dict

    def filled(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        fill(self, parameter, {"step": None, **tensors})

    def begun(self: Any, model: Any, is_loading: bool = False, *args: Any, **options: Any) -> Any:
        if is_loading:
            self.init_state_fn(self.optimizer, self.config)
        for moments in self.optimizer.state.values():
            moments.setdefault("step", torch.tensor(0.0))
        return sharded(self, model, is_loading, *args, **options)

    load: Any = DistributedOptimizer.load_state_dict

    def loaded(self: Any, state: Any) -> None:
        load(self, state)
        for moments in self.optimizer.state.values():  # all have got one tensor, which each parameter would count up
            moments["step"] = moments["step"].clone()

    DistributedOptimizer.load_state_dict = loaded
    DistributedOptimizer.sharded_state_dict = begun
    DistributedOptimizer._set_main_param_and_optimizer_states = filled


def _name_cpu(*names: str) -> None:
    """Let torch's makers of tensors take device "cuda" for the CPU."""

    torch.utils._device._device_constructors()  # before they are replaced: it looks for the true ones

    def wrapped(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    for name in names:
        setattr(torch, name, wrapped(getattr(torch, name)))


def _name_transformer_engine() -> None:
    """Let Megatron-Bridge import: it names layers of TransformerEngine that nothing here builds."""

    class AnyName(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return AnyName(name, (torch.nn.Module,), {})

    class Layers(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(AnyName("te", (), {}), name)

    top, layers = types.ModuleType("transformer_engine"), Layers("transformer_engine.pytorch")
    top.pytorch, top.__version__ = layers, "2.20.2"  # type: ignore[attr-defined]
    sys.modules |= {"transformer_engine": top, "transformer_engine.pytorch": layers}


def with_layout(flags: Mapping[str, Any]) -> Callable[[Any], None]:
    """Return what changes the provider of a tiny network of three layers for the CPU and for a layout's flags."""

    def change(provider: Any) -> None:
        without_kernels(provider)
        if "pp" in flags:
            provider.num_layers_in_first_pipeline_stage = 2  # of three

    return change


def without_kernels(provider: Any) -> None:
    """Let a provider of Megatron-Bridge build on the CPU, without fused kernels."""
    provider.use_cpu_initialization = True
    provider.bias_activation_fusion = provider.bias_dropout_fusion = provider.masked_softmax_fusion = False
    provider.persist_layer_norm = provider.apply_rope_fusion = provider.moe_permute_fusion = False
