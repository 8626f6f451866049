"""Makes training samples of trajectory groups, packs samples into rows, and rows into micro-batches.

All functions are pure and deterministic, and cut nothing. The G samples of a group share a prompt, which often holds
most of their tokens. A row holds that prompt once: each sample's attention sees the prompt and the sample itself, and
every token keeps its position in its own stream. A packed micro-batch holds rows one after another, without padding.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from agents.model.architectures import ModelFacts
from agents.model.attention import Span, needs_buckets
from agents.model.mrope import mrope_positions, num_images_within
from agents.model.packed import PackedStreams
from agents.model.policy import PolicyModel
from agents.types import ProcessedImage, TokenStream, Trajectory, TrajectoryGroup
from trainer.algorithms.advantages import Advantages
from trainer.algorithms.aggregation import token_weights
from trainer.config.algorithm import AlgorithmConfig
from trainer.types import Advantage, MicroBatch, Row, TokenBatch, TrainingSample

T = TypeVar("T")
#: The experts of each of R tokens in L layers, K a token.
Routes = NDArray[np.uint8 | np.uint16]


def build_minibatches(
    groups: Sequence[TrajectoryGroup],
    advantages: Advantages,
    num_minibatches: int,
    facts: ModelFacts,
    config: AlgorithmConfig,
    max_new_tokens: int,
) -> list[list[TrainingSample]]:
    """Return the training samples of each update of a step: its groups are split evenly over the updates."""
    parts = zip(split_evenly(groups, num_minibatches), split_evenly(advantages, num_minibatches), strict=True)
    return [training_samples(*part, facts.image_token_id, facts.merge_size, config, max_new_tokens) for part in parts]


def training_samples(
    groups: Sequence[TrajectoryGroup],
    advantages: Advantages,
    image_token_id: int,
    merge_size: int,
    config: AlgorithmConfig,
    max_new_tokens: int,
) -> list[TrainingSample]:
    """Return the training samples of one update, with the weights of its loss.

    Broken episodes are left out. So are groups with fewer than two valid episodes, from which nothing can be learnt. A
    group with equal rewards has advantage 0 and stays: as in GRPO, its tokens count in the denominator, and in the
    step's statistics. An episode without model tokens counts only in the statistics of its group. With
    `config.mask_truncated`, the same holds for an episode that a limit cut off.
    """
    chosen: list[tuple[Trajectory, Advantage]] = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        if group.is_dropped:
            continue
        for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
            masked = config.mask_truncated and trajectory.end_reason.is_truncated
            if advantage is not None and trajectory.num_model_tokens and not masked:
                chosen.append((trajectory, advantage))
    # Over the whole update: micro-batches and ranks must not change a token's weight. By episode: how it was cut into
    # streams must not either.
    lengths = [trajectory.num_model_tokens for trajectory, _ in chosen]
    weights_S = token_weights(lengths, config.aggregation, config.loss_constant or max_new_tokens)
    samples: list[TrainingSample] = []
    for (trajectory, advantage), weight in zip(chosen, weights_S.tolist(), strict=True):
        samples += episode_samples(trajectory, advantage, weight, image_token_id, merge_size)
    return samples


def episode_samples(
    trajectory: Trajectory, advantage: Advantage, weight: float, image_token_id: int, merge_size: int
) -> list[TrainingSample]:
    """Return a training sample of each stream in which the model wrote; every model token has the same weight."""
    first, *_ = streams = trajectory.streams
    samples: list[TrainingSample] = []
    for number, stream in enumerate(streams):
        if not stream.mask_T.any():
            continue
        turns_T = np.zeros(len(stream.ids_T), dtype=np.int64)
        for turn_number, turn in enumerate(trajectory.turns, 1):
            if turn.stream == number:
                turns_T[turn.start : turn.end] = turn_number
        # A row begins with a token: where nothing is shared, the prompt is the stream's own.
        prefix_length = shared_prompt(first, stream, image_token_id) or stream.prompt_length
        prefix = stream.ids_T[:prefix_length]
        grids = [image.grid_thw for image in stream.images]
        samples.append(
            TrainingSample(
                ids_T=stream.ids_T,
                mask_T=stream.mask_T,
                turns_T=turns_T,
                logprobs_T=stream.logprobs_T,
                positions_3T=mrope_positions(stream.ids_T, grids, image_token_id, merge_size),
                images=stream.images,
                prefix_length=prefix_length,
                num_prefix_images=num_images_within(prefix, stream.images, image_token_id),
                advantage=advantage,
                weight=weight,
                key=trajectory.key,
                stream=number,
                kept_NK=stream.kept_NK,
                routes_RLK=stream.routes_RLK,
            )
        )
    return samples


def shared_prompt(first: TokenStream, stream: TokenStream, image_token_id: int) -> int:
    """Return how many tokens, with whole and equal images, the prompts of two streams have in common."""
    most = min(first.prompt_length, stream.prompt_length)
    is_same_T = first.ids_T[:most] == stream.ids_T[:most]
    length = most if is_same_T.all() else int(is_same_T.argmin())
    placeholders = np.flatnonzero(stream.ids_T[:length] == image_token_id)
    begin = 0
    for image, other in zip(first.images, stream.images, strict=False):
        if begin == len(placeholders):
            break
        # Another image may have as many placeholders, or its own begin with them.
        if image.digest != other.digest:
            return int(placeholders[begin])
        begin += image.num_tokens
    return length


def split_evenly(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return consecutive parts whose sizes differ by at most one. With fewer items there are fewer parts, at least one.

    >>> split_evenly([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    # An update without groups would still count as one.
    parts = max(1, min(parts, len(items)))
    bounds = [-(-len(items) * number // parts) for number in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


def pack_rows(samples: Sequence[TrainingSample], max_tokens: int) -> list[Row]:
    """Put samples with the same prompt into one row of at most `max_tokens`; a longer sample has a row of its own."""
    rows: list[list[TrainingSample]] = []
    open_row: dict[object, list[TrainingSample]] = {}
    for sample in samples:
        # Only the last row of a prompt is open, so that its samples stay in order.
        row = open_row.get(sample.prompt_key)
        if row is None or Row((*row, sample)).num_tokens > max_tokens:
            row = open_row[sample.prompt_key] = []
            rows.append(row)
        row.append(sample)
    return [Row(tuple(row)) for row in rows]


def balanced_bins(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Put rows into few bins of at most `max_tokens`, of similar size.

    Each row, longest first, goes into the emptiest bin; if one does not fit, a bin is added and all rows are dealt
    anew. A row of more than `max_tokens` has a bin of its own.
    """
    # A row over the limit is trained all the same: nothing is cut.
    alone = [[row] for row in rows if row.num_tokens >= max_tokens]
    rest = sorted((row for row in rows if row.num_tokens < max_tokens), key=lambda row: -row.num_tokens)
    sizes = [row.num_tokens for row in rest]
    # Two rows of more than half the limit cannot share a bin.
    count = max(-(-sum(sizes) // max_tokens), sum(2 * size > max_tokens for size in sizes))
    while rest:
        bins: list[list[Row]] = [[] for _ in range(count)]
        # Equal loads are a heap already.
        emptiest_first = [(0, index) for index in range(count)]
        for row, size in zip(rest, sizes, strict=True):
            filled, index = emptiest_first[0]
            if filled + size > max_tokens:
                break
            bins[index].append(row)
            heapq.heapreplace(emptiest_first, (filled + size, index))
        else:
            return alone + bins
        count += 1
    return alone


def filler_row(model: PolicyModel, with_image: bool) -> Row:
    """Return a row of two tokens that the model did not write: it runs the network and adds no gradient.

    With `with_image`, the second token is the placeholder of the smallest possible image.
    """
    if with_image:
        images = (_smallest_image(model),)
    else:
        images = ()
    # A prompt alone, of which no token is scored.
    ids_T = np.array([0, model.image_token_id if with_image else 0])
    grids = [image.grid_thw for image in images]
    filler = TrainingSample(
        ids_T=ids_T,
        mask_T=np.zeros(2, dtype=np.bool_),
        turns_T=np.zeros(2, dtype=np.int64),
        logprobs_T=np.zeros(2, dtype=np.float32),
        positions_3T=mrope_positions(ids_T, grids, model.image_token_id, model.merge_size),
        images=images,
        prefix_length=2,
        num_prefix_images=len(images),
        advantage=0.0,
        weight=0.0,
    )
    return Row((filler,))


def _smallest_image(model: PolicyModel) -> ProcessedImage:
    """Return a black image of one token."""
    vision = model.config.vision_config
    merge = model.merge_size
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    # The tower merges so many patches into one token.
    pixels_PD = np.zeros((merge * merge, patch_values), dtype=np.float32)
    return ProcessedImage("filler", pixels_PD, (1, merge, merge), num_tokens=1)


def collate(
    rows: Sequence[Row], image_token_id: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> MicroBatch:
    """Pack rows into one micro-batch, for a network that computes in `dtype`."""
    ids: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    spans: list[Span] = []
    before: list[NDArray[np.int64]] = []
    end = 0
    for row in rows:
        start = end
        prefix = row.prefix_length
        first = row.samples[0]
        ids.append(first.ids_T[:prefix])
        positions.append(first.positions_3T[:, :prefix])
        end += prefix
        # A prompt that several samples share is a span of its own, which their spans see.
        shares = len(row.samples) > 1
        if shares:
            spans.append(Span(start, prefix))
        for sample in row.samples:
            assert prefix > 0 and not sample.mask_T[:prefix].any(), "a stream begins with a prompt"
            own = len(sample.ids_T) - prefix
            spans.append(Span(end, own, start, prefix) if shares else Span(start, prefix + own))
            ids.append(sample.ids_T[prefix:])
            positions.append(sample.positions_3T[:, prefix:])
            # The logits at t - 1 predict token t; the prompt's last token predicts the first token after it.
            before_T = np.flatnonzero(sample.mask_T) - 1
            before.append(np.where(before_T < prefix, before_T + start, before_T - prefix + end))
            end += own
    samples = tuple(sample for row in rows for sample in row.samples)
    targets_N = np.concatenate([s.ids_T[s.mask_T] for s in samples])
    packed = PackedStreams.build(
        ids_T=np.concatenate(ids),
        positions_3T=np.concatenate(positions, axis=1),
        spans=[span for span in spans if span.length],
        images=[row.images for row in rows],
        before_N=np.concatenate(before),
        targets_N=targets_N,
        image_token_id=image_token_id,
        device=device,
        with_buckets=needs_buckets(torch.device(device), dtype),
        kept_NK=_kept_ids(samples, len(targets_N)),
        routes_TLK=_routes(rows),
    )
    return MicroBatch(**vars(token_batch(samples, device)), packed=packed)


def _kept_ids(samples: Sequence[TrainingSample], num_tokens: int) -> NDArray[np.int64] | None:
    """Return the ids that each model token was drawn from; None where that was the whole vocabulary."""
    kept = [sample.kept_NK for sample in samples if sample.kept_NK is not None]
    if not kept:
        return None
    kept_NK = np.concatenate(kept).astype(np.int64)
    assert len(kept_NK) == num_tokens, f"{len(kept_NK)} sets of kept ids for {num_tokens} tokens"
    return kept_NK


def _routes(rows: Sequence[Row]) -> NDArray[np.int16] | None:
    """Return the experts of each packed token, as `row_routes` does."""
    placed: list[tuple[int, Routes | None]] = []
    start = 0
    for row in rows:
        first = 0
        for sample in row.samples:
            # The tokens of a shared prompt come once, with those of the first sample.
            placed.append((start, None if sample.routes_RLK is None else sample.routes_RLK[first:]))
            start += len(sample.ids_T) - first
            first = row.prefix_length
    return row_routes(placed, start)


def row_routes(placed: Iterable[tuple[int, Routes | None]], num_tokens: int) -> NDArray[np.int16] | None:
    """Return the experts (T, L, K) of the tokens of a row, -1 where they are not known; None where those of none are.

    `placed` are places in the row, and the experts of the tokens from there on.
    """
    known = [(start, routes_RLK) for start, routes_RLK in placed if routes_RLK is not None]
    if not known:
        return None
    # Filled in place: of a long micro-batch these are tens of megabytes.
    routes_TLK = np.full((num_tokens, *known[0][1].shape[1:]), -1, dtype=np.int16)
    for start, routes_RLK in known:
        routes_TLK[start : start + len(routes_RLK)] = routes_RLK
    return routes_TLK


def token_batch(samples: Sequence[TrainingSample], device: torch.device | str) -> TokenBatch:
    """Return the inputs of the loss for the model tokens of samples, in their order."""
    counts = [int(s.mask_T.sum()) for s in samples]

    def tensor(array: np.ndarray) -> torch.Tensor:
        # Kernels on the device wait for the copy in order, this thread need not.
        return torch.from_numpy(array).to(device, non_blocking=True)

    return TokenBatch(
        # The order of tokens here is that of `before_N` and `targets_N` in `collate`.
        samples=tuple(samples),
        sample_N=tensor(np.repeat(np.arange(len(samples)), counts)),
        turns_N=tensor(np.concatenate([s.turns_T[s.mask_T] for s in samples])),
        rollout_logprobs_N=tensor(np.concatenate([s.logprobs_T[s.mask_T] for s in samples])),
        advantages_N=tensor(np.concatenate([s.advantages_N for s in samples])),
        weights_N=tensor(np.repeat([np.float32(s.weight) for s in samples], counts)),
    )
