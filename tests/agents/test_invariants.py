"""Claims about the rules of a finished stream: each broken one is named with its numbers, and valid streams pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.invariants import broken_invariant
from agents.types import ProcessedImage, Trajectory
from tests.builders import trajectory, turn

IMAGE, VISION_START, MERGE = 9, 8, 2
SUPPRESSED = (VISION_START, IMAGE)


def image(height: int, width: int) -> ProcessedImage:
    """Return an image by its patch grid alone."""
    return ProcessedImage("", np.empty((0, 0), np.float32), (1, height, width), height * width // MERGE**2)


def broken(t: Trajectory) -> str | None:
    return broken_invariant(t, IMAGE, MERGE, SUPPRESSED)


def valid() -> Trajectory:
    """Prompt of four tokens, two of them one image's, then two turns with an environment token between them."""
    return trajectory([1, IMAGE, IMAGE, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1, 0, 1], images=[image(2, 4)])


def changed(t: Trajectory, name: str, place: int, value: float) -> Trajectory:
    array = getattr(t, name).copy()
    array[place] = value
    return replace(t, **{name: array})


def with_turns(t: Trajectory, *spans: tuple[int, int]) -> Trajectory:
    return replace(t, turns=tuple(turn(*span) for span in spans))


def test_a_valid_stream_breaks_no_rule() -> None:
    assert broken(valid()) is None
    assert [(t.start, t.end) for t in valid().turns] == [(4, 6), (7, 8)]


BREAKS: dict[str, tuple[Callable[[Trajectory], Trajectory], str]] = {
    "an id too many": (
        lambda t: replace(t, ids_T=np.append(t.ids_T, 1)),
        "lengths differ: 9 ids, 8 mask, 8 logprobs",
    ),
    "a mask too short": (
        lambda t: replace(t, mask_T=t.mask_T[:-1]),
        "lengths differ: 8 ids, 7 mask, 8 logprobs",
    ),
    "a log-prob too many": (
        lambda t: replace(t, logprobs_T=np.append(t.logprobs_T, 0)),
        "lengths differ: 8 ids, 8 mask, 9 logprobs",
    ),
    "a turn in the prompt": (lambda t: with_turns(t, (3, 6), (7, 8)), "turn 1: span 3:6 after 4 in a stream of 8"),
    "turns out of order": (lambda t: with_turns(t, (7, 8), (4, 6)), "turn 2: span 4:6 after 8 in a stream of 8"),
    "overlapping turns": (lambda t: with_turns(t, (4, 6), (5, 8)), "turn 2: span 5:8 after 6 in a stream of 8"),
    "a turn past the end": (lambda t: with_turns(t, (4, 6), (7, 9)), "turn 2: span 7:9 after 6 in a stream of 8"),
    "a turn backwards": (lambda t: with_turns(t, (6, 4), (7, 8)), "turn 1: span 6:4 after 4 in a stream of 8"),
    "a masked environment token": (lambda t: changed(t, "mask_T", 6, 1), "mask covers 4 tokens, the turns 3"),
    "an unmasked model token": (lambda t: changed(t, "mask_T", 5, 0), "mask covers 2 tokens, the turns 3"),
    "a missing turn": (lambda t: with_turns(t, (4, 6)), "mask covers 3 tokens, the turns 2"),
    "a placeholder too many": (lambda t: changed(t, "ids_T", 3, IMAGE), "3 image placeholders, 2 in the image grids"),
    "a placeholder missing": (lambda t: changed(t, "ids_T", 1, 1), "1 image placeholders, 2 in the image grids"),
    "an image missing": (lambda t: replace(t, images=()), "2 image placeholders, 0 in the image grids"),
    "an image token sampled": (
        lambda t: replace(changed(t, "ids_T", 5, IMAGE), images=(image(2, 6),)),
        "the model sampled a suppressed id: [9]",
    ),
    "a vision token sampled": (
        lambda t: changed(t, "ids_T", 7, VISION_START),
        "the model sampled a suppressed id: [8]",
    ),
    "a log-prob that is no number": (lambda t: changed(t, "logprobs_T", 4, np.nan), "log-probs must be finite"),
    "a log-prob of minus infinity": (lambda t: changed(t, "logprobs_T", 4, -np.inf), "log-probs must be finite"),
    "a positive log-prob": (lambda t: changed(t, "logprobs_T", 4, 0.5), "at most 0, got -1.0 to 0.5"),
    "a log-prob outside the mask": (lambda t: changed(t, "logprobs_T", 6, -0.5), "outside the mask must be 0"),
}


@pytest.mark.parametrize(("damage", "rule"), BREAKS.values(), ids=BREAKS.keys())
def test_a_broken_rule_is_named(damage: Callable[[Trajectory], Trajectory], rule: str) -> None:
    assert rule in (broken(damage(valid())) or "")


def test_a_vision_token_of_the_environment_breaks_no_rule() -> None:
    assert broken(changed(valid(), "ids_T", 6, VISION_START)) is None


def test_a_stream_without_model_tokens_breaks_no_rule() -> None:
    assert broken(trajectory([1, 2], [0, 0])) is None
    assert broken(trajectory([], [])) is None


segment = st.tuples(
    st.integers(1, 5), st.integers(1, 5), st.lists(st.sampled_from([(2, 2), (2, 4), (4, 6)]), max_size=2)
)


@settings(max_examples=60)
@given(segments=st.lists(segment, min_size=1, max_size=4), data=st.data())
def test_random_valid_streams_pass_and_any_flip_of_the_mask_does_not(
    segments: list[tuple[int, int, list[tuple[int, int]]]], data: st.DataObject
) -> None:
    ids: list[int] = []
    mask: list[int] = []
    images: list[ProcessedImage] = []
    for read, written, grids in segments:
        images += [image(*grid) for grid in grids]
        placeholders = sum(height * width // MERGE**2 for height, width in grids)
        ids += [1] * read + [IMAGE] * placeholders + [2] * written
        mask += [0] * (read + placeholders) + [1] * written
    t = trajectory(ids, mask, images=images)
    assert broken(t) is None
    place = data.draw(st.integers(0, len(ids) - 1))
    assert broken(changed(t, "mask_T", place, not mask[place])) is not None
