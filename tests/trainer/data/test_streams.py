"""Claims about episodes of several streams: what their prompts share, and that no cut changes what a token weighs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from agents.types import ProcessedImage, TokenStream, Trajectory
from tests.builders import group, trajectory, turn
from trainer.algorithms.aggregation import token_weights
from trainer.config.algorithm import AggregationName, AlgorithmConfig
from trainer.data.packing import collate, pack_rows, shared_prompt, training_samples
from trainer.types import Advantage, TrainingSample

IMAGE = 9
#: The prompt of every first stream, and the tokens that come before each turn.
PROMPT, BETWEEN = [5, 6, 7], [8]

Cut = Sequence[Sequence[int]]


def image(digest: str, num_tokens: int = 2) -> ProcessedImage:
    return ProcessedImage(digest, np.zeros((4 * num_tokens, 3), np.float32), (1, 2, 2 * num_tokens), num_tokens)


def stream(ids: Sequence[int], *images: ProcessedImage, prompt_length: int | None = None) -> TokenStream:
    """Return a stream whose model tokens are those after the prompt."""
    whole = trajectory(ids, [place >= (prompt_length or len(ids)) for place in range(len(ids))], images=images)
    return replace(whole.streams[0], prompt_length=prompt_length or len(ids))


def cuts(num_turns: int) -> Iterator[list[list[int]]]:
    """Yield every way to write the turns 0, 1, ... into one or more streams, in the order in which these begin."""
    if num_turns == 0:
        yield []
        return
    last = num_turns - 1
    for before in cuts(last):
        for place in range(len(before)):
            yield [[*turns, last] if number == place else turns for number, turns in enumerate(before)]
        yield [*before, [last]]


def played(lengths: Sequence[int], cut: Cut, sample_index: int = 0) -> Trajectory:
    """Return an episode of turns of so many tokens, written in streams as the cut says; turn k writes ids 100 + k."""
    turns = {}
    streams = []
    for place, numbers in enumerate(cut):
        ids = [*PROMPT] if place == 0 else [*PROMPT, 20 + place]
        mask = [0] * len(ids)
        for number in numbers:
            ids += [*BETWEEN, *[100 + number] * lengths[number]]
            mask += [0] * len(BETWEEN) + [1] * lengths[number]
            turns[number] = replace(turn(len(ids) - lengths[number], len(ids)), stream=place)
        streams.append(trajectory(ids, mask))
    later = tuple(replace(one.streams[0], prompt_length=len(PROMPT) + 1) for one in streams[1:])
    in_order = tuple(turns[number] for number in sorted(turns))
    return replace(
        streams[0], turns=in_order, later=later, prompt_length=len(PROMPT), sample_index=sample_index, group=4
    )


def samples_of(
    episodes: Sequence[Trajectory], advantages: Sequence[Advantage], mode: AggregationName = "token-mean"
) -> list[TrainingSample]:
    algorithm = AlgorithmConfig(aggregation=mode)
    return training_samples([group(*episodes)], [advantages], IMAGE, 2, algorithm, max_new_tokens=50)


def test_all_cuts_are_enumerated() -> None:
    assert [len(list(cuts(number))) for number in range(6)] == [1, 1, 2, 5, 15, 52]
    assert sorted(cuts(3)) == [[[0], [1], [2]], [[0], [1, 2]], [[0, 1], [2]], [[0, 1, 2]], [[0, 2], [1]]]


@pytest.mark.parametrize("mode", get_args(AggregationName))
def test_how_episodes_are_cut_changes_neither_weights_nor_gradient(mode: AggregationName) -> None:
    """All 75 ways to cut an episode of four turns and one of three, with an advantage for each turn.

    The policy draws every token of turn k from one distribution of its own, so the gradient by that turn's logit is the
    sum over its tokens of weight times advantage.
    """
    lengths = ([3, 1, 4, 2], [5, 2, 2])
    advantages = ((1.0, -2.0, 0.5, 3.0), (-1.0, 0.25, 2.0))
    weight_of = token_weights([sum(own) for own in lengths], mode, 50)
    expected = {
        (episode, number): (length, length * weight_of[episode], length * weight_of[episode] * advantage)
        for episode in range(2)
        for number, (length, advantage) in enumerate(zip(lengths[episode], advantages[episode], strict=True))
    }
    num_cuts = 0
    for both in itertools.product(cuts(4), cuts(3)):
        num_cuts += 1
        episodes = [played(lengths[number], cut, number) for number, cut in enumerate(both)]
        samples = samples_of(episodes, advantages, mode)
        assert [(s.key[1], s.stream) for s in samples] == [(e, p) for e in range(2) for p in range(len(both[e]))]
        sums: dict[tuple[int, int], tuple[int, float, float]] = {}
        for sample in samples:
            for token, advantage in zip(sample.ids_T[sample.mask_T].tolist(), sample.advantages_N, strict=True):
                place = (sample.key[1], token - 100)
                count, weight, gradient = sums.get(place, (0, 0.0, 0.0))
                sums[place] = (count + 1, weight + sample.weight, gradient + sample.weight * float(advantage))
        assert sums.keys() == expected.keys()
        for place, values in expected.items():
            assert sums[place] == pytest.approx(values, rel=1e-12)
    assert num_cuts == 15 * 5


# A strategy that is cut often. The policy takes strategy A with probability P. A is right with probability RIGHT_A, and
# where it is wrong, it tries in three further streams; B is right with RIGHT_B and never tries again. Trying earns
# nothing. All turns are one token.
P, RIGHT_A, RIGHT_B, RETRIES = 0.5, 0.4, 0.5, 3


def expected_gradient(by_stream: bool) -> float:
    """Return the expected gradient by the logit of P, over all groups of two with the mean reward of the other."""
    outcomes: list[tuple[bool, float, float]] = []
    for is_a, chance, right in ((True, P, RIGHT_A), (False, 1 - P, RIGHT_B)):
        outcomes += [(is_a, 1.0, chance * right), (is_a, 0.0, chance * (1 - right))]
    total = 0.0
    for pair in itertools.product(outcomes, repeat=2):
        episodes = []
        for number, (is_a, reward, _) in enumerate(pair):
            num_turns = 1 + RETRIES * (is_a and not reward)
            episodes.append(played([1] * num_turns, [[place] for place in range(num_turns)], number))
        own = [pair[0][1] - pair[1][1], pair[1][1] - pair[0][1]]
        samples = samples_of(episodes, own, "seq-mean-token-sum")
        for sample in (s for s in samples if s.stream == 0):
            weight = 1 / len(samples) if by_stream else sample.weight
            is_a = pair[sample.key[1]][0]
            total += pair[0][2] * pair[1][2] * weight * own[sample.key[1]] * (is_a - P)
    return total


def test_denominators_by_stream_teach_the_worse_strategy_because_it_is_cut_more_often() -> None:
    """The numbers of docs/algorithms.md."""
    true = P * (1 - P) * (RIGHT_A - RIGHT_B)
    assert true == pytest.approx(-0.025)
    assert expected_gradient(by_stream=False) == pytest.approx(true, abs=1e-12)
    assert expected_gradient(by_stream=True) == pytest.approx(0.020, abs=1e-12)


# What prompts share -------------------------------------------------------------------------------------------------

CAT, DOG, LARGE = image("cat"), image("dog"), image("large", num_tokens=3)


@pytest.mark.parametrize(
    ("first", "later", "shared"),
    [
        (stream([1, 2, 3]), stream([1, 2, 3]), 3),
        (stream([1, 2, 3]), stream([1, 2, 3, 4, 5]), 3),
        (stream([1, 2, 3, 4]), stream([1, 2]), 2),
        (stream([1, 2, 3]), stream([1, 4, 3]), 1),
        (stream([1, 2]), stream([3, 2]), 0),
        (stream([1, 2, 7, 8], prompt_length=2), stream([1, 2, 7, 8]), 2),
        (stream([1, 2, 7, 8]), stream([1, 2, 7, 8], prompt_length=3), 3),
        (stream([1, IMAGE, IMAGE, 2], CAT), stream([1, IMAGE, IMAGE, 2, 3], CAT), 4),
        (stream([1, IMAGE, IMAGE, 2], CAT), stream([1, IMAGE, IMAGE, 2], DOG), 1),
        (stream([1, IMAGE, IMAGE, 2], CAT), stream([1, 4, 2]), 1),
        (stream([1, IMAGE, IMAGE, 2], CAT), stream([1, IMAGE, IMAGE, IMAGE, 2], LARGE), 1),
        (stream([1, IMAGE, IMAGE, IMAGE], LARGE), stream([1, IMAGE, IMAGE, 3], CAT), 1),
        (stream([1, IMAGE, IMAGE, IMAGE, IMAGE], CAT, DOG), stream([1, IMAGE, IMAGE, IMAGE, IMAGE], CAT, CAT), 3),
        (stream([IMAGE, IMAGE, 2], CAT), stream([IMAGE, IMAGE, 2], DOG), 0),
    ],
)
def test_prompts_share_their_longest_common_beginning_with_whole_and_equal_images(
    first: TokenStream, later: TokenStream, shared: int
) -> None:
    assert shared_prompt(first, later, IMAGE) == shared


def test_streams_of_a_group_share_a_row_where_they_begin_alike() -> None:
    """Later streams begin with the first stream's prompt, whose image is gone: of every episode at the same place."""
    told = [1, 2, IMAGE, IMAGE, 3]
    cut = replace(stream([1, 2, 4, 3, 100, 8, 101], prompt_length=6), turns=())
    whole = trajectory([*told, 100], [0] * 5 + [1], images=[CAT], reward=1.0)
    turns = (*whole.turns, replace(turn(6, 7), stream=1))
    episodes = [replace(whole, turns=turns, later=(cut,), sample_index=number) for number in range(2)]
    samples = samples_of(episodes, [1.0, -1.0])
    assert [(s.key[1], s.stream, s.prefix_length, s.num_prefix_images) for s in samples] == [
        (0, 0, 5, 1),
        (0, 1, 2, 0),
        (1, 0, 5, 1),
        (1, 1, 2, 0),
    ]
    assert [s.turns_T[s.mask_T].tolist() for s in samples] == [[1], [2]] * 2
    first, later = pack_rows(samples, 100)
    assert (first.num_tokens, later.num_tokens) == (5 + 1 + 1, 2 + 5 + 5)
    packed = collate([first, later], IMAGE, "cpu").packed
    assert packed.ids_T.tolist() == [*told, 100, 100, 1, 2, *[4, 3, 100, 8, 101] * 2]
    assert packed.targets_N.tolist() == [100, 100, 101, 101]


