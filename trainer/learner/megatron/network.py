"""The network of Megatron-core behind one call: micro-batches in, log-probs and entropies out on the last stage.

`MegatronNetwork` reads a Hugging Face checkpoint through Megatron-Bridge and runs Megatron-core's pipeline schedules.
Everything that is parallel (layers, attention, experts, gradients) is Megatron's; the loss is the caller's.

Scaling: a token's weight already holds the update's global denominator, so nothing may be averaged. With
`calculate_per_token_loss`, Megatron's schedules do not divide a micro-batch's loss, and its data-parallel groups add
gradients up without a factor, over context-parallel ranks as well. `finalize_model_grads` would divide by the number of
tokens; it is given none.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.types import SamplingDistribution
from envs.errors import UserError
from trainer.config.learner import IMAGE_SHARE, LearnerConfig
from trainer.learner.layout import Layout
from trainer.learner.megatron.routing import Routing
from trainer.learner.megatron.thd import ThdBatch
from trainer.learner.megatron.tower import ENCODED_TOKENS, towers_of
from trainer.learner.megatron.vocab_scores import VocabShard, join_context, vocab_scores
from trainer.learner.sharding import recompute

#: Weights with a row for each id, and more rows where the vocabulary is padded.
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
#: Takes a micro-batch, its log-probs (N,) and entropies (N,); returns its share of the loss.
LossOf = Callable[[ThdBatch, Tensor, Tensor], Tensor]


def provider_settings(config: LearnerConfig, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings of Megatron-Bridge's model provider; those that a provider lacks are left out there."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "should_pad_vocab": True,  # so that any vocabulary can be shared; vocab_scores ignores the padding
        "make_vocab_size_divisible_by": 1,
        "gradient_accumulation_fusion": False,  # needs Apex
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",  # needed by variable_seq_lengths
        "moe_router_load_balancing_type": "none",  # the loss is the objective's alone, as in the other backend
        "moe_aux_loss_coeff": 0.0,
        "moe_router_fusion": False,  # a fused router asks for no routes
        "freeze_language_model": False,
        "freeze_vision_model": config.freeze_vision,
        "freeze_vision_projection": config.freeze_vision,
    }


def check_rope(config: Any) -> None:
    """Refuse rotary positions that Megatron would silently compute otherwise.

    Megatron-core holds three of the four numbers of Llama 3's scaling as constants (`RotaryEmbedding._apply_scaling`).

    Raises:
        UserError: the network has others.
    """
    text = config.get_text_config()
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    others = {name: rope[name] for name, value in constants.items() if rope.get(name, value) != value}
    if kind not in ("default", "mrope", "llama3") or (kind == "llama3" and others):
        rule = "needs rotary positions that Megatron knows: default, or llama3 with the numbers of Llama 3"
        raise UserError("--backend megatron", rule, f"{kind} {others or ''}".strip(), "give --backend fsdp")


def start_parallel(layout: Layout, seed: int) -> None:
    """Make Megatron's process groups over the default group, once in a process."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
        )
        model_parallel_cuda_manual_seed(seed + 1)


