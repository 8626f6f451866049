"""Textbook problems: what the figures print is what one measures in them, and every label can be read."""

from __future__ import annotations

import cmath
import hashlib
import importlib.util
import itertools
import math
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageChops, ImageFont

from envs.env import EnvArgs
from envs.errors import UserError
from envs.geo3k.families import FAMILIES
from envs.geo3k.problem import LEVELS, Problem, misread
from envs.geo3k.procedural import KEY_TRIES, SPLITS, ProceduralGeo3k, Split, split_of
from envs.geo3k.zoom import Geo3kZoomEnv
from envs.grading import grade
from envs.types import message_images
from starter import sheet
from starter.textbook import drawing
from starter.textbook.drawing import CELL, SCALES, Drawing, draw
from starter.textbook.figure import Figure, Part
from starter.textbook.problems import STYLES, TextbookGeo3k, TextbookProblem, problems_of
from starter.textbook.problems import make_textbook_problem as make_problem
from starter.textbook.text import FONTS, FontName, text_mask
from starter.textbook.theorem import Wording
from starter.textbook.theorems import THEOREMS
from tests.budget import examples

CASES = list(itertools.product(THEOREMS, LEVELS))


def value(latex: str) -> float:
    """Read an answer as a number, by rewriting its LaTeX to arithmetic."""
    text = latex.replace("\\pi", f"{math.pi}")
    text = re.sub(r"\\sqrt \{ ([\d.]+) \}", r"(\1**0.5)", text)
    text = re.sub(r"\\frac \{ (.+?) \} \{ ([^}]+) \}", r"(\1)/(\2)", text)
    text = re.sub(r"\\(sin|cos|tan) (\d+)", lambda f: str(getattr(math, f[1])(math.radians(int(f[2])))), text)
    text = re.sub(r"(?<=[\d)]) (?=[\d(])", "*", text.strip())
    assert re.fullmatch(r"[-\d.()*/e]+", text), latex
    return float(eval(text))


def label_value(text: str, x: float) -> float:
    """Read a label: a number, x, or an expression in x, maybe in degrees."""
    factor, constant = re.fullmatch(r"\(?(?:(\d*)x)?(?: ?([+−]? ?\d+))?\)?°?", text).groups()  # type: ignore[union-attr]
    number = float((constant or "0").replace(" ", "").replace("−", "-"))
    return number if factor is None else float(factor or 1) * x + number


def measure(figure: Figure, part: Part) -> float:
    """Measure a part in the coordinates of the points, with a ruler and a protractor and no theorem."""
    if part.kind == "length":
        a, b = figure.ends(part.points)
        return math.dist((a.real, a.imag), (b.real, b.imag))
    if part.kind == "angle":
        a, b, c = figure.ends(part.points)
        u, v = a - b, c - b
        return math.degrees(math.acos((u.real * v.real + u.imag * v.imag) / (abs(u) * abs(v))))
    if part.kind in ("area", "perimeter"):
        outlines = [figure.ends(names) for names in part.points.split("-")]
        if part.kind == "perimeter":
            return sum(abs(a - b) for a, b in zip(outlines[0], outlines[0][1:] + outlines[0][:1], strict=True))
        return shoelace(outlines[0]) - sum(shoelace(hole) for hole in outlines[1:])
    center, a, b = figure.ends(part.points)
    assert abs(a - center) == pytest.approx(abs(b - center)), "both ends of an arc lie on one circle"
    opening = (math.atan2(*_yx(b - center)) - math.atan2(*_yx(a - center))) % (2 * math.pi)
    if part.kind == "arc":
        return math.degrees(opening)
    walk = [center + (a - center) * cmath.rect(1, opening * k / 4000) for k in range(4001)]
    return shoelace([center, *walk]) if part.kind == "sector" else sum(abs(q - p) for p, q in itertools.pairwise(walk))


def _yx(vector: complex) -> tuple[float, float]:
    return vector.imag, vector.real


def shoelace(points: list[complex]) -> float:
    return abs(sum((a.conjugate() * b).imag for a, b in zip(points, [*points[1:], points[0]], strict=True))) / 2


