"""Procedural geometry: what is drawn, what is asked and what is answered belong together, and splits share nothing."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from envs.errors import UserError
from envs.geo3k.families.arithmetic import fraction, multiply, radical
from envs.geo3k.problem import FAMILIES, LEVELS, Problem, draw_problem, make_problem, misread
from envs.geo3k.procedural import KEY_TRIES, SPLITS, ProceduralGeo3k, split_of
from envs.types import Sample
from tests.budget import examples

CASES = list(itertools.product(FAMILIES, LEVELS))


def value(answer: str) -> float:
    """Read an answer as a number, by rewriting its LaTeX to arithmetic."""
    text = re.sub(r"(\d+) \\sqrt \{ (\d+) \}", r"(\1*\2**0.5)", answer)
    text = re.sub(r"\\sqrt \{ (\d+) \}", r"(\1**0.5)", text)
    text = re.sub(r"\\frac \{ (.+) \} \{ (\d+) \}", r"(\1)/\2", text)
    assert re.fullmatch(r"[\d.()*/]+", text), answer
    return float(eval(text))


def expected(problem: Problem) -> float:
    """Solve a problem a second way: with trigonometry, coordinates and plain formulas, not with the family's steps."""
    g, tag = problem.givens, problem.unknown
    first, last = float(g[0]), float(g[-1])
    angle = math.radians(first)
    special = {
        "45_hypotenuse": last / math.sin(angle),
        "45_leg": last * math.sin(angle),
        "30_hypotenuse": last / math.sin(angle),
        "30_short": last * math.sin(angle),
        "60_long": last * math.tan(angle),
        "60_hypotenuse": last / math.cos(angle),
        "30_long": last * math.cos(angle),
    }
    answers = {
        "triangle_angles": lambda: 180 - sum(g),
        "isosceles": lambda: 180 - 2 * first if tag == "apex" else 90 - first / 2,
        "exterior_angle": lambda: sum(g) if tag == "exterior" else first - last,
        "linear_pair": lambda: (90 if tag == "right" else 180) - sum(g),
        "vertical_angles": lambda: first if tag == "vertical" else 180 - sum(g),
        "angles_at_point": lambda: 360 - sum(g),
        "parallel_lines": lambda: {"same_side": 180 - first, "bend": sum(g)}.get(tag, first),
        "quadrilateral_angles": lambda: 180 * (len(g) - 1) - sum(g),
        "circle_angles": lambda: {
            "inscribed": first / 2,
            "central": 2 * first,
            "semicircle": 90 - first,
            "cyclic": 180 - first,
        }[tag],
        "right_triangle": lambda: math.hypot(*g) if tag == "hypotenuse" else first * math.sin(math.acos(last / first)),
        "special_right": lambda: special[tag],
        "rectangle": lambda: first * last if tag == "area" else 2 * first + 2 * last,
        "parallelogram": lambda: first * last if tag == "area" else 2 * first + 2 * last,
        "triangle_area": lambda: first * last / 2,
        "trapezoid_area": lambda: min(g[:2]) * last + abs(g[0] - g[1]) * last / 2,
        "midsegment": lambda: {"base": 2 * first, "midsegment": first / 2}.get(tag, (first + last) / 2),
        "similar_triangles": lambda: first / last * g[1],
    }
    return float(answers[problem.family]())


def steps_hold(reasoning: str) -> bool:
    """Whether every 'a op b = c.' of the reasoning is true, as floating-point arithmetic."""
    for step in re.findall(r"([^=]+) = ([^=]+?)\.(?: |$)", reasoning):
        left, right = step[0].strip(), step[1]
        parts = re.split(r" ([-+*/]) ", left)
        if left == "x" or len(parts) == 1:
            number = value(right) if left == "x" else value(left)
        else:
            a, operator, b = value(parts[0]), parts[1], value(parts[2])
            number = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operator]
        if not math.isclose(number, value(right)):
            return False
    return True


@pytest.mark.parametrize(("family", "level"), CASES)
def test_printed_answers_equal_an_independent_solution(family: str, level: int) -> None:
    rng = Random(f"{family}/{level}")
    for _ in range(200):
        problem = make_problem(family, level, rng)
        assert value(problem.answer) == pytest.approx(expected(problem)), problem
        assert problem.answer.isdigit() or level == 3 or problem.unknown == "45_hypotenuse", problem
        assert value(problem.answer) > 0


@pytest.mark.parametrize(("family", "level"), CASES)
def test_each_step_of_the_reasoning_is_true_and_the_last_ends_in_the_answer(family: str, level: int) -> None:
    rng = Random(f"{family}/{level}/steps")
    for _ in range(100):
        problem = make_problem(family, level, rng)
        assert problem.reasoning.endswith(f"{problem.answer}.")
        assert steps_hold(problem.reasoning), problem


