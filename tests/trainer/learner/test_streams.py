"""Claims about a training step on episodes of several streams, which the embedded engine plays with a cut history.

Legend: T tokens of one stream, N of them that the model wrote, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from agents.engines.hf import HFEngine
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.manager import rollout_groups
from agents.types import EndReason, SamplingParams, TokenStream, Trajectory, TrajectoryGroup
from envs.coins import CoinsEnv, samples
from envs.env import EnvArgs
from envs.history import History
from tests.builders import fresh_model, sampling
from tests.processes import run_ranks
from tests.trainer.steps import Stepped, rank_main, relative, take_step
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import pack_rows, training_samples
from trainer.learner.rank_split import split_samples
from trainer.types import TrainingSample

TURNS = 3
#: Terms that see all of a stream or an episode: its ratio, its length, and the entropies of its tokens.
ALGORITHM = AlgorithmConfig(aggregation="seq-mean-token-mean", correction="mis", entropy_coef=0.5)


@pytest.fixture(scope="module")
def params(renderer: Renderer) -> SamplingParams:
    """Of all ids, the network may write ten and the one that ends its turn, so turns are short."""
    params = sampling(renderer)
    written = {*range(300, 310), *renderer.stop_ids}
    return replace(params, suppressed_ids=tuple(sorted({*range(730), *params.suppressed_ids} - written)))


@pytest.fixture(scope="module")
def groups(checkpoint: Path, renderer: Renderer, params: SamplingParams) -> list[TrajectoryGroup]:
    """Two groups of two games of coins: one sees the last image alone, the other its opening and the last turn."""
    engine = HFEngine(fresh_model(checkpoint))
    limits = Limits(max_turns=TURNS, max_new_tokens=600, check_template_every=1)
    args = EnvArgs(max_turns=TURNS)
    played = []
    for number, history in enumerate([History(keep_images=1), History(keep_turns=1)]):
        episode = Episode(engine, renderer, limits, params, history=history)
        [group] = asyncio.run(rollout_groups(episode, samples("train", 1, number), CoinsEnv, args, 2, seed=1))
        trajectories = tuple(replace(t, group=number) for t in group.trajectories)
        played.append(replace(group, trajectories=trajectories))
    return played


def advantages_of(trajectory: Trajectory) -> tuple[float, ...]:
    rng = np.random.default_rng([trajectory.group, trajectory.sample_index])
    return tuple(rng.normal(size=len(trajectory.turns)).tolist())


def samples_of(checkpoint: Path, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
    model = fresh_model(checkpoint)
    advantages = [[advantages_of(t) for t in group.trajectories] for group in groups]
    return training_samples(groups, advantages, model.image_token_id, model.merge_size, ALGORITHM, 600)


def test_a_step_on_windowed_episodes_finds_the_engine_and_the_trainer_equal(
    checkpoint: Path, groups: list[TrajectoryGroup], params: SamplingParams
) -> None:
    played = [t for group in groups for t in group.trajectories]
    assert all(t.end_reason is EndReason.MAX_TURNS for t in played), [t.error for t in played]
    images = [[len(stream.images) for stream in t.streams] for t in played]
    assert images == [[1, 1, 1], [1, 1, 1], [2, 2], [2, 2]]
    trained = samples_of(checkpoint, groups)
    stats = take_step(checkpoint, trained, params, algorithm=ALGORITHM).stats
    assert stats.num_tokens == sum(t.num_model_tokens for t in played)
    assert stats.logprobs.keys() == {(*t.key, stream) for t in played for stream in range(len(t.streams))}
    assert len(stats.kl_by_turn) == TURNS
    assert max(stats.rollout_train_kl, *stats.kl_by_turn) < 1e-8


def with_noise(trajectory: Trajectory) -> Trajectory:
    """Return the episode as if the engine had found its tokens a little more or less likely."""
    rng = np.random.default_rng([trajectory.group, trajectory.sample_index])

    def moved(stream: TokenStream) -> TokenStream:
        noise_T = rng.normal(0, 0.1, len(stream.ids_T)).astype(np.float32) * stream.mask_T
        return replace(stream, logprobs_T=stream.logprobs_T + noise_T)

    first, *later = map(moved, trajectory.streams)
    return replace(trajectory, logprobs_T=first.logprobs_T, later=tuple(later))


@dataclass
class Plain:
    """What a step is by Transformers' own forward over each stream, and by the formulas of the loss."""

    loss: float
    gradients: dict[str, Tensor]
    entropy: float
    kl_by_turn: list[float]
    logprobs: dict[tuple[int, int, int, int], Tensor]


