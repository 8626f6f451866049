"""Claims about the stream of one episode, against the tokens that it was given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agents.rendering.renderer import Rendered
from agents.rollout.stream import Stream, first_difference
from agents.types import Completion, ProcessedImage


def image(digest: str) -> ProcessedImage:
    return ProcessedImage(digest, np.empty((0, 0), np.float32), (1, 2, 2), 1)


def completion(*ids: int, logprobs: tuple[float, ...]) -> Completion:
    return Completion(ids, logprobs, "stop", 0, ((0, len(ids)),))


def test_the_mask_and_the_log_probs_are_those_of_the_models_tokens_and_zero_elsewhere() -> None:
    stream, first, second = Stream(), image("a"), image("b")
    assert (stream.ids, stream.images, stream.prompt_length, stream.pieces) == ((), (), 0, [])
    prompt = Rendered((1, 9, 2), (first,))
    stream.read(prompt)
    one = completion(5, 6, logprobs=(-0.5, -0.25))
    assert stream.write(one) == (3, 5)
    observed = Rendered((9, 3), (second,))
    stream.read(observed)
    other = completion(7, logprobs=(-2.0,))
    assert stream.write(other) == (7, 8)
    assert stream.ids == (1, 9, 2, 5, 6, 9, 3, 7)
    assert stream.images == (first, second)
    assert stream.pieces == [prompt, one, observed, other]
    assert stream.prompt_length == 3
    ids_T, mask_T, logprobs_T = stream.arrays()
    assert (ids_T.dtype, mask_T.dtype, logprobs_T.dtype) == (np.int64, np.bool_, np.float32)
    assert ids_T.tolist() == list(stream.ids)
    assert mask_T.tolist() == [False, False, False, True, True, False, False, True]
    assert logprobs_T.tolist() == [0, 0, 0, -0.5, -0.25, 0, 0, -2.0]


def test_log_probs_that_are_too_few_or_too_many_are_left_zero_and_the_mask_stays() -> None:
    for logprobs in ((-1.0,), (-1.0, -1.0, -1.0), ()):
        stream = Stream()
        stream.read(Rendered((1,), ()))
        stream.write(completion(5, 6, logprobs=logprobs))
        _, mask_T, logprobs_T = stream.arrays()
        assert (mask_T.tolist(), logprobs_T.tolist()) == ([False, True, True], [0, 0, 0])


def test_an_empty_stream_has_empty_arrays() -> None:
    arrays = Stream().arrays()
    assert [array.tolist() for array in arrays] == [[], [], []]
    assert [array.dtype for array in arrays] == [np.int64, np.bool_, np.float32]


def test_a_stream_that_was_given_out_does_not_grow() -> None:
    stream = Stream()
    stream.read(Rendered((1, 2), ()))
    given = stream.ids
    stream.write(completion(5, logprobs=(-1.0,)))
    assert (given, stream.ids) == ((1, 2), (1, 2, 5))


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 5, 3], 1),
        ([4, 2], [5, 2], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 2, 3], 1),
        ([], [1], 0),
        ([1, 2, 9], [1, 3], 1),
    ],
)
def test_two_streams_differ_first_where_their_tokens_do_or_the_shorter_ends(
    one: list[int], other: list[int], place: int
) -> None:
    assert first_difference(one, other) == place


def test_the_experts_of_a_stream_are_those_of_its_turns_and_none_if_one_has_none_or_was_cut_off() -> None:
    rows = np.arange(7 * 2, dtype=np.uint8).reshape(7, 1, 2)
    first = replace(completion(5, 6, logprobs=(-1.0, -1.0)), routes_RLK=rows[:4])
    # Two rows more than are new: the stream has them already.
    second = replace(completion(7, logprobs=(-1.0,)), routes_RLK=np.concatenate([rows[2:4] + 100, rows[4:]]))
    stream = Stream()
    assert (stream.num_routed, stream.routes_RLK, stream.last_turn) == (0, None, None)
    stream.read(Rendered((1, 9, 2), ()))
    stream.write(first)
    assert stream.num_routed == 4
    stream.read(Rendered((9, 3), ()))
    stream.write(second)
    assert stream.num_routed == 7
    found = stream.routes_RLK
    assert found is not None and found.dtype == np.uint8 and np.array_equal(found, rows)
    for spoiled in (replace(second, routes_RLK=None), replace(second, finish="abort", routes_RLK=rows[:, :, :1])):
        other = Stream()
        other.read(Rendered((1, 9, 2), ()))
        other.write(first)
        other.read(Rendered((9, 3), ()))
        other.write(spoiled)
        assert other.routes_RLK is None
