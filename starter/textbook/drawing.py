"""Draws a figure with its wording: scale, turn and labels vary until no label touches anything."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from PIL import Image, ImageDraw

from starter.textbook.figure import Figure, Label, Point, unit, with_unit
from starter.textbook.placement import Placer, along, around, at_distance, beside_arc, reach, within
from starter.textbook.text import DETAIL, FONTS, FontName, text_mask
from starter.textbook.theorem import Wording, names

TRIES = 24
SMALLER_TRIES = 40
LEADER = 0.25  # what a label with a leader line counts as a conflict
BORDER = 5  # pixels around everything
CELL = 32  # sides of an image are multiples: the pixels of one token of Qwen-VL models
Colour = tuple[int, int, int]

BLACK = (0, 0, 0)
BLUE = (0, 104, 168)
TEAL = (0, 128, 128)
GREY = (70, 70, 70)
MAGENTA = (214, 22, 116)
RED = (200, 30, 30)
WHITE = (255, 255, 255)
CREAM = (255, 247, 226)


@dataclass(frozen=True)
class Scale:
    """How large a style draws, in pixels."""

    span: tuple[int, int]  # the longer side of the figure without labels
    font: tuple[int, int]
    most_cells: int
    longest: int
    least: tuple[int, int] = (CELL, CELL)  # width and height of the smallest image


SCALES = {
    "textbook": Scale(span=(100, 165), font=(13, 16), most_cells=48, longest=256),
    "small_print": Scale(span=(250, 330), font=(9, 10), most_cells=208, longest=512, least=(448, 352)),
}


@dataclass(frozen=True)
class Look:
    """Font, line width and colours of one image."""

    font: FontName
    font_size: float
    line_width: float
    line: Colour
    mark: Colour
    fill: Colour
    paper: Colour

    @classmethod
    def pick(cls, scale: Scale, rng: Random) -> Look:
        """Return a look as textbooks have it."""
        line, mark = rng.choice(
            ((BLUE, MAGENTA), (BLUE, MAGENTA), (BLACK, BLACK), (BLACK, RED), (TEAL, MAGENTA), (GREY, BLACK))
        )
        return cls(
            font=rng.choice((FONTS[0], *FONTS)),
            font_size=rng.uniform(*scale.font),
            line_width=rng.uniform(1.1, 2.0),
            line=line,
            mark=mark,
            fill=rng.choice(((214, 232, 246), (255, 224, 200), (226, 226, 226))),
            paper=CREAM if rng.random() < 0.12 else WHITE,
        )


@dataclass(frozen=True)
class Drawing:
    """An image, and where each text stands in it: (left, top, right, bottom) in pixels."""

    image: Image.Image
    texts: tuple[tuple[str, tuple[int, int, int, int]], ...]
    conflicts: int  # strokes and labels that labels touch
    pixels_per_unit: float


def draw(figure: Figure, wording: Wording, rng: Random, scale: Scale) -> Drawing:
    """Draw a figure: the first of a few layouts without conflicts, else the one with the fewest."""
    look = Look.pick(scale, rng)
    best: _Layout | None = None
    for attempt in range(TRIES + SMALLER_TRIES):
        # Later attempts are larger, with smaller texts; where none fits, everything gets smaller until one does.
        if attempt < TRIES:
            growth = 1 + 0.03 * max(0, attempt - 3)
            font_size = max(look.font_size / growth, scale.font[0] - 1)
        else:
            growth = 0.98 ** (attempt - TRIES)
            font_size = (scale.font[0] - 1) * growth
        span = rng.uniform(*scale.span) * growth
        layout = _Layout(_posed(figure, rng), wording, replace(look, font_size=font_size), span, scale.least)
        if not layout.fits(scale):
            continue
        if best is None or layout.conflicts < best.conflicts:
            best = layout
        if best.conflicts <= (0 if attempt < 10 else 2 * LEADER) or attempt >= TRIES - 1:
            break
    assert best is not None, f"no layout of {figure} fits"
    return best.drawing(rng)


def _posed(figure: Figure, rng: Random) -> Figure:
    """Return the figure turned: mostly as it stands, or by quarters, or slightly."""
    mirrored = rng.random() < 0.5
    roll = rng.random()
    if figure.upright or roll < 0.5:
        if roll < 0.1:
            turn = rng.uniform(-0.04, 0.04)
        else:
            turn = 0.0
    elif roll < 0.75:
        turn = math.pi / 2 * rng.randrange(4)
    else:
        turn = rng.uniform(-math.pi, math.pi)
    return figure.turned(turn, mirrored)


class _Layout:
    """A figure in pixels with its labels placed; the origin is moved when it is drawn."""

    def __init__(self, figure: Figure, wording: Wording, look: Look, span: float, least: tuple[int, int]) -> None:
        self._figure = figure
        self._look = look
        self._least = least
        bounds = list(figure.points.values())
        for circle in figure.circles:
            center, on = figure.ends(circle)
            bounds += [center + turn * abs(on - center) for turn in (1, 1j, -1, -1j)]
        wide = max(p.real for p in bounds) - min(p.real for p in bounds)
        high = max(p.imag for p in bounds) - min(p.imag for p in bounds)
        self.scale = span / max(wide, high)
        self._at = {name: point.conjugate() * self.scale for name, point in figure.points.items()}
        self._extent = [point.conjugate() * self.scale for point in bounds]
        self._middle = sum(self._extent) / len(self._extent)
        self._marks = list(self._mark_strokes())
        self._heads = list(self._arrow_heads())
        self._thin: list[list[Point]] = []  # dimension lines
        self._thin_heads: list[list[Point]] = []
        self._texts: list[tuple[str, Image.Image, Point]] = []
        self.conflicts = 0.0
        named = "".join(pair for pair, _ in figure.strokes)
        self._corners = [name for name in figure.points if named.count(name) != 1 and name not in figure.dots]
        labels = list(_visible_labels(figure, wording))
        spanned = [label for label in labels if label.part.points in figure.spans]
        boxes = [self._span(label) for label in spanned]
        self._placer = Placer(self._obstacles())
        for box in boxes:
            self._placer.put(*box)
        self._place_labels([label for label in labels if label not in spanned], names(figure, wording.letters))

    def _ends(self, names: str) -> list[Point]:
        return [self._at[name] for name in names]

    def _rays(self, points: str) -> tuple[Point, complex, float]:
        """Return the vertex of an angle, the unit of its first ray, and its signed opening in radians."""
        a, vertex, b = self._ends(points)
        u = unit(a - vertex)
        return vertex, u, cmath.phase((b - vertex) / u)

    def _mark_strokes(self) -> Iterator[list[Point]]:
        """Yield the lines of right angles, ticks and arcs of equal angles."""
        figure = self._figure
        size = self._look.font_size
        for points in figure.right_angles:
            a, vertex, b = self._ends(points)
            side = min(0.6 * size, 0.3 * abs(a - vertex), 0.3 * abs(b - vertex))
            u = unit(a - vertex) * side
            v = unit(b - vertex) * side
            yield [vertex + u, vertex + u + v, vertex + v]
        for segment, count in figure.ticks:
            a, b = self._ends(segment)
            along_it = unit(b - a)
            for k in range(count):
                middle = (a + b) / 2 + along_it * 4 * (k - (count - 1) / 2)
                yield [middle - along_it * 0.34j * size, middle + along_it * 0.34j * size]
        for points, count in figure.equal_angles:
            vertex, u, opening = self._rays(points)
            for k in range(count):
                radius = size * 1.05 + 3.2 * k
                yield [vertex + u * cmath.rect(radius, opening * step / 8) for step in range(9)]

    def _arrow_heads(self) -> Iterator[tuple[list[Point], bool]]:
        """Yield the triangles of arrow heads, and whether each is a mark of parallels."""
        size = 0.5 * self._look.font_size
        for pair, ends in self._figure.strokes:
            a, b = self._ends(pair)
            for tail, tip in ((a, b), (b, a))[: {"": 0, "end": 1, "both": 2}[ends]]:
                yield _head(tip, unit(tip - tail), size), False
        for pair, count in self._figure.parallels:
            a, b = self._ends(pair)
            along_it = unit(b - a)
            at = a + (b - a) * (0.8 if any(pair in stroke for stroke, ends in self._figure.strokes if ends) else 0.5)
            for k in range(count):
                yield _head(at + along_it * size * (k + 0.5), along_it, size * 1.1), True

    def _obstacles(self) -> list[tuple[Point, Point]]:
        figure = self._figure
        strokes = [tuple(self._ends(pair)) for pair, _ in figure.strokes]
        strokes += [tuple(self._ends(pair)) for pair in figure.dashes]
        for circle in figure.circles:
            center, on = self._ends(circle)
            ring = [center + cmath.rect(abs(on - center), math.pi * k / 24) for k in range(49)]
            strokes += pairwise(ring)
        for line in (*self._marks, *self._thin, *self._thin_heads):
            strokes += pairwise(line)
        for head, _ in self._heads:
            strokes += pairwise(head)
        strokes += [(self._at[dot], self._at[dot]) for dot in figure.dots]
        return strokes  # type: ignore[return-value]

    def _text(self, text: str) -> tuple[Image.Image, tuple[float, float]]:
        """Return the ink of a text, and half its width and height."""
        mask = text_mask(text, self._look.font, self._look.font_size)
        return mask, _half(mask)

    def _span(self, label: Label) -> tuple[Point, float, float]:
        """Draw a dimension line outside the figure with its label in the middle; return the label's box."""
        a, b = self._ends(label.part.points)
        size = self._look.font_size
        mask, half = self._text(label.text)
        along_it = unit(b - a)
        outside = along_it * (1j if ((self._middle - a) / along_it).imag <= 0 else -1j)
        far = max(((point - a) / outside).real for point in self._extent) + 0.55 * size
        far += reach(outside, *half)
        center = (a + b) / 2 + outside * far
        gap = reach(along_it, *half) + 3
        for end, inward in ((a, along_it), (b, -along_it)):
            tip = end + outside * far
            self._thin += [[end + outside * 4, tip + outside * 3], [tip, center - inward * gap]]
            self._thin_heads.append(_head(tip, -inward, 0.4 * size))
        self._texts.append((label.text, mask, center))
        return center, *half

    def _place_labels(self, labels: Sequence[Label], letters: Mapping[str, str]) -> None:
        for kind in ("angle", "length", "arc"):  # those with the least choice first
            for label in labels:
                if label.part.kind == kind:
                    self._place(label)
        for name, letter in letters.items():
            mask, half = self._text(letter)
            if name in self._figure.dots:
                clear = 3.5
            else:
                clear = 3.0
            options = list(around(self._at[name], self._away(name), *half, clear))
            self._put(letter, mask, *self._placer.choose(options, *half))

    def _away(self, name: str) -> complex:
        """Return the direction away from the lines at a point, or from the middle of the figure."""
        point = self._at[name]
        towards = sum(
            unit(other - point)
            for pair, _ in self._figure.strokes
            if name in pair
            for other in self._ends(pair.replace(name, ""))
        )
        if abs(towards) > 0.2:
            away = -towards
        else:
            away = point - self._middle
        if abs(away) > 1e-6:
            return unit(away)
        return -1j

    def _place(self, label: Label) -> None:
        mask, half = self._text(label.text)
        ends = self._ends(label.part.points)
        rivals: list[Point] = []
        if label.part.kind == "angle":
            marked = [
                count
                for points, count in self._figure.equal_angles
                if points in (label.part.points, label.part.points[::-1])
            ]
            if marked:
                least = self._look.font_size * 1.05 + 3.2 * max(marked)
            else:
                least = 2.0
            options = list(within(ends[1], ends[0], ends[2], *half, least))
            rivals = [self._at[name] for name in self._corners if name != label.part.points[1]]
        elif label.part.kind == "length":
            options = list(along(*ends, *half, self._look.line_width / 2, self._middle))  # type: ignore[call-arg]
        else:
            center, a, b = ends
            opening = _arc_opening(center, a, b)
            options = list(beside_arc(center, abs(a - center), cmath.phase(a - center), opening, *half))
        center, conflicts = self._placer.choose(options, *half, rivals)
        if conflicts and label.part.kind == "angle":
            center, conflicts = self._lead(label.part.points, mask)
            self.conflicts += LEADER
        self._put(label.text, mask, center, conflicts)

    def _lead(self, points: str, mask: Image.Image) -> tuple[Point, int]:
        """Place the label of a narrow angle outside, with a leader line that points into the angle."""
        size = self._look.font_size
        vertex, u, opening = self._rays(points)
        target = vertex + u * cmath.rect(min(2.4, 0.55 / abs(opening) + 0.7) * size, opening / 2)
        half = _half(mask)
        options = [
            option
            for option in at_distance(target, [size * k for k in (1.6, 2.1, 2.6, 3.2, 4.0, 5.0)])
            if abs(option[0] - target) - _to_edge(unit(option[0] - target), *half) > 0.9 * size
        ]
        center, conflicts = self._placer.choose_led(options, *half)
        along_it = unit(target - center)
        start = center + along_it * (_to_edge(along_it, *half) + 2)
        self._thin.append([start, target])
        self._thin_heads.append(_head(target, along_it, 0.4 * size))
        self._placer.draw(start, target)
        return center, conflicts

    def _put(self, text: str, mask: Image.Image, center: Point, conflicts: int) -> None:
        self._placer.put(center, *_half(mask))
        self._texts.append((text, mask, center))
        self.conflicts += conflicts

    def _bounds(self) -> tuple[Point, Point]:
        """Return the upper left and lower right corner of all that is drawn."""
        corners = [*self._extent, *(point for head, _ in self._heads for point in head)]
        corners += [point for line in self._thin for point in line]
        for center, half_x, half_y in self._placer.boxes:
            corners += [center - complex(half_x, half_y), center + complex(half_x, half_y)]
        xs = [p.real for p in corners]
        ys = [p.imag for p in corners]
        return complex(min(xs), min(ys)), complex(max(xs), max(ys))

    def _size(self) -> tuple[int, int]:
        low, high = self._bounds()
        need = high - low + 2 * BORDER * (1 + 1j)
        wide, high = (CELL * math.ceil(side / CELL) for side in (need.real, need.imag))
        return max(wide, self._least[0]), max(high, self._least[1])

    def fits(self, scale: Scale) -> bool:
        """Return whether the image is not larger than its style allows."""
        width, height = self._size()
        return max(width, height) <= scale.longest and width * height <= scale.most_cells * CELL**2

    def drawing(self, rng: Random) -> Drawing:
        """Draw everything: fills, strokes, marks, then texts."""
        width, height = self._size()
        low, high = self._bounds()
        room = complex(width, height) - (high - low) - 2 * BORDER * (1 + 1j)
        origin = low - BORDER * (1 + 1j) - complex(rng.random() * room.real, rng.random() * room.imag)
        pen = _Pen(width, height, origin)
        figure = self._figure
        look = self._look
        pen.image.paste(look.paper, (0, 0, width, height))
        for shape in figure.shaded:
            pen.fill(self._outlines(shape), look.fill)
        lines = [self._ends(pair) for pair, _ in figure.strokes]
        for pair in figure.dashes:
            lines += _dashes(*self._ends(pair))
        rings = [(center, abs(on - center)) for center, on in (self._ends(circle) for circle in figure.circles)]
        dots = [self._at[name] for name in figure.dots]
        pen.strokes(lines, look.line_width, look.line, rings, dots, [head for head, mark in self._heads if not mark])
        pen.strokes(
            self._marks, max(1.0, look.line_width * 0.75), look.mark, (), (), [h for h, mark in self._heads if mark]
        )
        pen.strokes(self._thin, 0.8, BLACK, (), (), self._thin_heads)
        boxes = [(text, pen.text(mask, center)) for text, mask, center in self._texts]
        return Drawing(pen.image, tuple(boxes), int(self.conflicts), self.scale)

    def _outlines(self, shape: str) -> list[list[Point]]:
        """Return the outline of a shaded shape, then its holes."""
        if shape.endswith(" arc"):
            center, a, b = self._ends(shape[:3])
            opening = _arc_opening(center, a, b)
            return [[center, *(center + (a - center) * cmath.rect(1, opening * k / 40) for k in range(41))]]
        return [self._ends(part) for part in shape.split("-")]