@pytest.mark.parametrize(("family", "level"), CASES)
def test_a_misread_problem_is_consistent_and_has_another_answer(family: str, level: int) -> None:
    rng = Random(f"{family}/{level}/misread")
    found = 0
    for _ in range(100):
        problem = make_problem(family, level, rng)
        wrong = misread(problem, rng)
        if wrong is None:
            continue
        found += 1
        changed = [(a, b) for a, b in zip(problem.givens, wrong.givens, strict=True) if a != b]
        assert len(changed) == 1
        before, after = map(str, changed[0])
        assert len(before) == len(after)
        assert sum(x != y for x, y in zip(before, after, strict=True)) == 1
        assert wrong.answer != problem.answer
        assert wrong.reasoning != problem.reasoning
        assert value(wrong.answer) == pytest.approx(expected(wrong))
        assert steps_hold(wrong.reasoning)
        assert (wrong.family, wrong.unknown, wrong.question) == (problem.family, problem.unknown, problem.question)
    assert found >= 90


@pytest.mark.parametrize(("family", "level"), CASES)
def test_every_family_and_level_has_problems_in_every_split(family: str, level: int) -> None:
    rng = Random(f"{family}/{level}/splits")
    splits = {split_of(make_problem(family, level, rng).key) for _ in range(KEY_TRIES)}
    assert splits == set(SPLITS)


def test_no_two_splits_share_a_key() -> None:
    sources = {split: ProceduralGeo3k(split, 3000, seed=seed) for seed, split in enumerate(SPLITS)}
    keys = {split: {source.problem(i).key for i in range(3000)} for split, source in sources.items()}
    assert len(keys["demonstrations"]) > 1500 and len(keys["train"]) > 500 and len(keys["heldout"]) > 500
    for one, other in itertools.combinations(SPLITS, 2):
        assert not keys[one] & keys[other]


def test_about_one_key_in_ten_is_held_out_and_one_in_ten_is_for_training() -> None:
    rng = Random(5)
    keys = {make_problem("trapezoid_area", 3, rng).key for _ in range(5000)}
    for split in ("train", "validation", "heldout"):
        assert 0.08 < sum(split_of(key) == split for key in keys) / len(keys) < 0.12


def test_label_boxes_are_where_the_image_has_its_labels() -> None:
    source = ProceduralGeo3k("train", 40, seed=3)
    for index in range(40):
        problem, image, boxes = source.drawn(index)
        assert len(boxes) > len(problem.givens) - 1, problem.key
        for left, top, right, bottom in boxes:
            assert 0 <= left < right <= image.width and 0 <= top < bottom <= image.height
            inside = np.asarray(image)[top:bottom, left:right, 0]
            edges = np.concatenate([inside[0], inside[-1], inside[:, 0], inside[:, -1]])
            assert inside.min() < 128 and edges.mean() > 250, (problem.key, index)


def test_the_split_of_a_key_never_changes() -> None:
    keys = ["triangle_angles/47-65/x", "rectangle/3-4/area", "right_triangle/3-4/hypotenuse", "isosceles/70/apex"]
    assert [split_of(key) for key in keys] == ["heldout", "demonstrations", "demonstrations", "validation"]


def test_the_same_index_gives_the_same_text_and_pixels_in_any_order() -> None:
    source = ProceduralGeo3k("train", 40, seed=3)
    forward = [source.item(i) for i in range(40)]
    again = ProceduralGeo3k("train", 4000, seed=3)
    for index in reversed(range(40)):
        problem, image = again.item(index)
        assert problem == forward[index][0] == source.problem(index)
        assert image.tobytes() == forward[index][1].tobytes()


def test_another_process_gives_the_same_pixels() -> None:
    code = (
        "import hashlib; from envs.geo3k.procedural import ProceduralGeo3k as P;"
        "print(hashlib.sha256(b''.join(P('heldout', 9).item(i)[1].tobytes() for i in range(9))).hexdigest())"
    )
    command = [sys.executable, "-c", code]
    shown = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(shown) == 1
    assert len(shown.pop().strip()) == 64


def test_another_seed_gives_other_problems() -> None:
    one, other = ProceduralGeo3k("train", 50, seed=0), ProceduralGeo3k("train", 50, seed=1)
    assert sum(one.problem(i) == other.problem(i) for i in range(50)) < 10


def test_a_sample_shows_one_image_and_the_question_without_the_givens() -> None:
    source = ProceduralGeo3k("heldout", 60, seed=4)
    for index in range(60):
        sample, problem = source[index], source.problem(index)
        assert isinstance(sample, Sample)
        assert sample.id == f"geo3k-procedural-heldout-4-{index}"
        assert sample.label == problem.answer
        (message,) = sample.prompt
        image, text = message["content"]
        assert message["role"] == "user"
        assert isinstance(image["image"], Image.Image)
        assert text == {"type": "text", "text": problem.question}
        assert not re.search(r"\d", problem.question)
        assert dict(sample.metadata) == {
            "family": problem.family,
            "level": problem.level,
            "key": problem.key,
            "unknown": problem.unknown,
        }


