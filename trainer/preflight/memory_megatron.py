"""Estimates the GPU memory of a training step with `--backend megatron`, for the pipeline stage that needs the most.

Weights are kept in the compute dtype, the gradient of the whole part of a rank in float32, and the optimizer's float32
weights and moments once over all ranks with the same weights (Megatron's distributed optimizer). Nothing of this file
was measured on a GPU: it counts parameters, and takes the activations of FSDP2's blocks, of which TransformerEngine's
fused norms keep less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from agents.model.linear_logprobs import CHUNK_VALUES
from agents.model.policy import PolicyModel
from trainer.learner.layout import Layout
from trainer.preflight.memory_terms import (
    BlockBytes,
    MemoryEstimate,
    Plan,
    decoder_block,
    divided,
    kept_bytes,
    vision_block,
)

#: Layers whose rows tensor-parallel ranks share, and so their biases too. Of others, each rank holds the whole bias.
_BY_ROWS = re.compile(r"\.(q_proj|k_proj|v_proj|qkv|gate_proj|up_proj|linear_fc1)\.")
#: Matrices and tables that each tensor-parallel rank holds whole: the router, and what turns pixels into patches.
_WHOLE = re.compile(r"\.(mlp\.gate|patch_embed\.proj|pos_embed)\.")
_EXPERTS = re.compile(r"\.mlp\.experts\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class StageParameters:
    """Parameters on one rank of a pipeline stage; those of experts have copies on other ranks than the rest."""

    trained: int
    frozen: int
    trained_experts: int
    frozen_experts: int

    @property
    def all_trained(self) -> int:
        """Those with gradients."""
        return self.trained + self.trained_experts

    @property
    def total(self) -> int:
        """All of them."""
        return self.all_trained + self.frozen + self.frozen_experts


def stage_parameters(model: PolicyModel, layout: Layout) -> list[StageParameters]:
    """Return what one rank of each pipeline stage holds; the network may be on the meta device.

    The first stage has the embedding and the tower, the last one the final norm and the output layer; where that is
    the embedding, the last stage has a copy.
    """
    layers = model.config.get_text_config().num_hidden_layers
    counts = [[0, 0, 0, 0] for _ in range(layout.pipeline)]
    tied = layout.pipeline > 1 and model.backbone.lm_head.weight is _embedding(model)  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        own = _on_one_rank(name, parameter, layout)
        place = (0 if parameter.requires_grad else 1) + (2 if _EXPERTS.search(name) else 0)
        stages = [_stage(name, layers // layout.pipeline, layout.pipeline)]
        if tied and parameter is _embedding(model):
            stages.append(layout.pipeline - 1)
        for stage in stages:
            counts[stage][place] += own
    return [StageParameters(*count) for count in counts]


def estimate_megatron(model: PolicyModel, plan: Plan) -> MemoryEstimate:
    """Return the memory that a training step needs on a rank of the stage that needs the most."""
    layout = plan.layout
    assert layout is not None, "the plan of Megatron has a layout"
    stages = enumerate(stage_parameters(model, layout))
    return max((_stage_estimate(model, plan, layout, *stage) for stage in stages), key=lambda found: found.total)


def stream_tokens(plan: Plan, layout: Layout) -> int:
    """Return the tokens of a micro-batch on one rank: context-parallel ranks share them."""
    return divided(plan.tokens, layout.context)


def _stage_estimate(
    model: PolicyModel, plan: Plan, layout: Layout, stage: int, count: StageParameters
) -> MemoryEstimate:
    # Context-parallel ranks hold the same weights, so they too share the optimizer's state.
    copies = layout.data_parallel(plan.num_gpus) * layout.context
    state = 8 + (4 if plan.compute_bytes < 4 else 0)  # moments, and float32 weights where the others are not
    optimizer = divided(state * count.trained, copies)
    optimizer += divided(state * count.trained_experts, layout.expert_data_parallel(plan.num_gpus))
    return MemoryEstimate(
        weights=plan.compute_bytes * count.total,
        gathered=0,
        gradients=4 * count.all_trained,
        optimizer=optimizer,
        activations=_activations(model, plan, layout, stage),
        logits=_logits(model, plan, layout) if stage == layout.pipeline - 1 else 0,
        gradients_stay=True,
    )


def _activations(model: PolicyModel, plan: Plan, layout: Layout, stage: int) -> int:
    """Return the bytes of a stage's activations, and of one block more: the one whose gradient is being computed.

    A stage holds as many micro-batches as there are stages from it on (1F1B, arXiv 2104.04473, section 2.2.1).
    Every context-parallel rank passes all pictures through the tower, and its blocks never share tokens.
    """
    text = model.config.get_text_config()
    tokens, rows = stream_tokens(plan, layout), layout.tensor if layout.sequence else 1
    block = _block(decoder_block(text), layout, rows) * tokens
    layers = text.num_hidden_layers // layout.pipeline
    parts = [(block, divided(2 * text.hidden_size * tokens, rows), layers)]
    tower = model.architecture.vision_tower(model.backbone)
    if stage == 0 and tower is not None and _is_trained(tower):
        vision, depth = tower.config, len(tower.blocks)
        own = _block(vision_block(vision), layout, 1) * plan.patches
        parts.append((own, 2 * vision.hidden_size * plan.patches, depth))
    kept = sum(kept_bytes(*part, plan.recompute) for part in parts)
    in_flight = layout.pipeline - stage
    return (in_flight * kept + max(block for block, *_ in parts)) * plan.compute_bytes // 2


def _block(block: BlockBytes, layout: Layout, rows: int) -> int:
    """Return the bytes of one token in a block, where `rows` ranks share the tokens between the matrices.

    Each rank gets as many copies of tokens for its experts as it sends, if the router spreads them evenly; ranks that
    share an expert each get the copies of all of them.
    """
    shared = divided(block.norms, rows) + divided(block.matrices, layout.tensor)
    return shared + divided(layout.expert_tensor * block.routed + block.experts, rows)


def _logits(model: PolicyModel, plan: Plan, layout: Layout) -> int:
    """Return the bytes of one chunk of logits in float32, its gradient in float32 and in the compute dtype, and the
    output layer's gradient in float32: as with FSDP2, of the words of one rank.
    """
    weight = model.backbone.lm_head.weight  # type: ignore[union-attr]
    words = divided(weight.shape[0], layout.tensor)  # type: ignore[operator,index]
    chunk = min(CHUNK_VALUES, stream_tokens(plan, layout) * words)
    gradient = 4 * divided(weight.numel(), layout.tensor) if weight.requires_grad else 0  # type: ignore[operator,union-attr]
    return (8 + plan.compute_bytes) * chunk + gradient


def _on_one_rank(name: str, parameter: nn.Parameter, layout: Layout) -> int:
    """Return how many values of a parameter one rank of its stage holds."""
    size = parameter.numel()
    if _EXPERTS.search(name):
        return divided(size, layout.expert * layout.expert_tensor)
    is_whole = _WHOLE.search(name) or (parameter.dim() == 1 and not _BY_ROWS.search(name))
    return size if is_whole else divided(size, layout.tensor)


def _stage(name: str, layers_of_one: int, stages: int) -> int:
    """Return the pipeline stage that holds a parameter."""
    if ".visual." not in name and (found := _LAYER.search(name)):
        return int(found[1]) // layers_of_one
    is_first = ".visual." in name or ".embed_tokens." in name
    return 0 if is_first else stages - 1


def _embedding(model: PolicyModel) -> nn.Parameter:
    return model.architecture.decoder(model.backbone).embed_tokens.weight


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