class MegatronNetwork:
    """The policy, or the reference network of a KL penalty, on this rank.

    Example::

        network = MegatronNetwork(path, config, layout, torch.bfloat16)
        network.run(batches, loss_of=lambda batch, logprobs_N, entropy_N: ...)   # adds up gradients
        network.run(batches, seen=lambda batch, logprobs_N, entropy_N: ...)      # forward alone
    """

    def __init__(
        self,
        path: Path | str,
        config: LearnerConfig,
        layout: Layout,
        dtype: torch.dtype,
        is_trained: bool = True,
        changed: Callable[[Any], None] | None = None,
    ) -> None:
        """Build and load the network; `changed` may change the provider's settings before it builds."""
        from megatron.bridge import AutoBridge
        from megatron.core import parallel_state

        self.layout = layout
        self.dtype = dtype
        self.bridge: Any = AutoBridge.from_hf_pretrained(str(path))
        provider: Any = self.bridge.to_megatron_provider(load_weights=True)
        for name, value in provider_settings(config, layout, dtype).items():
            if hasattr(provider, name):
                setattr(provider, name, value)
        if changed is not None:
            changed(provider)
        provider.finalize()
        if config.lora_rank and is_trained:
            from trainer.learner.megatron.adapters import add_adapters

            add_adapters(provider, config)
        self.chunks: list[Any] = provider.provide_distributed_model(
            ddp_config=_ddp_config() if is_trained else None, wrap_with_ddp=is_trained
        )
        self.sequence = bool(provider.sequence_parallel)
        self._towers = list(towers_of(self.chunks, self.sequence))
        #: Tokens of images that micro-batches encode together: no more than memory was estimated for.
        self._most_encoded = min(ENCODED_TOKENS, int(IMAGE_SHARE * config.max_tokens_per_microbatch))
        self._routing = Routing()
        _recompute(self.chunks, config.recompute, self._routing)
        self.vocab_size = int(self.bridge.hf_pretrained.config.get_text_config().vocab_size)
        self.reads_images = hasattr(provider, "vision_config")
        self.groups = parallel_state
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.context = (parallel_state.get_context_parallel_rank(), layout.context)
        #: This rank, and how many there are, among those that share the tokens of a context-parallel rank.
        self.sequence_part = (0, 1)
        if self.sequence:
            self.sequence_part = (parallel_state.get_tensor_model_parallel_rank(), layout.tensor)
        #: Whether few kernels are made of what follows the output layer; Megatron-core fuses its own operations itself.
        self.compiled = config.compile == "on" or (config.compile == "auto" and torch.cuda.is_available())
        #: Local attention (without TransformerEngine) takes a row of one stream alone, and no THD.
        self.is_packed = True
        self._settings: Any = self._config()
        self._settings.finalize_model_grads_func = self._sum_gradients
        self._settings.grad_scale_func = None
        if is_trained:
            self._settings.no_sync_func = self.chunks[0].no_sync
        else:
            self._settings.no_sync_func = None

    def _config(self) -> Any:
        from megatron.core.utils import get_model_config

        return get_model_config(self.chunks[0])

    @property
    def bare(self) -> Any:
        """The network without what Megatron wraps around it for gradients and precision."""
        from megatron.core.utils import unwrap_model

        return unwrap_model(self.chunks[0])

    def run(
        self,
        batches: Iterator[ThdBatch],
        count: int,
        distribution: SamplingDistribution,
        loss_of: LossOf | None = None,
        seen: Callable[[ThdBatch, Tensor, Tensor], object] | None = None,
        replays_routes: bool = True,
    ) -> None:
        """Run `count` micro-batches forward, and backward if `loss_of` is given; all ranks must run as many.

        On the last pipeline stage it calls `loss_of` or `seen` for each micro-batch, in order. Tokens take the routes
        that they have, unless `replays_routes` is false.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not count:
            return
        for tower in self._towers:
            every = list(batches)
            batches = iter(every)
            tower.begin([batch.row.images for batch in every], self._most_encoded, self.layout.pipeline > 1)

        def forward(coming: Iterator[ThdBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(coming)
            self._routing.routes_MLK = None
            if replays_routes and batch.routes_MLK is not None:
                self._routing.routes_MLK = batch.routes_MLK.to(batch.targets_N.device)

            def finish(scores_2N: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                none = torch.zeros((), dtype=torch.int, device=scores_2N.device)
                if loss_of is not None:
                    return loss_of(batch, *scores_2N), none, {}
                if seen is not None:
                    seen(batch, *scores_2N.detach())
                return scores_2N.sum(), none, {}

            return self._forward(model, batch, distribution), finish

        # Megatron chooses by the number of stages: with one it is a plain loop.
        schedule = get_forward_backward_func()
        for chunk in self.chunks:
            chunk.train(loss_of is not None)
        schedule(
            forward_step_func=forward,
            data_iterator=batches,
            model=self.chunks[0],
            num_microbatches=count,
            seq_length=1,  # not read: lengths vary, and stages tell each other
            micro_batch_size=1,
            forward_only=loss_of is None,
        )

    def _forward(self, model: Any, batch: ThdBatch, distribution: SamplingDistribution) -> Tensor:
        """Return log-probs and entropies (2, N) on the last stage, hidden states before it."""
        row = batch.row
        device = batch.targets_N.device
        whole = self.reads_images or self.context[1] == 1  # networks with vision cut the row after the images are in it
        if whole:
            mine_P = slice(None)
        else:
            mine_P = row.split(self.context[1])[self.context[0]]
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(row.ids_T[mine_P])[None].to(device),
            "position_ids": torch.from_numpy(
                row.positions_3T[:, None] if self.reads_images else row.positions_3T[:1, mine_P]
            ).to(device),
            # Packed streams are told apart by `packed_seq_params`.
            "attention_mask": None,
            "packed_seq_params": self._packed(batch) if self.is_packed else None,
            "output_processor": _scores,
            "output_processor_context": (self, batch, distribution),
        }
        for tower in self._towers:
            if vision := tower.next(device, self.dtype):
                inputs["pixel_values"] = vision.pixels_PD
                inputs["image_grid_thw"] = torch.tensor(vision.grids, device=device)
        return model(**inputs)

    def _packed(self, batch: ThdBatch) -> Any:
        from megatron.core.packed_seq_params import PackedSeqParams

        starts = torch.from_numpy(batch.row.starts_S1).to(batch.targets_N.device)
        longest = batch.row.longest
        # Padding counts as the end of its stream: causal attention hides it, and kernels need not know of gaps.
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            cu_seqlens_q_padded=starts,
            cu_seqlens_kv_padded=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def shard(self, num_rows: int) -> VocabShard:
        """Return which rows of the output layer are on this rank."""
        start = self.groups.get_tensor_model_parallel_rank() * num_rows
        if self.layout.tensor > 1:
            group = self.groups.get_tensor_model_parallel_group()
        else:
            group = None
        return VocabShard(start, self.vocab_size, group)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights, adapters merged, by their names in a checkpoint; every rank must take all."""
        for name, weight in self.bridge.export_hf_weights(self.chunks, cpu=False, show_progress=False):
            is_padded = name.endswith(_VOCABULARY) and len(weight) > self.vocab_size
            yield name, weight[: self.vocab_size] if is_padded else weight

    def _sum_gradients(self, model: Sequence[Any], num_tokens: Any = None, **groups: Any) -> None:
        """Add up gradients over ranks, the towers' too.

        `num_tokens` is left out: the weights of the tokens already hold the denominator.
        """
        from megatron.core.distributed import finalize_model_grads

        for tower in self._towers:
            tower.backward()
        finalize_model_grads(list(model), None, **groups)

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def _scores(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Any, **_: Any
) -> Tensor:
    """Return log-probs and entropies (2, N) of all model tokens: Megatron calls it in place of its output layer."""
    network, batch, distribution = context
    if network.sequence:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        # `vocab_scores` gives every rank the whole gradient, so each takes its part of it.
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    if output_weight is None:
        weight_VH = output_layer.weight
    else:
        weight_VH = output_weight
    chosen_M, local_M = batch.places
    hidden_MH = hidden_states[:, 0].index_select(0, local_M)
    shard = network.shard(len(weight_VH))
    scores = vocab_scores(hidden_MH, weight_VH, batch.targets_N[chosen_M], distribution, shard, network.compiled)
    if network.context[1] > 1:
        group = network.groups.get_context_parallel_group()
    else:
        group = None
    return join_context(torch.stack(scores), chosen_M, len(batch.targets_N), group)


def _recompute(chunks: Sequence[Any], share: float, routing: Routing) -> None:
    """Recompute this share of the blocks of the stage, and of the tower, as the other backend does.

    A recomputed block gets the routes that it had before.

    Megatron-Bridge 0.6.2 has a way of its own, which gives DeepStack's mergers no gradient: their features come as a
    list out of a function whose tensors alone have one.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerBlock):
                for block in module.layers:
                    block.forward = functools.partial(_releasing_activations, block, block.forward)
                routing.receive(module.layers)
                recompute(module.layers, share)
                routing.give(module.layers)


def _releasing_activations(block: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block, and let go of its attention's activations.

    A block of Megatron-core 0.19.2 keeps what its MLP begins with until the MLP has ended. When a block is recomputed,
    it is left before that, as soon as all that is needed is there: all blocks' activations would stay in memory.
    """
    try:
        return forward(*args, **kwargs)
    finally:
        block.mlp_norm_manager = None


def _ddp_config() -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # a step whose gradient is not finite is skipped
    )
