"""Claims about the rules of a stream: a broken one is named with turn, tokens and numbers, and valid streams pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.rendering.renderer import Rendered
from agents.rollout.invariants import (
    MAX_LOGPROB,
    Vocabulary,
    broken_invariant,
    broken_routes,
    broken_turn,
    check_types,
    expert_twice,
)
from agents.rollout.stream import Stream
from agents.types import (
    Completion,
    EndReason,
    GenerateRequest,
    ProcessedImage,
    RouteShape,
    SamplingParams,
    Trajectory,
    Turn,
)
from tests.budget import examples
from tests.builders import trajectory, turn

IMAGE, VISION_START, MERGE = 9, 8, 2
LETTERS = {each: chr(ord("a") + each) for each in range(10)}
VOCABULARY = Vocabulary(IMAGE, MERGE, frozenset({VISION_START, IMAGE}), lambda ids: LETTERS[ids[0]])


def image(height: int, width: int) -> ProcessedImage:
    """Return an image by its patch grid alone."""
    return ProcessedImage("", np.empty((0, 0), np.float32), (1, height, width), height * width // MERGE**2)


def broken(t: Trajectory, pieces: Sequence[Rendered | Completion] = ()) -> str | None:
    return broken_invariant(t.streams[0], VOCABULARY, pieces)


def valid() -> Trajectory:
    """Prompt of four tokens, two of them one image's, then two turns with an environment token between them."""
    return trajectory([1, IMAGE, IMAGE, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1, 0, 1], images=[image(2, 4)])


def changed(t: Trajectory, name: str, place: int, value: float) -> Trajectory:
    array = getattr(t, name).copy()
    array[place] = value
    return replace(t, **{name: array})


def with_turns(t: Trajectory, *spans: tuple[int, int]) -> Trajectory:
    return replace(t, turns=tuple(turn(*span) for span in spans))