def steps_hold(reasoning: str, is_rounded: bool = False) -> bool:
    """Whether every "a op b = c." of the reasoning is true; rounded steps and those with decimals to three digits."""
    for left, right in re.findall(r"([^=]+?) = ([^=]+?)\.(?: |$)", reasoning):
        parts = re.split(r" ([-+*/]) ", left.strip())
        if parts[0] == "x":
            continue
        if len(parts) == 1:
            number = value(parts[0])
        else:
            a, operator, b = value(parts[0]), parts[1], value(parts[2])
            number = {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or math.nan)}[operator]
        exact = not is_rounded and not re.search(r"\d\.\d|sin|cos|tan", f"{left} {right}")
        if not math.isclose(number, value(right), rel_tol=1e-9 if exact else 2e-3, abs_tol=1e-9 if exact else 0.051):
            return False
    return True


def figure_of(problem: Problem) -> tuple[Figure, Wording]:
    assert isinstance(problem, TextbookProblem)
    shape = problem.wording.shape
    return THEOREMS[problem.family].figure(problem.givens, problem.unknown, shape), problem.wording


def check_scale(problem: Problem) -> None:
    """Compare every number of a problem with what its figure measures, also turned and mirrored."""
    figure, _ = figure_of(problem)
    answer = value(problem.answer)
    is_rounded = "nearest" in problem.question
    for seen in (figure, figure.turned(0.7, mirrored=False), figure.turned(2.1, mirrored=True)):
        for label in (*seen.labels, *([seen.spare] if seen.spare else ())):
            assert measure(seen, label.part) == pytest.approx(label_value(label.text, answer), rel=1e-6), (
                problem,
                label,
            )
        if seen.asked is not None:
            size = label_value(seen.asked.text, answer) if seen.asked.text else answer
            tolerance = {"abs": 0.0501} if is_rounded else {"rel": 1e-5}
            assert measure(seen, seen.asked.part) == pytest.approx(size, **tolerance), problem


@pytest.mark.parametrize(("family", "level"), CASES)
def test_every_printed_number_and_the_answer_are_what_the_figure_measures(family: str, level: int) -> None:
    rng = Random(f"{family}/{level}")
    for _ in range(12):
        check_scale(make_problem(family, level, rng))


@given(seed=st.integers(0, 2**48), family=st.sampled_from(list(THEOREMS)), level=st.sampled_from(LEVELS))
@example(seed=495922, family="law_of_cosines", level=3)
@examples(300)
def test_random_problems_are_sound(seed: int, family: str, level: int) -> None:
    problem = make_problem(family, level, Random(seed))
    check_scale(problem)
    assert value(problem.answer) > 0
    assert grade(problem.answer, problem.answer) == 1.0
    assert problem.reasoning.endswith(f"{problem.answer}.")
    # Where the answer is asked to the nearest tenth, a root of 37.04 is 37.
    assert steps_hold(problem.reasoning, "nearest" in problem.question), problem


@pytest.mark.parametrize("family", list(THEOREMS))
def test_marks_are_true_in_the_figure(family: str) -> None:
    """Right angles measure 90 degrees, ticked segments are equal, parallels do not meet, equal angles are equal."""
    rng = Random(f"{family}/marks")
    for level in LEVELS * 5:
        figure, _ = figure_of(make_problem(family, level, rng))
        size = max(abs(p) for p in figure.points.values())
        for points in figure.right_angles:
            assert measure(figure, Part("angle", points)) == pytest.approx(90)
        for count in {count for _, count in figure.ticks}:
            lengths = [measure(figure, Part("length", s)) for s, c in figure.ticks if c == count]
            assert len(lengths) > 1 and max(lengths) == pytest.approx(min(lengths))
        for count in {count for _, count in figure.parallels}:
            directions = [q - p for p, q in (figure.ends(s) for s, c in figure.parallels if c == count)]
            for direction in directions:
                assert abs(cmath.phase(direction / directions[0])) < 1e-9, "arrows point the same way"
        for count in {count for _, count in figure.equal_angles}:
            angles = [measure(figure, Part("angle", a)) for a, c in figure.equal_angles if c == count]
            assert len(angles) > 1 and max(angles) == pytest.approx(min(angles))
        for center, on in figure.circles:
            radius = measure(figure, Part("length", center + on))
            assert radius > 0.05 * size