def test_a_prompt_that_shares_nothing_is_its_own() -> None:
    cut = stream([40, 41, 101], prompt_length=2)
    whole = trajectory([5, 6, 100], [0, 0, 1])
    turns = (*whole.turns, replace(turn(2, 3), stream=1))
    samples = samples_of([replace(whole, turns=turns, later=(cut,)), trajectory(reward=0.0)], [1.0, -1.0])
    assert [s.prefix_length for s in samples[:2]] == [2, 2]
    assert len(pack_rows(samples[:2], 100)) == 2


def test_a_stream_in_which_the_model_wrote_nothing_is_no_sample() -> None:
    whole = trajectory([5, 6, 100], [0, 0, 1])
    silent = replace(whole, later=(stream([5, 6, 8]),))
    samples = samples_of([silent, trajectory([5, 6, 100], [0, 0, 1])], [1.0, -1.0])
    assert [(s.stream, s.weight) for s in samples] == [(0, 0.5), (0, 0.5)]


def test_streams_of_two_groups_that_begin_alike_are_not_tied_together() -> None:
    """They would fill one row, or one rank, for the sake of a few tokens."""
    cut: Mapping[int, Trajectory] = {number: played([2, 2], [[0], [1]], number) for number in range(2)}
    other = [replace(episode, group=5) for episode in cut.values()]
    samples = [*samples_of([*cut.values()], [1.0, -1.0]), *samples_of(other, [1.0, -1.0])]
    assert [{s.key[0] for s in row.samples} for row in pack_rows(samples, 1000)] == [{4}, {5}]