def with_versions(t: Trajectory, *runs: tuple[int, int]) -> Trajectory:
    return replace(t, turns=(t.turns[0], replace(t.turns[1], versions=runs)))


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
    "a turn in the prompt": (lambda t: with_turns(t, (3, 6), (7, 8)), "turn 1: begins at 3, the prompt ends at 4"),
    "a token before turn 1": (lambda t: replace(t, prompt_length=3), "turn 1: begins at 4, the prompt ends at 3"),
    "turns out of order": (
        lambda t: with_turns(t, (4, 8), (4, 6)),
        "turn 2: span 4:6 after 8 in a stream of 8",
    ),
    "overlapping turns": (lambda t: with_turns(t, (4, 6), (5, 8)), "turn 2: span 5:8 after 6 in a stream of 8"),
    "a turn past the end": (lambda t: with_turns(t, (4, 6), (7, 9)), "turn 2: span 7:9 after 6 in a stream of 8"),
    "a turn backwards": (lambda t: with_turns(t, (4, 6), (7, 6)), "turn 2: span 7:6 after 6 in a stream of 8"),
    "a masked environment token": (lambda t: changed(t, "mask_T", 6, 1), "mask covers 4 tokens, the turns 3"),
    "an unmasked model token": (lambda t: changed(t, "mask_T", 5, 0), "mask covers 2 tokens, the turns 3"),
    "a missing turn": (lambda t: with_turns(t, (4, 6)), "mask covers 3 tokens, the turns 2"),
    "a version short": (lambda t: with_versions(t), "turn 2: versions () do not add up to the 1 tokens of the turn"),
    "a version too long": (
        lambda t: with_versions(t, (3, 1), (4, 1)),
        "turn 2: versions ((3, 1), (4, 1)) do not add up to the 1 tokens of the turn",
    ),
    "a negative run": (
        lambda t: with_versions(t, (3, 2), (4, -1)),
        "turn 2: versions ((3, 2), (4, -1)) do not add up to the 1 tokens of the turn",
    ),
    "a placeholder too many": (lambda t: changed(t, "ids_T", 3, IMAGE), "3 image placeholders, 2 in the image grids"),
    "a placeholder missing": (lambda t: changed(t, "ids_T", 1, 1), "1 image placeholders, 2 in the image grids"),
    "an image missing": (lambda t: replace(t, images=()), "2 image placeholders, 0 in the image grids"),
    "a run cut in two": (
        lambda t: changed(changed(t, "ids_T", 0, IMAGE), "ids_T", 1, 1),
        "image 1: a run of 1 placeholders at 0, 2 in its grid (1, 2, 4), num_tokens 2",
    ),
    "images in the wrong order": (
        lambda t: replace(changed(t, "ids_T", 6, IMAGE), images=(image(2, 2), image(2, 4))),
        "image 1: a run of 2 placeholders at 1, 1 in its grid (1, 2, 2), num_tokens 1",
    ),
    "two images in one run": (
        lambda t: replace(t, images=(image(2, 2), image(2, 2))),
        "image 1: a run of 2 placeholders at 1, 1 in its grid (1, 2, 2), num_tokens 1",
    ),
    "a wrong number in the image": (
        lambda t: replace(t, images=(replace(t.images[0], num_tokens=3),)),
        "image 1: a run of 2 placeholders at 1, 2 in its grid (1, 2, 4), num_tokens 3",
    ),
    "a film whose frames were not counted": (
        lambda t: replace(t, images=(replace(t.images[0], grid_thw=(3, 2, 4)),)),
        "2 image placeholders, 6 in the image grids",
    ),
    "the second image too short": (
        lambda t: replace(changed(t, "ids_T", 6, IMAGE), images=(t.images[0], replace(image(2, 2), num_tokens=2))),
        "image 2: a run of 1 placeholders at 6, 1 in its grid (1, 2, 2), num_tokens 2",
    ),
    "an empty image too many": (
        lambda t: replace(t, images=(*t.images, image(0, 0))),
        "1 runs of image placeholders, 2 images",
    ),
    "an image token sampled": (
        lambda t: replace(changed(t, "ids_T", 5, IMAGE), images=(image(2, 6),)),
        "turn 1: the model sampled suppressed ids: [9 'j'] at [5]",
    ),
    "vision tokens sampled": (
        lambda t: changed(changed(t, "ids_T", 5, VISION_START), "ids_T", 7, VISION_START),
        "turn 1: the model sampled suppressed ids: [8 'i', 8 'i'] at [5, 7]",
    ),
    "a log-prob that is no number": (
        lambda t: changed(t, "logprobs_T", 7, np.nan),
        "turn 2: log-probs must be finite and at most 0, got nan at 7",
    ),
    "a log-prob of minus infinity": (
        lambda t: changed(t, "logprobs_T", 4, -np.inf),
        "turn 1: log-probs must be finite and at most 0, got -inf at 4",
    ),
    "a positive log-prob": (
        lambda t: changed(t, "logprobs_T", 4, 0.5),
        "turn 1: log-probs must be finite and at most 0, got 0.5 at 4",
    ),
    "a log-prob outside the mask": (
        lambda t: changed(t, "logprobs_T", 6, -0.5),
        "log-probs outside the mask must be 0, got -0.5 at 6",
    ),
}


@pytest.mark.parametrize(("damage", "rule"), BREAKS.values(), ids=BREAKS.keys())
def test_a_broken_rule_is_named(damage: Callable[[Trajectory], Trajectory], rule: str) -> None:
    assert broken(damage(valid())) == rule


def test_images_may_stand_at_both_ends_of_what_was_read_and_have_several_frames() -> None:
    film = replace(image(2, 2), grid_thw=(2, 2, 2), num_tokens=2)
    ids = [IMAGE, 1, IMAGE, IMAGE, 3, 4, IMAGE, 5, IMAGE, IMAGE]
    mask = [0, 0, 0, 0, 1, 1, 0, 1, 0, 0]
    assert broken(trajectory(ids, mask, images=[image(2, 2), film, image(2, 2), image(2, 4)])) is None
    short = trajectory(ids, mask, images=[image(2, 2), film, image(2, 4), image(2, 2)])
    assert broken(short) == "image 3: a run of 1 placeholders at 6, 2 in its grid (1, 2, 4), num_tokens 2"