@pytest.mark.parametrize("family", list(FAMILIES))
@given(seed=st.integers(0, 2**32), level=st.sampled_from(LEVELS))
@examples(500)
def test_every_diagram_is_160_by_128_rgb_with_ink_inside_a_white_border(family: str, seed: int, level: int) -> None:
    rng = Random(seed)
    image = draw_problem(make_problem(family, level, rng), rng)
    assert image.size == (160, 128)
    assert image.mode == "RGB"
    ink = ImageOps.invert(image.convert("L"))
    bounds = ink.getbbox()
    assert bounds is not None, "a diagram has ink"
    left, top, right, bottom = bounds
    assert left >= 1
    assert top >= 1
    assert right <= 159
    assert bottom <= 127
    dark = sum(ink.histogram()[128:])
    assert 150 < dark < 3000


def test_keys_ignore_order_level_and_drawing() -> None:
    def key(family: str, givens: tuple[int, ...], unknown: str, level: int = 3) -> str:
        return Problem(family, level, givens, unknown, "Find x.", "", "").key

    assert key("triangle_angles", (65, 47), "x") == "triangle_angles/47-65/x"
    assert key("triangle_angles", (47, 65), "x", 1) == "triangle_angles/47-65/x"
    assert key("similar_triangles", (3, 2, 5), "upper") == "similar_triangles/2-3-5/upper"
    assert key("similar_triangles", (2, 5, 3), "upper") != key("similar_triangles", (2, 3, 5), "upper")
    assert key("trapezoid_area", (3, 5, 4), "area") != key("trapezoid_area", (3, 4, 5), "area")


def test_exact_numbers_are_reduced_and_spaced_as_in_geometry3k() -> None:
    assert [fraction(7, 2), fraction(8, 2), fraction(6, 4)] == [r"\frac { 7 } { 2 }", "4", r"\frac { 3 } { 2 }"]
    assert [radical(1, 50), radical(1, 13), radical(1, 36)] == [r"5 \sqrt { 2 }", r"\sqrt { 13 }", "6"]
    assert radical(7, 2, 2) == r"\frac { 7 \sqrt { 2 } } { 2 }"
    assert radical(2, 3, 4) == r"\frac { \sqrt { 3 } } { 2 }"
    assert multiply(23, 17) == (["23 * 10 = 230.", "23 * 7 = 161.", "230 + 161 = 391."], 391)


@pytest.mark.parametrize(
    ("family", "givens", "unknown"),
    [
        ("triangle_angles", (110, 80), "x"),
        ("isosceles", (95,), "apex"),
        ("exterior_angle", (40, 70), "remote"),
        ("right_triangle", (5, 12), "leg"),
        ("quadrilateral_angles", (60, 50, 60), "quadrilateral"),
        ("special_right", (80, 6), "30_short"),
        ("trapezoid_area", (9, 4, 3), "area"),
        ("rectangle", (0, 4), "area"),
    ],
)
def test_numbers_that_make_no_figure_have_no_solution(family: str, givens: tuple[int, ...], unknown: str) -> None:
    with pytest.raises(ValueError):
        FAMILIES[family].solve(givens, unknown)


def test_families_and_levels_can_be_chosen() -> None:
    source = ProceduralGeo3k("train", 60, families=["isosceles", "midsegment"], levels=(2, 3))
    seen = {(source.problem(i).family, source.problem(i).level) for i in range(60)}
    assert seen == {("isosceles", 2), ("isosceles", 3), ("midsegment", 2), ("midsegment", 3)}


def test_a_source_is_a_sequence() -> None:
    source = ProceduralGeo3k("train", 5)
    assert len(source) == 5
    assert source[-1].id == source[4].id == "geo3k-procedural-train-0-4"
    assert [sample.id for sample in source[1:3]] == [source[1].id, source[2].id]
    assert len(list(source)) == 5
    with pytest.raises(IndexError):
        source[5]


def test_unknown_names_are_user_errors_that_name_the_nearest() -> None:
    with pytest.raises(UserError, match=r"split: .* got train1; did you mean 'train'\?"):
        ProceduralGeo3k("train1", 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"families: .* did you mean 'isosceles'\?"):
        ProceduralGeo3k("train", 1, families=["isoceles"])
    with pytest.raises(UserError, match=r"levels: .* got 4"):
        ProceduralGeo3k("train", 1, levels=(1, 4))
    with pytest.raises(UserError, match="size"):
        ProceduralGeo3k("train", -1)
    with pytest.raises(UserError, match="family"):
        make_problem("triangles", 1, Random(0))
    with pytest.raises(UserError, match="level"):
        make_problem("isosceles", 0, Random(0))