def test_segments_that_should_touch_a_circle_do() -> None:
    """The tangents of `two_tangents`, `tangent_chord` and `secant_lengths` are a radius away from the center."""
    rng = Random(6)
    lines = {"two_tangents": ("PA", "PB", "AB", "BC", "CA"), "tangent_chord": ("cA",), "secant_lengths": ("PT",)}
    for family, tangents in lines.items():
        for _ in range(30):
            figure, _ = figure_of(make_problem(family, 3, rng))
            center, on = figure.ends(figure.circles[0])
            for pair, _ in figure.strokes:
                if pair in tangents:
                    a, b = figure.ends(pair)
                    distance = abs(((b - a).conjugate() * (center - a)).imag) / abs(b - a)
                    assert distance == pytest.approx(abs(on - center)), (family, pair)


@pytest.mark.parametrize(("family", "level"), CASES)
def test_a_misread_problem_is_consistent_and_has_another_answer(family: str, level: int) -> None:
    rng = Random(f"{family}/{level}/misread")
    found = possible = 0
    for _ in range(20):
        problem = make_problem(family, level, rng)
        wrong = misread(problem, rng)
        possible += bool(problem.drawn_givens)
        if wrong is None:
            continue
        found += 1
        ((place, _),) = [(k, a) for k, (a, b) in enumerate(zip(problem.givens, wrong.givens, strict=True)) if a != b]
        assert place in problem.drawn_givens, "what the question tells is not misread"
        assert wrong.answer != problem.answer and wrong.reasoning != problem.reasoning
        assert (wrong.question, wrong.wording, wrong.unknown) == (problem.question, problem.wording, problem.unknown)
        assert steps_hold(wrong.reasoning) and value(wrong.answer) > 0
    assert possible >= 15 and found >= 0.6 * possible


@pytest.mark.parametrize(("family", "level"), CASES)
def test_every_theorem_and_level_has_problems_in_every_split(family: str, level: int) -> None:
    rng = Random(f"{family}/{level}/splits")
    found: set[str] = set()
    for _ in range(KEY_TRIES):
        found.add(split_of(make_problem(family, level, rng).key))
        if found == set(SPLITS):
            return
    pytest.fail(f"only {found}")


def test_there_are_more_than_twenty_theorems_and_none_is_named_like_a_plain_family() -> None:
    assert len(THEOREMS) >= 40 and not THEOREMS.keys() & FAMILIES.keys()


def drawings(family: str, count: int, style: str = "textbook") -> list[tuple[Problem, Drawing]]:
    rng = Random(f"{family}/{style}/drawings")
    problems = [make_problem(family, LEVELS[k % 3], rng) for k in range(count)]
    return [(problem, draw(*figure_of(problem), Random(k), SCALES[style])) for k, problem in enumerate(problems)]