def test_the_first_of_many_faults_is_named_and_no_more_than_four_ids_are_shown() -> None:
    t = trajectory([1, 2, *[VISION_START] * 6], [0, 0, 1, 1, 1, 1, 1, 1])
    ids = ", ".join(["8 'i'"] * 4)
    assert broken(t) == f"turn 1: the model sampled suppressed ids: [{ids}] at [2, 3, 4, 5]"
    positive = changed(changed(valid(), "logprobs_T", 5, 0.5), "logprobs_T", 7, np.nan)
    assert broken(positive) == "turn 1: log-probs must be finite and at most 0, got 0.5 at 5"
    at_most = changed(changed(valid(), "logprobs_T", 4, MAX_LOGPROB), "logprobs_T", 7, np.nan)
    assert broken(at_most) == "turn 2: log-probs must be finite and at most 0, got nan at 7"
    outside = changed(changed(valid(), "logprobs_T", 3, -0.5), "logprobs_T", 6, -1.0)
    assert broken(outside) == "log-probs outside the mask must be 0, got -0.5 at 3"


def test_a_log_prob_that_is_no_number_outside_of_all_turns_is_of_turn_0() -> None:
    assert broken(changed(valid(), "logprobs_T", 3, np.nan)) == (
        "turn 0: log-probs must be finite and at most 0, got nan at 3"
    )
    # A turn ends before its end: token 6 stands between the turns.
    assert broken(changed(valid(), "logprobs_T", 6, np.nan)) == (
        "turn 0: log-probs must be finite and at most 0, got nan at 6"
    )


def test_an_aborted_turn_may_be_empty_and_one_may_begin_where_another_ends() -> None:
    assert broken(with_turns(valid(), (4, 4), (4, 6), (7, 8), (8, 8))) is None


@pytest.mark.parametrize(("value", "is_broken"), [(5e-5, False), (MAX_LOGPROB, False), (2e-4, True), (-1e30, False)])
def test_log_probs_are_held_below_a_ten_thousandth(value: float, is_broken: bool) -> None:
    assert (broken(changed(valid(), "logprobs_T", 4, value)) is not None) == is_broken


def test_a_vision_token_of_the_environment_breaks_no_rule() -> None:
    assert broken(changed(valid(), "ids_T", 6, VISION_START)) is None


def test_a_stream_without_model_tokens_breaks_no_rule() -> None:
    assert broken(trajectory([1, 2], [0, 0])) is None
    assert broken(trajectory([], [])) is None


def test_rounding_may_lift_a_log_prob_a_little_above_zero() -> None:
    assert broken(changed(valid(), "logprobs_T", 4, 1e-5)) is None


def test_a_model_without_images_has_no_placeholders_to_count() -> None:
    text = Vocabulary(None, 1, frozenset())
    assert broken_invariant(valid().streams[0], text) == "0 image placeholders, 8 in the image grids"
    assert broken_invariant(replace(valid(), images=()).streams[0], text) is None


# The stream against what it was made of -------------------------------------------------------------------------------


def pieces() -> list[Rendered | Completion]:
    """What `valid` was made of."""
    return [
        Rendered((1, IMAGE, IMAGE, 2), (image(2, 4),)),
        Completion((3, 4), (-1.0, -1.0), "stop", 4, ((0, 2),)),
        Rendered((5,), ()),
        Completion((6,), (-1.0,), "stop", 7, ((0, 1),)),
    ]


Pieces = list[Rendered | Completion]


def with_piece(place: int, **change: object) -> Pieces:
    made = pieces()
    made[place] = replace(made[place], **change)  # type: ignore[type-var]
    return made


def test_a_stream_of_its_pieces_breaks_no_rule() -> None:
    assert broken(valid(), pieces()) is None


