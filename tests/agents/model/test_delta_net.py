"""Claims about state layers: packed rows compute what Transformers computes stream by stream, and nothing leaks.

Legend: T tokens of one stream, N scored tokens of a packed row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agents.model.architectures import ARCHITECTURES
from agents.model.attention import Span
from agents.model.delta_net import States, delta_net_forward, delta_net_step
from agents.model.packed import PackedStreams
from agents.model.policy import PolicyModel
from agents.model.state_plan import StatePlan
from agents.types import ProcessedImage, SamplingDistribution
from tests.tiny_models import write_tiny_model

STATE_TYPES = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.states)
#: Prompts, and the lengths of the streams that continue them: within a chunk of 64 tokens, at its edge and beyond.
GROUPS = {"apart": ((70, (1,)), (3, (60,)), (2, (140,))), "shared": ((70, (130, 2, 58)), (2, (5, 61)), (64, (64,)))}


@dataclass(frozen=True, eq=False)
class Stream:
    """One stream, and the places of a packed row that hold its tokens."""

    ids_T: np.ndarray
    images: tuple[ProcessedImage, ...]
    places_T: np.ndarray
    prompt_length: int


@pytest.fixture(scope="module", params=STATE_TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(path, request.param)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PolicyModel:
    return PolicyModel.load(folder)


def image_of(model: PolicyModel, seed: int) -> ProcessedImage:
    vision = model.config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.random.default_rng(seed).normal(size=(24, values)).astype(np.float32)
    return ProcessedImage(f"image {seed}", pixels, (1, 4, 6), 6)


def pack(
    model: PolicyModel, groups: Sequence[tuple[int, Sequence[int]]], with_images: bool = False, seed: int = 0
) -> tuple[PackedStreams, list[Stream]]:
    """Pack groups of streams with random tokens, each prompt once; every token but a stream's first is scored."""
    rng = np.random.default_rng(seed)
    spans: list[Span] = []
    streams: list[Stream] = []
    ids: list[int] = []
    shown: list[tuple[ProcessedImage, ...]] = []
    positions: dict[int, np.ndarray] = {}
    for number, (prompt_length, lengths) in enumerate(groups):
        start = len(ids)
        prompt = rng.integers(20, 300, prompt_length).tolist()
        images = (image_of(model, number),) if with_images else ()
        for image in images:
            prompt += [model.image_token_id] * image.num_tokens + [30]
        ids += prompt
        if len(lengths) > 1:
            spans.append(Span(start, len(prompt)))
            shown.append(images)
        for length in lengths:
            first = len(ids)
            own = rng.integers(20, 300, length).tolist()
            if len(lengths) > 1:
                spans.append(Span(first, length, start, len(prompt)))
            else:
                spans.append(Span(start, len(prompt) + length))
                shown.append(images)
            ids += own
            places_T = np.r_[start : start + len(prompt), first : first + length]
            stream = Stream(np.array(prompt + own), images, places_T, len(prompt))
            positions |= dict(zip(places_T.tolist(), model.positions(stream.ids_T.tolist(), images).T, strict=True))
            streams.append(stream)
    packed = PackedStreams.build(
        ids_T=np.array(ids),
        positions_3T=np.stack([positions[place] for place in range(len(ids))], axis=1),
        spans=spans,
        images=shown,
        before_N=np.concatenate([stream.places_T[:-1] for stream in streams]),
        targets_N=np.concatenate([stream.ids_T[1:] for stream in streams]),
        image_token_id=model.image_token_id,
        device="cpu",
        with_buckets=True,
    )
    return packed, streams


def weights_of(count: int) -> Tensor:
    """Return a random factor for each score, so that gradients of different tokens do not cancel or repeat."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def gradients(network: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    return found


def plain_scores(network: Any, stream: Stream) -> Tensor:
    ids_1T = torch.from_numpy(stream.ids_T)[None]
    inputs: dict[str, Tensor] = {}
    if stream.images:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([image.pixels_PD for image in stream.images]))
        inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in stream.images])
        inputs["mm_token_type_ids"] = (ids_1T == network.config.image_token_id).int()
    logits_TV = network(input_ids=ids_1T, use_cache=False, **inputs).logits[0]
    return logits_TV[:-1].log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]


@pytest.mark.parametrize("with_images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("kind", GROUPS)
def test_packed_streams_are_those_of_transformers_one_by_one_in_value_and_gradient(
    folder: Path, model: PolicyModel, kind: str, with_images: bool
) -> None:
    network: Any = model.architecture.read(folder, dtype=torch.float32, attn_implementation="eager").eval()
    packed, streams = pack(model, GROUPS[kind], with_images)
    got_N, _ = model.token_scores(packed, SamplingDistribution())
    expected_N = torch.cat([plain_scores(network, stream) for stream in streams])
    assert (got_N - expected_N).abs().mean() < 1e-5 and (got_N - expected_N).abs().max() < 1e-4
    factors_N = weights_of(len(got_N))
    (got_N @ factors_N).backward()
    (expected_N @ factors_N).backward()
    expected = {f"backbone.{name}": gradient for name, gradient in gradients(network).items()}
    got = gradients(model)
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= 3e-5 * gradient.norm() + 1e-5, name


def scores_and_reach(model: PolicyModel, packed: PackedStreams, chosen: slice) -> tuple[Tensor, Tensor]:
    """Return all scores, and for each token of the row how much the chosen scores depend on its embedding."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], out_1TH: Tensor) -> None:
        out_1TH.retain_grad()
        kept.append(out_1TH)

    handle = model.architecture.decoder(model.backbone).embed_tokens.register_forward_hook(keep)
    scores_N, _ = model.token_scores(packed, SamplingDistribution())
    handle.remove()
    (scores_N[chosen] @ weights_of(len(scores_N[chosen]))).backward()
    model.zero_grad()
    assert kept[0].grad is not None
    return scores_N.detach(), kept[0].grad[0].abs().sum(-1)