def scores(network: Any, stream: TokenStream, suppressed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of each token that the model wrote in a stream."""
    ids_1T = torch.from_numpy(stream.ids_T)[None]
    logits_TV = network(
        input_ids=ids_1T,
        use_cache=False,
        pixel_values=torch.from_numpy(np.concatenate([image.pixels_PD for image in stream.images])),
        image_grid_thw=torch.tensor([image.grid_thw for image in stream.images]),
        mm_token_type_ids=(ids_1T == network.config.image_token_id).int(),
    ).logits[0, :-1]
    allowed_V = torch.ones(logits_TV.shape[-1], dtype=torch.bool)
    allowed_V[list(suppressed)] = False
    table_NV = logits_TV[stream.mask_T[1:]].masked_fill(~allowed_V, -torch.inf).log_softmax(-1)
    written_N = torch.from_numpy(stream.ids_T[stream.mask_T])
    entropy_N = -(table_NV[:, allowed_V].exp() * table_NV[:, allowed_V]).sum(-1)
    return table_NV.gather(-1, written_N[:, None])[:, 0], entropy_N


def plain_step(checkpoint: Path, groups: Sequence[TrajectoryGroup], params: SamplingParams) -> Plain:
    network = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    episodes = [t for group in groups for t in group.trajectories]
    loss = torch.zeros(())
    entropies: list[Tensor] = []
    kl: list[list[Tensor]] = [[] for _ in range(TURNS)]
    logprobs = {}
    for t in episodes:
        weight = 1 / (len(episodes) * sum(int(stream.mask_T.sum()) for stream in t.streams))
        for place, stream in enumerate(t.streams):
            logprobs_N, entropy_N = scores(network, stream, params.suppressed_ids)
            fixed_N = logprobs_N.detach()
            gap_N = fixed_N - torch.from_numpy(stream.logprobs_T[stream.mask_T])
            # The ratio is that of the stream; out of bounds, the stream is left out.
            ratio = gap_N.sum().exp()
            ratio = ratio * (ALGORITHM.correction_low <= ratio) * (ratio <= ALGORITHM.correction_high)
            start = 0
            for number, turn in enumerate(t.turns):
                if turn.stream == place:
                    own = slice(start, start + turn.end - turn.start)
                    start = own.stop
                    advantage = advantages_of(t)[number]
                    policy_N = -advantage * ratio * (logprobs_N[own] - fixed_N[own]).exp()
                    loss = loss + weight * (policy_N - 0.5 * entropy_N[own]).sum()
                    kl[number].append(gap_N[own].exp() - 1 - gap_N[own])
            entropies.append(entropy_N.detach())
            logprobs[*t.key, place] = fixed_N
    loss.backward()
    gradients = {f"backbone.{name}": p.grad for name, p in network.named_parameters() if p.grad is not None}
    by_turn = [float(torch.cat(own).mean()) for own in kl]
    return Plain(loss.item(), gradients, float(torch.cat(entropies).mean()), by_turn, logprobs)


@pytest.fixture(scope="module")
def noisy(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [replace(group, trajectories=tuple(map(with_noise, group.trajectories))) for group in groups]


@pytest.fixture(scope="module")
def plain(checkpoint: Path, noisy: list[TrajectoryGroup], params: SamplingParams) -> Plain:
    return plain_step(checkpoint, noisy, params)


def assert_same_step(got: Stepped, plain: Plain) -> None:
    assert got.stats.loss == pytest.approx(plain.loss, rel=1e-5)
    assert relative(got.gradients, plain.gradients) < 2e-5
    assert got.stats.entropy == pytest.approx(plain.entropy, rel=1e-5)
    assert got.stats.kl_by_turn == pytest.approx(plain.kl_by_turn, rel=1e-3)


@pytest.mark.parametrize(("max_tokens", "num_rows"), [(1, 10), (100_000, 3)], ids=["every stream alone", "shared"])
def test_a_step_is_that_of_transformers_on_each_stream(
    checkpoint: Path,
    noisy: list[TrajectoryGroup],
    params: SamplingParams,
    plain: Plain,
    max_tokens: int,
    num_rows: int,
) -> None:
    trained = samples_of(checkpoint, noisy)
    rows = pack_rows(trained, max_tokens)
    # A group that goes on seeing its opening has all its streams in one row, whose first image they share.
    assert len(rows) == num_rows and rows[-1].samples[-1].num_prefix_images == 1
    got = take_step(checkpoint, trained, params, max_tokens=max_tokens, algorithm=ALGORITHM)
    assert_same_step(got, plain)
    for key, expected_N in plain.logprobs.items():
        np.testing.assert_allclose(got.stats.logprobs[key], expected_N, atol=2e-5)


@pytest.mark.slow
def test_the_streams_of_an_episode_may_be_trained_on_different_ranks(
    checkpoint: Path, noisy: list[TrajectoryGroup], params: SamplingParams, plain: Plain, tmp_path: Path
) -> None:
    shares = split_samples(samples_of(checkpoint, noisy), 2)
    first, second = ({sample.key for sample in share} for share in shares)
    assert first & second
    case = {"samples": shares, "step": {"params": params, "algorithm": ALGORITHM}}
    run_ranks(rank_main, 2, tmp_path / "store", checkpoint, {"two": case}, tmp_path)
    assert_same_step(torch.load(tmp_path / "two.pt", weights_only=False), plain)