OTHER_PIECES: dict[str, tuple[Pieces, str]] = {
    "another prompt": (
        with_piece(0, ids=(1, IMAGE, IMAGE, 7)),
        "the stream has [2 'c', 3 'd', 4 'e', 5 'f'] at 3, read and written were [7 'h', 3 'd', 4 'e', 5 'f']",
    ),
    "a token rewritten": (
        with_piece(1, ids=(7, 4)),
        "the stream has [3 'd', 4 'e', 5 'f', 6 'g'] at 4, read and written were [7 'h', 4 'e', 5 'f', 6 'g']",
    ),
    "another observation": (
        with_piece(2, ids=(7,)),
        "the stream has [5 'f', 6 'g'] at 6, read and written were [7 'h', 6 'g']",
    ),
    "the second turn rewritten": (
        with_piece(3, ids=(7,)),
        "the stream has [6 'g'] at 7, read and written were [7 'h']",
    ),
    "an observation after the second turn": (
        [*pieces(), Rendered((1, 2), ())],
        "the stream has [] at 8, read and written were [1 'b', 2 'c']",
    ),
    "the second of two turns read more": (
        [*pieces()[:3], Completion((6,), (-1.0,), "stop", 9, ((0, 1),))],
        "turn 2: span 7:8, 7:8 was written, the engine read 9 tokens",
    ),
    "a token lost at the end": (
        with_piece(3, ids=(6, 7)),
        "the stream has [] at 8, read and written were [7 'h']",
    ),
    "a token that nobody gave": (pieces()[:-1], "the stream has [6 'g'] at 7, read and written were []"),
    "a turn given as two": (
        [*pieces()[:1], *(Completion((each,), (-1.0,), "stop", each + 1, ((0, 1),)) for each in (3, 4)), *pieces()[2:]],
        "turn 1: span 4:6, 4:5 was written, the engine read 4 tokens",
    ),
    "a turn that nobody wrote": (
        [*pieces()[:3], Rendered((6,), ())],
        "turn 2: span 7:8, None:None was written, the engine read None tokens",
    ),
    "the engine read less": (
        with_piece(3, prompt_length=6),
        "turn 2: span 7:8, 7:8 was written, the engine read 6 tokens",
    ),
}


@pytest.mark.parametrize(("given", "rule"), OTHER_PIECES.values(), ids=OTHER_PIECES.keys())
def test_a_stream_that_is_not_its_pieces_is_named(given: Pieces, rule: str) -> None:
    assert broken(valid(), given) == rule


def test_an_id_that_no_tokenizer_knows_is_shown_all_the_same() -> None:
    assert VOCABULARY.show([2, 99]) == "[2 'c', 99 (no token)]"


# An engine's answer ---------------------------------------------------------------------------------------------------

REQUEST = GenerateRequest((1, 2, 3, 4), (), 3, SamplingParams(stop_ids=(6,)), 0)
ANSWER = Completion((5, 6), (-0.5, -0.25), "stop", 4, ((3, 1), (4, 1)))

BROKEN_ANSWERS: dict[str, tuple[Completion, str]] = {
    "read less": (replace(ANSWER, prompt_length=3), "turn 2: the engine read 3 tokens, the stream has 4"),
    "read more": (replace(ANSWER, prompt_length=5), "turn 2: the engine read 5 tokens, the stream has 4"),
    "wrote too much": (
        replace(ANSWER, ids=(5,) * 4, logprobs=(-1.0,) * 4, versions=((3, 4),)),
        "turn 2: the engine wrote 4 tokens, asked for 3 at most",
    ),
    "wrote nothing": (
        replace(ANSWER, ids=(), logprobs=(), versions=()),
        "turn 2: the engine wrote no token and ended with 'stop'",
    ),
    "wrote no id": (replace(ANSWER, ids=(5, -2)), "turn 2: the engine wrote ids from -2 to 5"),
    "wrote an id past 31 bits": (
        replace(ANSWER, ids=(5, 2**31)),
        "turn 2: the engine wrote ids from 5 to 2147483648",
    ),
    "a log-prob too many": (replace(ANSWER, logprobs=(-0.5,) * 3), "turn 2: 3 log-probs for 2 tokens"),
    "a log-prob short": (replace(ANSWER, logprobs=(-0.5,)), "turn 2: 1 log-probs for 2 tokens"),
    "another word for its end": (
        replace(ANSWER, finish="eos"),
        "turn 2: the engine ended with 'eos', which is none of stop, length, abort",
    ),
    "without its stop id": (
        replace(ANSWER, ids=(5, 5)),
        "turn 2: the engine stopped at id 5, the stop ids are (6,)",
    ),
    "versions short": (
        replace(ANSWER, versions=((3, 1),)),
        "turn 2: versions ((3, 1),) do not add up to the 2 tokens of the turn",
    ),
}


@pytest.mark.parametrize(("answer", "rule"), BROKEN_ANSWERS.values(), ids=BROKEN_ANSWERS.keys())
def test_a_broken_answer_is_named(answer: Completion, rule: str) -> None:
    assert broken_turn(2, REQUEST, answer) == rule