@pytest.mark.parametrize("kind", GROUPS)
def test_a_stream_depends_on_its_own_tokens_alone_in_value_and_gradient(model: PolicyModel, kind: str) -> None:
    packed, streams = pack(model, GROUPS[kind])
    counts = [len(stream.ids_T) - 1 for stream in streams]
    ends = np.cumsum([0, *counts])
    for number, stream in enumerate(streams):
        chosen = slice(int(ends[number]), int(ends[number + 1]))
        scores_N, reach_T = scores_and_reach(model, packed, chosen)
        others = np.setdiff1d(np.arange(len(packed.ids_T)), stream.places_T)
        assert (reach_T[others] == 0).all()
        # The last token is predicted from all before it.
        assert (reach_T[stream.places_T[:-1]] > 0).all()
        changed = packed.ids_T.clone()
        changed[others] = (changed[others] + 7) % 300
        again_N, _ = scores_and_reach(model, replace(packed, ids_T=changed), chosen)
        assert torch.equal(again_N[chosen], scores_N[chosen])


def test_streams_that_are_not_told_apart_would_show(model: PolicyModel) -> None:
    """The tiny networks remember far enough for the claims above to say something."""
    packed, streams = pack(model, GROUPS["apart"])
    leaking = replace(packed, spans=(Span(0, len(packed.ids_T)),))
    apart_N, leaky_N = (model.token_scores(each, SamplingDistribution())[0] for each in (packed, leaking))
    first = len(streams[0].ids_T) - 1
    assert torch.equal(apart_N[:first], leaky_N[:first])
    assert (apart_N - leaky_N)[first:].abs().max() > 1
    _, reach_T = scores_and_reach(model, leaking, slice(first, None))
    assert (reach_T[:first] > 0).all()


def state_layer(model: PolicyModel) -> Any:
    return model.architecture.decoder(model.backbone).layers[0].linear_attn


def hidden_states(model: PolicyModel, rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, model.config.text_config.hidden_size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_states_take_a_sequence_from_one_call_to_the_next(model: PolicyModel) -> None:
    layer = state_layer(model)
    hidden_1TH = hidden_states(model, 1, 150)
    whole_1TH, after = delta_net_forward(layer, hidden_1TH, StatePlan.build([Span(0, 150)], "cpu"))
    states: States | None = None
    parts = []
    for start, end in ((0, 2), (2, 77), (77, 150)):
        plan = StatePlan.build([Span(0, end - start)], "cpu")
        part_1TH, states = delta_net_forward(layer, hidden_1TH[:, start:end], plan, states)
        parts.append(part_1TH)
    assert states is not None
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_1TH, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.recurrent_SHKV, after.recurrent_SHKV)
    torch.testing.assert_close(states.conv_SCW, after.conv_SCW)


@torch.no_grad()
def test_single_steps_are_the_chunked_rule_and_leave_ended_rows_alone(model: PolicyModel) -> None:
    layer = state_layer(model)
    lengths = (70, 9)
    hidden_BTH = hidden_states(model, 2, 70)
    states = States.zeros(layer, 2, hidden_BTH)
    steps = []
    for place in range(70):
        alive_B = torch.tensor([place < length for length in lengths])
        out_B1H, states = delta_net_step(layer, hidden_BTH[:, place : place + 1], states, alive_B)
        steps.append(out_B1H)
    row_1TH = torch.cat([hidden_BTH[0], hidden_BTH[1, :9]])[None]
    plan = StatePlan.build([Span(0, 70), Span(70, 9)], "cpu")
    out_1TH, after = delta_net_forward(layer, row_1TH, plan)
    got_BTH = torch.cat(steps, dim=1)
    torch.testing.assert_close(got_BTH[0], out_1TH[0, :70], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_BTH[1, :9], out_1TH[0, 70:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.recurrent_SHKV, after.recurrent_SHKV)
    torch.testing.assert_close(states.conv_SCW, after.conv_SCW)


@torch.no_grad()
def test_equal_keys_that_are_never_forgotten_stay_exact(model: PolicyModel) -> None:
    """The hardest system of a chunk: each token corrects all earlier ones, and an inverse by powers would overflow."""
    layer = state_layer(model)
    hidden_1TH = hidden_states(model, 1, 1).expand(1, 200, -1)
    plan = StatePlan.build([Span(0, 200)], "cpu")
    saved = layer.A_log.clone()
    layer.A_log.fill_(-30.0)
    out_1TH, after = delta_net_forward(layer, hidden_1TH, plan)
    layer.A_log.copy_(saved)
    assert out_1TH.isfinite().all() and after.recurrent_SHKV.isfinite().all()
    # The same token again and again: what its key reads approaches its value, and then stays.
    torch.testing.assert_close(out_1TH[0, -1], out_1TH[0, -50], rtol=1e-4, atol=1e-5)
