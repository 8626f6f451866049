"""Where bfloat16 parts Megatron's network from Transformers', layer by layer: a part of `benchmarks.backends`.

Both compute the same stream from the same weights. The truth is Transformers in float32. Each row is a place in the
network, with the error of each network there: the norm of its difference from the truth, over the norm of the truth.
The place at which Megatron's error first leaves Transformers' is the cause. `logprob_mean` and `logprob_max` compare
log-probs in nats, with logits in float32 as both backends train, and rounded to bfloat16 as Megatron by itself does.

Legend: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agents.model.attention import Span, needs_buckets
from agents.model.packed import PackedStreams
from agents.model.policy import PolicyModel
from agents.types import SamplingDistribution, SamplingParams
from trainer.types import TrainingSample

#: The settings of Megatron-Bridge's provider that could move log-probs, one at a time.
VARIANTS = {"": {}, "rope in float32": {"apply_rotary_pos_emb_in_fp32": True}}


def trace(
    folder: Path, sample: TrainingSample, device: str, changed: Callable[[Any], None], packed: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows for one stream."""
    truth = transformers_states(folder, sample, device, torch.float32)
    dtypes = [torch.bfloat16, torch.float32] if device == "cpu" else [torch.bfloat16]
    for dtype in dtypes:
        networks = {"transformers": transformers_states(folder, sample, device, dtype)}
        for name, settings in VARIANTS.items():
            networks[f"megatron {name}".strip()] = megatron_states(
                folder, sample, device, dtype, _with(changed, settings), packed
            )
        for place, expected in truth.items():
            errors = {n: _error(states[place], expected) for n, states in networks.items() if place in states}
            yield {"place": place, "dtype": str(dtype), **errors}
        yield from _logprob_rows(truth, networks, sample, str(dtype))


def _with(changed: Callable[[Any], None], settings: dict[str, Any]) -> Callable[[Any], None]:
    def change(provider: Any) -> None:
        changed(provider)
        for name, value in settings.items():
            if hasattr(provider, name):
                setattr(provider, name, value)

    return change


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _logprob_rows(
    truth: dict[str, Tensor], networks: dict[str, dict[str, Tensor]], sample: TrainingSample, dtype: str
) -> Iterator[dict[str, Any]]:
    """Yield the log-probs' distances from the truth, and of Megatron's from Transformers', by the logits' precision."""
    targets_T = torch.from_numpy(sample.ids_T[1:])
    exact_T = _logprobs(truth["logits"], targets_T)
    for rounded in (False, True):
        by_name = {
            name: _logprobs(states["logits"].bfloat16() if rounded else states["logits"], targets_T)
            for name, states in networks.items()
        }
        for name, logprobs_T in by_name.items():
            for against, other_T in (("truth", exact_T), ("transformers", by_name["transformers"])):
                gaps_T = (logprobs_T - other_T).abs()
                yield {
                    "place": "log-probs",
                    "dtype": dtype,
                    "network": name,
                    "against": against,
                    "logits": "bfloat16" if rounded else "float32",
                    "logprob_mean": float(gaps_T.mean()),
                    "logprob_max": float(gaps_T.max()),
                }


def _logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return logits_TV[:-1].double().log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]


def transformers_states(folder: Path, sample: TrainingSample, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what each layer gives in the network of the other backend, and float32 logits of its last states."""
    model = PolicyModel.load(folder, dtype).to(device)
    tower, decoder = model.architecture.vision_tower(model.backbone), model.architecture.decoder(model.backbone)
    places = {"embedding": decoder.embed_tokens, **{f"layer {n}": layer for n, layer in enumerate(decoder.layers)}}
    if tower is not None and sample.images:
        places["vision"] = tower.merger
    backbone: Any = model.backbone
    states, hooks = _record({**places, "norm": decoder.norm})
    packed = PackedStreams.build(
        ids_T=sample.ids_T,
        positions_3T=sample.positions_3T,
        spans=[Span(0, len(sample.ids_T))],
        images=[sample.images],
        before_N=sample.ids_T[1:] * 0,
        targets_N=sample.ids_T[1:],
        image_token_id=model.image_token_id,
        device=device,
        with_buckets=needs_buckets(torch.device(device), dtype),
    )
    with torch.no_grad():
        model.token_scores(packed, SamplingDistribution())
    for hook in hooks:
        hook.remove()
    return _finished(states, backbone.lm_head.weight)


def megatron_states(
    folder: Path, sample: TrainingSample, device: str, dtype: torch.dtype, changed: Callable[[Any], None], packed: bool
) -> dict[str, Tensor]:
    """Return the same of Megatron's network."""
    from megatron.core import parallel_state

    from trainer.learner.megatron.learner import MegatronLearner

    learner = MegatronLearner(folder, SamplingParams(), 1, device=device, dtype=dtype, changed=changed)
    learner.network.is_packed = packed
    bare = learner.network.bare
    text = getattr(bare, "language_model", bare)
    places = {"embedding": text.embedding, **{f"layer {n}": layer for n, layer in enumerate(text.decoder.layers)}}
    if learner.network.reads_images and sample.images:
        places["vision"] = bare.vision_model
    states, hooks = _record({**places, "norm": text.decoder})
    learner.score(sample.ids_T.tolist(), sample.images)
    for hook in hooks:
        hook.remove()
    weight = text.shared_embedding_or_output_weight() if text.share_embeddings_and_output_weights else None
    finished = _finished(states, text.output_layer.weight if weight is None else weight)
    del learner
    parallel_state.destroy_model_parallel()
    return finished


def _record(places: dict[str, nn.Module]) -> tuple[dict[str, Tensor], list[Any]]:
    states: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            states[name] = tensor.detach().float().cpu().clone()  # Megatron adds to it in place

        return keep

    return states, [module.register_forward_hook(keeper(name)) for name, module in places.items()]


def _finished(states: dict[str, Tensor], weight_VH: Tensor) -> dict[str, Tensor]:
    """Return the states as (T, H), with float32 logits."""
    flat = {name: state.reshape(-1, state.shape[-1]) for name, state in states.items()}
    return flat | {"logits": flat["norm"] @ weight_VH.detach().float().cpu().T}