@pytest.mark.parametrize(
    ("kept", "rule"),
    [
        (None, "turn 2: 2 tokens need 2 ids each that they were drawn from, got None"),
        ([[5, 6, 7], [5, 6, 7]], "turn 2: 2 tokens need 2 ids each that they were drawn from, got (2, 3)"),
        ([[5, 6]], "turn 2: 2 tokens need 2 ids each that they were drawn from, got (1, 2)"),
        ([[5, 6], [5, 7]], "turn 2: token 2, id 6, is none of the ids that it was drawn from"),
        ([[5, -1], [5, 6]], "turn 2: a token was drawn from id -1"),
        ([[5, 7], [6, 6]], None),
    ],
)
def test_a_token_needs_the_ids_that_it_was_drawn_from(kept: Any, rule: str | None) -> None:
    asked = replace(REQUEST, sampling=replace(REQUEST.sampling, top_k=2))
    kept_NK = None if kept is None else np.array(kept, dtype=np.int32)
    assert broken_turn(2, asked, replace(ANSWER, kept_NK=kept_NK)) == rule


SHAPE = RouteShape(num_layers=2, num_experts=4, top_k=2)
#: Of the five tokens that were read by the end of the turn; one layer has no experts.
ROUTES = np.array([[[0, 0], [0, 1]], [[0, 0], [2, 3]], [[0, 0], [1, 3]], [[0, 0], [3, 0]], [[0, 0], [2, 1]]], np.uint8)
BEFORE = replace(ANSWER, routes_RLK=ROUTES[:3])


@pytest.mark.parametrize(
    ("routes", "num_routed", "rule"),
    [
        (ROUTES, 0, None),
        (ROUTES[3:], 3, None),
        (ROUTES[1:], 3, None),  # two rows of the turn before again
        (ROUTES, None, "turn 2: experts of tokens that nobody asked for"),
        (None, None, None),
        (None, 0, "turn 2: experts of shape None, the tokens that were read need (5, 2, 2)"),
        (ROUTES[:4], 0, "turn 2: experts of shape (4, 2, 2), the tokens that were read need (5, 2, 2)"),
        (ROUTES[4:], 3, "turn 2: experts of shape (1, 2, 2), the tokens that were read need (2, 2, 2)"),
        (
            np.concatenate([ROUTES, ROUTES]),
            3,
            "turn 2: experts of shape (10, 2, 2), the tokens that were read need (5, 2, 2)",
        ),
        (ROUTES[:, :1], 0, "turn 2: experts of shape (5, 1, 2), the tokens that were read need (5, 2, 2)"),
        (ROUTES[:, :, :1], 0, "turn 2: experts of shape (5, 2, 1), the tokens that were read need (5, 2, 2)"),
        (ROUTES + 1, 0, "turn 2: a token went to expert 4, the network has 4"),
        (
            np.concatenate([ROUTES[:1], ROUTES[:1], ROUTES[3:]]),
            3,
            "turn 2: the last 2 tokens of the turn before have other experts than they had there",
        ),
    ],
)
def test_tokens_that_were_read_need_the_experts_of_their_network(
    routes: np.ndarray | None, num_routed: int | None, rule: str | None
) -> None:
    request = replace(REQUEST, num_routed=num_routed)
    assert broken_routes(2, request, replace(ANSWER, routes_RLK=routes), SHAPE, BEFORE) == rule


def test_a_turn_that_was_cut_off_needs_no_experts() -> None:
    asked = replace(REQUEST, num_routed=0)
    assert broken_routes(1, asked, replace(ANSWER, finish="abort", routes_RLK=ROUTES[:2]), SHAPE) is None
    assert broken_routes(1, asked, Completion((), (), "abort", 4, ()), SHAPE) is None


@pytest.mark.parametrize("routes", [ROUTES.tolist(), ROUTES.astype(np.int64), ROUTES.astype(np.int8), ROUTES[0]])
def test_experts_that_are_no_array_of_small_numbers_are_a_fault_of_the_engines_code(routes: Any) -> None:
    with pytest.raises(TypeError, match=r"routes_RLK of a Completion must be an array .* of uint8"):
        check_types(replace(ANSWER, routes_RLK=routes))