@pytest.mark.parametrize("family", list(THEOREMS))
def test_every_text_stands_alone_inside_the_image(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drawings(family, 3)
    monkeypatch.setattr(Image.Image, "paste", _paste_without_text(Image.Image.paste))
    bare = drawings(family, 3)
    for (problem, one), (_, without) in zip(shown, bare, strict=True):
        assert [box for _, box in one.texts] == [box for _, box in without.texts]
        width, height = one.image.size
        for k, (text, (left, top, right, bottom)) in enumerate(one.texts):
            assert 1 <= left < right < width and 1 <= top < bottom < height, (problem.key, text)
            for other, (l2, t2, r2, b2) in one.texts[:k]:
                assert right <= l2 or r2 <= left or bottom <= t2 or b2 <= top, (problem.key, text, other)
            if one.conflicts == 0:
                under = without.image.crop((left, top, right, bottom)).convert("L")
                assert under.getextrema()[0] > 200, (problem.key, text, "a line runs under the text")
    assert sum(one.conflicts > 0 for _, one in shown) <= 1


def _paste_without_text(paste):  # type: ignore[no-untyped-def]
    """Return `Image.paste` without texts: a mask whose box was given is a text."""

    def paste_others(image, colour, box=None, mask=None):  # type: ignore[no-untyped-def]
        is_text = colour == drawing.BLACK and isinstance(box, tuple) and len(box) == 2
        return None if is_text else paste(image, colour, box, mask)

    return paste_others


def test_nearly_all_layouts_have_no_conflict() -> None:
    rng = Random(8)
    problems = [make_problem(rng.choice(list(THEOREMS)), rng.choice(LEVELS), rng) for _ in range(150)]
    conflicts = sum(draw(*figure_of(problem), rng, SCALES["textbook"]).conflicts > 0 for problem in problems)
    assert conflicts <= 2


def test_a_figure_whose_labels_hardly_fit_is_drawn_smaller() -> None:
    wording = Wording(shape=1750005379, letters="", variable="x")
    figure = THEOREMS["equal_expressions"].figure((6, 16, 1, 19), "vertical", wording.shape)
    for seed in range(300):
        width, height = draw(figure, wording, Random(seed), SCALES["textbook"]).image.size
        assert max(width, height) <= 256 and width * height <= 48 * CELL**2


def test_images_are_whole_tokens_and_bounded() -> None:
    sizes = {image.image.size for family in list(THEOREMS)[::2] for _, image in drawings(family, 3)}
    assert len(sizes) >= 10, "aspect ratios vary"
    for width, height in sizes:
        assert width % CELL == 0 and height % CELL == 0
        assert max(width, height) <= 256 and width * height <= 48 * CELL**2


def test_the_image_is_true_to_scale_to_the_pixel() -> None:
    """A circle of radius 20 in an image: its ink is 40 units wide and high, within 2 pixels for the line's width."""
    figure = Figure({"o": 0j, "A": 20 + 0j})
    figure.circles.append("oA")
    for seed in range(5):
        image = draw(figure, Wording(0, "", ""), Random(seed), SCALES["textbook"])
        paper = image.image.getpixel((0, 0))
        left, top, right, bottom = ImageChops.difference(
            image.image,
            Image.new("RGB", image.image.size, paper),  # type: ignore[arg-type]
        ).getbbox()  # type: ignore[misc]
        for side in (right - left, bottom - top):
            assert 0 <= side - 40 * image.pixels_per_unit <= 4, "the line is at most 2 pixels wide"


def test_small_print_is_legible_only_when_it_is_enlarged() -> None:
    """At the size the bundled model sees, digits are below 5 pixels; above 9 in half of each side, 18 in a quarter."""
    seen_pixels = 65536
    source = TextbookGeo3k("train", 4, style="small_print")
    for index in range(4):
        sample = source[index]
        (image,) = message_images(sample.prompt)
        digit = digit_height(*source.item(index))
        reduction = min(1.0, math.sqrt(seen_pixels / (image.width * image.height)))
        assert digit * reduction < 5
        for share, least in ((500, 9), (250, 18)):
            zoomed = Geo3kZoomEnv(sample, EnvArgs(max_turns=3)).zoom(300, 300, 300 + share, 300 + share)
            enlarged = zoomed.width / (image.width * share / 1000)
            again = min(1.0, math.sqrt(seen_pixels / (zoomed.width * zoomed.height)))
            assert digit * enlarged * again > least


def digit_height(problem: Problem, image: Image.Image) -> float:
    """Return the height of the largest digit that the style can draw, in pixels of its image."""
    assert max(image.size) >= 400, problem.key
    return max(ink_height("8", font, SCALES["small_print"].font[1]) for font in FONTS)


def ink_height(text: str, font: FontName, size: float) -> float:
    """Return the height of a text to an eighth of a pixel."""
    return text_mask(text, font, 8 * size).height / 8


def test_textbook_digits_are_legible_as_they_are() -> None:
    assert min(ink_height("8", font, SCALES["textbook"].font[0] - 1) for font in FONTS) >= 8


@pytest.mark.parametrize("family", list(THEOREMS))
def test_every_given_is_drawn_or_told_and_the_asked_part_is_marked_or_named(family: str) -> None:
    for problem, image in drawings(family, 3):
        figure, wording = figure_of(problem)
        drawn = [text for text, _ in image.texts]
        shown = "".join(re.sub(r"[^\d ]", " ", text) + " " for text in (*drawn, problem.question)).split()
        for number in problem.givens:
            # A factor of 1 is not written.
            assert str(number) in shown or number == 1, (problem, drawn)
        if figure.asked is not None and figure.asked.text:
            assert not wording.variable or any(wording.variable in text for text in drawn), (problem, drawn)
            assert wording.variable in problem.question
        assert list(wording.letters) == [text for text in drawn if text.isupper()]


def test_questions_name_only_points_that_have_letters_and_never_the_answer_alone() -> None:
    rng = Random(12)
    for family, level in CASES:
        for _ in range(4):
            problem = make_problem(family, level, rng)
            named = set(re.findall(r"(?<= )[A-Z](?=[ ,.])", problem.question.split(".")[0] + "."))
            assert named <= set(problem.wording.letters), problem
            assert ("find" in problem.question) == bool(problem.wording.told), problem


def test_the_style_decides_families_and_images_and_plain_stays_the_default() -> None:
    assert ProceduralGeo3k("train", 1).style == "plain"
    assert ProceduralGeo3k("train", 1).families == tuple(FAMILIES)
    for style, families in STYLES.items():
        source = problems_of("heldout", 8, 2, style, levels=(1, 2))
        assert source.families == tuple(families)
        problem, image = source.item(3)
        assert split_of(problem.key) == "heldout" and problem.level < 3
        assert image.tobytes() == source.item(3)[1].tobytes() == draw_again(source, 3).tobytes()
    with pytest.raises(UserError, match=r"style: .* did you mean 'textbook'"):
        TextbookGeo3k("train", 1, style="textbok")
    with pytest.raises(UserError, match=r"families: must be known families of style textbook, got isosceles"):
        TextbookGeo3k("train", 1, families=["isosceles"])


def draw_again(source: ProceduralGeo3k, index: int) -> Image.Image:
    return message_images(source[index].prompt)[0]


#: Of texts made before textbook problems existed.
PLAIN_DIGESTS: dict[Split, str] = {"train": "e63d3aca8b34817d", "heldout": "40913481ae1ad85c"}


@pytest.mark.parametrize("split", PLAIN_DIGESTS)
def test_plain_problems_do_not_change(split: Split) -> None:
    source = ProceduralGeo3k(split, 60, seed=17)
    texts = [f"{p.key}|{p.question}|{p.answer}|{p.reasoning}" for p in map(source.problem, range(60))]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest().startswith(PLAIN_DIGESTS[split])


def test_the_command_draws_one_problem_of_each_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    assert sheet.run(["--families", "angle_sum", "--families", "kite_angles", "--columns", "1", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["angle_sum:", "kite_angles:"]
    assert lines[2] == f"2 images in {out}"
    with Image.open(out) as page:
        assert page.width >= 64 + 16 and page.height >= 2 * 64 + 24
    with pytest.raises(UserError, match="--out: must be a file that can be written"):
        sheet.run(["--families", "angle_sum", "--out", str(tmp_path / "no" / "sheet.png")])


@pytest.mark.parametrize("name", ["DejaVuSans", "DejaVuSans-Oblique", "STIXGeneral", "STIXGeneralItalic"])
def test_fonts_come_with_matplotlib(name: str) -> None:
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None and spec.origin is not None
    assert (Path(spec.origin).parent / f"mpl-data/fonts/ttf/{name}.ttf").is_file()


@pytest.mark.parametrize("font", FONTS)
def test_every_font_has_every_character(font: str) -> None:
    """A character that a font lacks is drawn as an empty box, the same for all of them."""
    characters = "0123456789abnxyzABCDEFGHJKLMNOPQRSTUVWXYZ°+−()"
    masks = {character: text_mask(character, font, 40).tobytes() for character in characters}  # type: ignore[arg-type]
    assert len(set(masks.values())) == len(characters)
    try:
        missing = text_mask("\ue123", font, 40)  # type: ignore[arg-type]
    except AssertionError:  # this font draws nothing for what it lacks
        return
    assert missing.tobytes() not in masks.values()


def test_pillow_brings_its_own_font() -> None:
    assert isinstance(ImageFont.load_default(size=12), ImageFont.FreeTypeFont)


@pytest.mark.parametrize(
    ("family", "givens", "unknown"),
    [
        ("angle_sum", (110, 80), "angle"),
        ("angle_sum", (110, 0), "angle"),
        ("exterior_angle_theorem", (40, 70), "remote"),
        ("isosceles_triangle", (95,), "apex"),
        ("bisector_ratio", (1, 50, 3), "part"),
        ("secant_lengths", (2, 3, 9), "secant"),
        ("secant_angles", (60, 80), "angle"),
        ("chord_distance", (5, 7), "chord"),
        ("chord_distance", (5, 7), "distance"),
        ("law_of_sines", (90, 95, 8), "side"),
        ("pythagoras", (5, 12), "leg"),
        ("equal_expressions", (2, 4, 5, 9), "kite"),
        ("sum_of_expressions", (2, 90, 3, 95), "line"),
        ("composite_figure", (9, 8, 10, 3), "corner"),
        ("angle_sum", (60, 50, 2, 90), "angle+"),
    ],
)
def test_numbers_that_make_no_figure_have_no_solution(family: str, givens: tuple[int, ...], unknown: str) -> None:
    with pytest.raises(ValueError):
        THEOREMS[family].solve(givens, unknown)
