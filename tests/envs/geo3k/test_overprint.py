"""Overprinted images: the plain problem, and one digit of another reading over one of its own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from PIL import Image

from envs.geo3k.problem import Problem, draw_problem, make_problem, read_as, with_rival
from envs.geo3k.procedural import ProceduralGeo3k


def grey(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L"), dtype=np.int64)


def test_an_overprinted_problem_is_the_plain_one_with_a_second_reading() -> None:
    plain, overprinted = (ProceduralGeo3k("train", 60, seed=3, style=style) for style in ("plain", "overprint"))
    rivals = 0
    for index in range(60):
        problem, same = plain.problem(index), overprinted.problem(index)
        assert problem.rival is None and problem.key == same.key and problem.answer == same.answer
        if same.rival is None:
            continue
        rivals += 1
        pairs = zip(map(str, same.givens), map(str, same.rival), strict=True)
        ((meant, other),) = [(meant, other) for meant, other in pairs if meant != other]
        assert len(meant) == len(other) and sum(a != b for a, b in zip(meant, other, strict=True)) == 1
        wrong = read_as(same, same.rival)
        assert wrong is not None and wrong.answer != same.answer
    assert rivals > 50


def test_the_image_shows_both_readings_equally_and_nothing_else_changes() -> None:
    """In the same layout, an overprinted image is the mean of the images of both readings."""
    problem = Problem("rectangle", 2, (18, 34), "area", "Find the area.", "612", "18 * 34 = 612.")
    num_equal = 0
    for seed in range(20):
        one, other, both = (
            grey(draw_problem(shown, Random(seed)))
            for shown in (
                problem,
                replace(problem, givens=(13, 34)),
                replace(problem, rival=(13, 34)),
            )
        )
        assert np.abs(both - one).max() >= 100  # the label is another one
        num_equal += np.abs(both - (one + other) / 2).max() <= 1
    assert num_equal > 10  # the others are laid out for the sides of 13 x 34


def test_a_image_without_a_rival_is_what_it_was() -> None:
    problem = make_problem("triangle_angles", 3, Random(1))
    same = replace(problem, rival=problem.givens)
    assert draw_problem(problem, Random(2)).tobytes() == draw_problem(same, Random(2)).tobytes()


def test_a_number_that_stands_twice_has_no_rival() -> None:
    problem = Problem("triangle_angles", 2, (45, 45), "x", "Find x.", "90", "45 + 45 = 90. 180 - 90 = 90.")
    assert all(with_rival(problem, Random(seed)).rival is None for seed in range(20))