def test_a_stream_has_experts_of_all_tokens_before_the_last_that_was_written() -> None:
    rows = np.zeros((len(valid().ids_T), 2, 2), np.uint8)
    num_read = valid().turns[-1].end - 1
    assert broken(replace(valid(), routes_RLK=rows[:num_read])) is None
    rule = f"experts of {num_read - 1} tokens, {num_read} were read by the end of the last turn"
    assert broken(replace(valid(), routes_RLK=rows[: num_read - 1])) == rule


def test_no_token_of_a_stream_goes_to_one_expert_twice() -> None:
    num_read = valid().turns[-1].end - 1
    rows = np.tile(ROUTES[1], (num_read, 1, 1))
    assert broken(replace(valid(), routes_RLK=rows)) is None  # the layer of zeros has no experts
    rows[2, 1] = (3, 3)
    assert broken(replace(valid(), routes_RLK=rows)) == "token 2 goes to [3, 3] in layer 1"
    rows = np.array([[[5, 1, 9, 5]]], np.uint16)
    assert expert_twice(rows) == "token 0 goes to [1, 5, 5, 9] in layer 0"


def test_answers_that_break_no_rule() -> None:
    assert broken_turn(1, REQUEST, ANSWER) is None
    assert broken_turn(1, REQUEST, Completion((), (), "abort", 4, ())) is None
    assert broken_turn(1, REQUEST, replace(ANSWER, ids=(0, 2**31 - 1), finish="length")) is None
    assert broken_turn(1, REQUEST, replace(ANSWER, finish="abort")) is None
    assert broken_turn(1, REQUEST, Completion((5, 5, 5), (-1.0,) * 3, "length", 4, ((3, 0), (4, 3)))) is None


# Random streams -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """What is read before a turn, and the turn: tokens, grids of the images in it, and runs of versions."""

    read: int
    grids: list[tuple[int, int]]
    runs: list[int]


segments = st.lists(
    st.builds(
        Segment,
        st.integers(1, 5),
        st.lists(st.sampled_from([(2, 2), (2, 4), (4, 6)]), max_size=2),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def streamed(parts: Sequence[Segment], logprobs: st.DataObject | None = None) -> tuple[Stream, Trajectory]:
    """Return the stream of some segments, made as the agent loop makes it, and its trajectory."""
    stream, turns = Stream(), []
    for part in parts:
        images = tuple(image(*grid) for grid in part.grids)
        shown = [token for each in images for token in (VISION_START, *[IMAGE] * each.num_tokens)]
        stream.read(Rendered((*range(1, part.read + 1), *shown), images))
        count = sum(part.runs)
        values = [-0.5] * count
        if logprobs is not None:
            values = logprobs.draw(st.lists(st.floats(-100, 0, width=32), min_size=count, max_size=count))
        versions = tuple(enumerate(part.runs))
        start, end = stream.write(Completion((2,) * count, tuple(values), "stop", len(stream.ids), versions))
        turns.append(Turn(start, end, "", "stop", versions, 0, (), {}, 0.0, 0.0))
    ids_T, mask_T, logprobs_T = stream.arrays()
    made = Trajectory(
        "s", 0, 0, ids_T, mask_T, logprobs_T, stream.images, tuple(turns), 1.0, EndReason.COMPLETED, turns[0].start
    )
    return stream, made


@examples(100)
@given(parts=segments, data=st.data())
def test_random_valid_streams_pass(parts: list[Segment], data: st.DataObject) -> None:
    stream, made = streamed(parts, data)
    assert stream.prompt_length == made.prompt_length
    assert broken(made, stream.pieces) is None
    assert broken(made) is None


@examples(100)
@given(parts=segments, data=st.data())
def test_any_single_change_of_a_random_stream_breaks_a_rule(parts: list[Segment], data: st.DataObject) -> None:
    stream, made = streamed(parts)
    place = data.draw(st.integers(0, len(made.ids_T) - 1))
    assert broken(changed(made, "mask_T", place, not made.mask_T[place]), stream.pieces)
    assert broken(changed(made, "ids_T", place, int(made.ids_T[place]) % 7 + 1), stream.pieces)
    assert broken(changed(made, "logprobs_T", place, 1.0), stream.pieces)
    assert broken(replace(made, images=(*made.images, image(2, 2))), stream.pieces)
    assert broken(made, stream.pieces[:-1])
    assert broken(replace(made, turns=made.turns[:-1]), stream.pieces)