def _visible_labels(figure: Figure, wording: Wording) -> Iterator[Label]:
    """Yield the labels that the figure shows, with their variable."""

    def named(label: Label, variable: str) -> Label:
        if variable.isdigit() and not label.givens:
            return replace(label, text=variable)
        return replace(label, text=label.text.replace("x", variable))

    for place, label in enumerate(figure.labels):
        if place not in wording.told:
            yield named(label, wording.variable)
    if figure.asked is not None and figure.asked.text and wording.variable:
        yield named(figure.asked, wording.variable)
    for part, variable in zip(figure.others, wording.others, strict=False):
        yield named(Label(part, with_unit(part, "x")), variable)
    if wording.spare and figure.spare is not None:
        yield figure.spare


def _arc_opening(center: Point, a: Point, b: Point) -> float:
    """Return the radians from a to b: anticlockwise in the plane is clockwise in pixels with y down."""
    return -((-cmath.phase((b - center) / (a - center))) % (2 * math.pi))


def _head(tip: Point, along_it: complex, size: float) -> list[Point]:
    """Return the closed triangle of an arrow head."""
    return [tip, tip - along_it * size * (1 + 0.38j), tip - along_it * size * (1 - 0.38j), tip]


def _half(mask: Image.Image) -> tuple[float, float]:
    return mask.width / 2, mask.height / 2


def _to_edge(direction: complex, half_x: float, half_y: float) -> float:
    """Return how far the edge of a box is from its center in a direction."""
    return min(half_x / max(abs(direction.real), 1e-9), half_y / max(abs(direction.imag), 1e-9))


def _dashes(start: Point, end: Point) -> list[list[Point]]:
    """Return the pieces of a dashed line: 4 pixels on, 3 off."""
    length = abs(end - start)
    along_it = unit(end - start)
    places = [7.0 * k for k in range(int(length // 7) + 1)]
    return [[start + along_it * at, start + along_it * min(at + 4, length)] for at in places]


class _Pen:
    """Draws at `DETAIL` times the size and reduces, so that edges are smooth."""

    def __init__(self, width: int, height: int, origin: Point) -> None:
        self.image = Image.new("RGB", (width, height))
        self._origin = origin

    def _large(self, points: Sequence[Point]) -> list[tuple[float, float]]:
        return [((p.real - self._origin.real) * DETAIL, (p.imag - self._origin.imag) * DETAIL) for p in points]

    def _blank(self) -> tuple[Image.Image, ImageDraw.ImageDraw]:
        mask = Image.new("L", (self.image.width * DETAIL, self.image.height * DETAIL), 0)
        return mask, ImageDraw.Draw(mask)

    def fill(self, outlines: Sequence[Sequence[Point]], colour: Colour) -> None:
        """Fill the first outline without the others."""
        mask, pen = self._blank()
        for k, outline in enumerate(outlines):
            pen.polygon(self._large(outline), fill=0 if k else 255)
        self.image.paste(colour, mask=mask.reduce(DETAIL))

    def strokes(
        self,
        lines: Sequence[Sequence[Point]],
        width: float,
        colour: Colour,
        rings: Sequence[tuple[Point, float]],
        dots: Sequence[Point],
        heads: Sequence[Sequence[Point]],
    ) -> None:
        """Draw lines with round ends, circles, dots and filled triangles."""
        mask, pen = self._blank()
        pixels = round(width * DETAIL)
        for line in lines:
            points = self._large(line)
            pen.line(points, fill=255, width=pixels, joint="curve")
            for x, y in (points[0], points[-1]):
                pen.ellipse((x - pixels / 2, y - pixels / 2, x + pixels / 2, y + pixels / 2), fill=255)
        for center, radius in rings:
            ((x, y),) = self._large([center])
            reach = radius * DETAIL + pixels / 2
            pen.ellipse((x - reach, y - reach, x + reach, y + reach), outline=255, width=pixels)
        for dot in dots:
            ((x, y),) = self._large([dot])
            reach = 2.1 * DETAIL
            pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=255)
        for head in heads:
            pen.polygon(self._large(head), fill=255)
        self.image.paste(colour, mask=mask.reduce(DETAIL))

    def text(self, mask: Image.Image, center: Point) -> tuple[int, int, int, int]:
        """Paste a text and return its box."""
        left = round(center.real - self._origin.real - mask.width / 2)
        top = round(center.imag - self._origin.imag - mask.height / 2)
        self.image.paste(BLACK, (left, top), mask)
        return left, top, left + mask.width, top + mask.height
