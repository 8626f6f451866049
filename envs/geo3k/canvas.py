"""Draws small geometry diagrams with labels as 160x128 RGB images.

Points are complex numbers in pixels, x to the right and y down, so a rotation is a multiplication. The canvas records
strokes and labels, and `image` draws them, so that a crowded layout can be discarded before it is drawn.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from random import Random

from PIL import Image, ImageDraw, ImageFont

Point = complex

WIDTH = 160
HEIGHT = 128
BORDER = 3  # pixels at each edge that stay white

ARC_RADIUS = 11.0
RIGHT_ANGLE_SIDE = 8.0
ORDER_GAP = 6.0  # pixels; labels closer than this in x have no clear order


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


@lru_cache(maxsize=4096)
def _text_box(text: str, size: int) -> Image.Image:
    """Return the text in black on a white box that is one pixel larger than its ink on every side."""
    font = _font(size)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
    box = Image.new("L", (right - left + 2, bottom - top + 2), 255)
    ImageDraw.Draw(box).text((1 - left, 1 - top), text, fill=0, font=font)
    return box


def _on_paper(box: Image.Image, size: tuple[int, int]) -> Image.Image:
    paper = Image.new("L", size, 255)
    paper.paste(box, (0, 0))
    return paper


def _unit(vector: complex) -> complex:
    return vector / abs(vector)


def _cross(a: complex, b: complex) -> float:
    return a.real * b.imag - a.imag * b.real


def _draw_line(draw: ImageDraw.ImageDraw, start: Point, end: Point, width: int) -> None:
    # Pillow's own wide lines differ in width by direction; shifted thin ones do not.
    if abs((end - start).real) > abs((end - start).imag):
        step = 1j
    else:
        step = 1
    for k in range(width):
        a = start + k * step
        b = end + k * step
        draw.line((round(a.real), round(a.imag), round(b.real), round(b.imag)), fill=0)


class Canvas:
    """Records strokes and labels, then draws them.

    Example::

        canvas = Canvas(line_width=1, font_size=15)
        a, b, c = canvas.fit((0j, 4 + 0j, 3j), rng)      # any units -> pixels inside the image
        canvas.polygon((a, b, c))
        canvas.angle(b, c, a, "37°")                     # an arc at b, its label on the bisector
        canvas.side(a, b, "4", inside=c)                 # the label of side ab, outside the triangle
        image = canvas.image() if canvas.conflicts == 0 else None
    """

    def __init__(self, line_width: int = 1, font_size: int = 15, overprint: tuple[int, int] | None = None) -> None:
        self._line_width = line_width
        self._font_size = font_size
        self._overprint = overprint
        self._strokes: list[tuple[Point, Point]] = []  # drawn with the figure's line width
        self._marks: list[tuple[Point, Point]] = []  # drawn one pixel wide: ticks, dashes, right angles
        self._arcs: list[tuple[Point, float, float, float]] = []  # center, radius, start and end in degrees
        self._circles: list[tuple[Point, float]] = []
        self._dots: list[Point] = []
        self._labels: list[tuple[Point, Image.Image]] = []  # center, box
        self._ordered = 0  # number of first labels that should go from left to right
        self._obstacles: list[tuple[Point, Point]] = []  # strokes that labels should not touch

    def fit(
        self, points: Iterable[Point], rng: Random, margin: tuple[float, float] = (9, 9), stretch: float = 1.15
    ) -> list[Point]:
        """Scale and shift points to pixels within the margins (x, y); size and position vary if there is room.

        `stretch` bounds the ratio of the x and y scales: 1 keeps every angle.
        """
        points = list(points)
        xs = [p.real for p in points]
        ys = [p.imag for p in points]
        low = complex(min(xs), min(ys))
        span_x = max(max(xs) - low.real, 1e-6)
        span_y = max(max(ys) - low.imag, 1e-6)
        room_x = WIDTH - 2 * margin[0]
        room_y = HEIGHT - 2 * margin[1]
        scale = min(room_x / span_x, room_y / span_y)
        factor = rng.uniform(0.93, 1.0)
        scale_x = factor * min(room_x / span_x, scale * rng.uniform(1, stretch))
        scale_y = factor * min(room_y / span_y, scale * rng.uniform(1, stretch))
        left = margin[0] + rng.random() * (room_x - span_x * scale_x)
        top = margin[1] + rng.random() * (room_y - span_y * scale_y)
        return [complex(left + (p.real - low.real) * scale_x, top + (p.imag - low.imag) * scale_y) for p in points]

    def line(self, start: Point, end: Point) -> None:
        """Draw a straight line."""
        self._strokes.append((start, end))
        self._obstacles.append((start, end))

    def polygon(self, points: Sequence[Point]) -> None:
        """Draw a closed polygon."""
        for start, end in zip(points, [*points[1:], points[0]], strict=True):
            self.line(start, end)

    def dashed(self, start: Point, end: Point) -> None:
        """Draw a dashed line: 4 pixels on, 3 off."""
        along = _unit(end - start)
        length = abs(end - start)
        for k in range(int(length // 7) + 1):
            self._marks.append((start + along * 7 * k, start + along * min(7 * k + 4, length)))
        self._obstacles.append((start, end))

    def circle(self, center: Point, radius: float) -> None:
        """Draw a circle with a dot at its center."""
        self._circles.append((center, radius))
        self._dots.append(center)
        self._obstacles.append((center, center))

    def right_angle(self, vertex: Point, start: Point, end: Point) -> None:
        """Draw the small square that marks a right angle."""
        u = _unit(start - vertex) * RIGHT_ANGLE_SIDE
        v = _unit(end - vertex) * RIGHT_ANGLE_SIDE
        for mark in ((vertex + u, vertex + u + v), (vertex + u + v, vertex + v)):
            self._marks.append(mark)
            self._obstacles.append(mark)

    def ticks(self, start: Point, end: Point, count: int = 1, at: float = 0.5) -> None:
        """Mark a segment as equal to others with the same number of ticks, at a fraction of its length."""
        along = _unit(end - start)
        middle = start + (end - start) * at
        across = along * 4j
        for k in range(count):
            place = middle + along * 4 * (k - (count - 1) / 2)
            self._strokes.append((place - across, place + across))
            self._obstacles.append((place - across, place + across))

    def arrow(self, start: Point, end: Point, at: float) -> None:
        """Mark a segment as parallel to others with an arrow head at a fraction of its length."""
        along = _unit(end - start) * 5
        tip = start + (end - start) * at
        for wing in (-along + along * 0.8j, -along - along * 0.8j):
            self._strokes.append((tip, tip + wing))
            self._obstacles.append((tip, tip + wing))

    def angle(self, vertex: Point, start: Point, end: Point, text: str, arcs: int = 1) -> None:
        """Mark the angle below 180 degrees at `vertex` between two rays with an arc and a label on its bisector."""
        u = _unit(start - vertex)
        v = _unit(end - vertex)
        if _cross(u, v) < 0:
            u, v = v, u
        first = math.degrees(cmath.phase(u))
        opening = math.degrees(cmath.phase(v / u))
        bisector = u * cmath.rect(1, math.radians(opening / 2))
        for k in range(arcs):
            radius = ARC_RADIUS + 3 * k
            self._arcs.append((vertex, radius, first, first + opening))
            middle = vertex + bisector * radius
            self._obstacles += [(vertex + u * radius, middle), (middle, vertex + v * radius)]
        box = self._box(text)
        half_x = box.width / 2
        half_y = box.height / 2
        # The label is as close to the vertex as possible without touching the rays or the arc.
        reach = max(half_x * abs(ray.imag) + half_y * abs(ray.real) for ray in (u, v)) + 1 + self._line_width / 2
        beyond_arc = ARC_RADIUS + 3 * arcs - 2 + half_x * abs(bisector.real) + half_y * abs(bisector.imag)
        distance = max(reach / math.sin(math.radians(opening / 2)), beyond_arc)
        self._place(vertex + bisector * distance, box)

    def side(self, start: Point, end: Point, text: str, inside: Point, at: float = 0.5) -> None:
        """Label a segment next to the point at fraction `at` of its length, on the side away from `inside`."""
        normal = _unit(end - start) * 1j
        anchor = start + (end - start) * at
        if _cross(end - start, inside - start) > 0:
            normal = -normal
        box = self._box(text)
        reach = box.width / 2 * abs(normal.real) + box.height / 2 * abs(normal.imag) + 2 + self._line_width / 2
        self._place(anchor + normal * reach, box)

    def expect_order(self, count: int) -> None:
        """Require that the first `count` labels go from left to right; each pair out of order is a conflict."""
        self._ordered = count

    def _box(self, text: str) -> Image.Image:
        """Return the box of a label: of the number to overprint, with the other one as strong as itself."""
        box = _text_box(text, self._font_size)
        if not self._overprint:
            return box
        number, other = self._overprint
        twin = _text_box(re.sub(rf"(?<!\d){number}(?!\d)", str(other), text), self._font_size)
        size = max(box.width, twin.width), max(box.height, twin.height)
        return Image.blend(_on_paper(box, size), _on_paper(twin, size), 0.5)

    def _place(self, center: Point, box: Image.Image) -> None:
        reach_x = box.width / 2 + BORDER
        reach_y = box.height / 2 + BORDER
        x = min(max(center.real, reach_x), WIDTH - reach_x)
        y = min(max(center.imag, reach_y), HEIGHT - reach_y)
        self._labels.append((complex(x, y), box))

    @property
    def conflicts(self) -> int:
        """The cost of a layout: 3 for each stroke or label that a label touches, 1 for labels out of order."""
        touching = 0
        for index, (center, box) in enumerate(self._labels):
            x = box.width / 2 + 0.5
            y = box.height / 2 + 0.5
            for other, other_box in self._labels[:index]:
                apart = other - center
                touching += abs(apart.real) < x + other_box.width / 2 + 2 and abs(apart.imag) < y + other_box.height / 2
            for start, end in self._obstacles:
                # Separating axes of a box and a segment: x, y and the segment's normal.
                half = (end - start) / 2
                off = (start + end) / 2 - center
                touching += (
                    abs(off.real) < x + abs(half.real)
                    and abs(off.imag) < y + abs(half.imag)
                    and (half == 0 or abs(_cross(half, off)) < x * abs(half.imag) + y * abs(half.real))
                )
            for middle, radius in self._circles:
                dx = abs(middle.real - center.real)
                dy = abs(middle.imag - center.imag)
                nearest = math.hypot(max(dx - x, 0), max(dy - y, 0))
                touching += nearest < radius < math.hypot(dx + x, dy + y)
        ordered = self._labels[: self._ordered]
        swapped = sum(later.real - earlier.real < ORDER_GAP for (earlier, _), (later, _) in pairwise(ordered))
        return 3 * touching + swapped

    @property
    def label_boxes(self) -> list[tuple[int, int, int, int]]:
        """The left, top, right and bottom edges of every label, in pixels."""
        corners = [(round(c.real - box.width / 2), round(c.imag - box.height / 2), box) for c, box in self._labels]
        return [(left, top, left + box.width, top + box.height) for left, top, box in corners]

    def image(self) -> Image.Image:
        """Draw everything recorded so far: lines first, then labels over them."""
        image = Image.new("L", (WIDTH, HEIGHT), 255)
        draw = ImageDraw.Draw(image)
        for center, radius in self._circles:
            x = center.real
            y = center.imag
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=0, width=self._line_width)
        for dot in self._dots:
            draw.ellipse((dot.real - 1.5, dot.imag - 1.5, dot.real + 1.5, dot.imag + 1.5), fill=0)
        for lines, width in ((self._strokes, self._line_width), (self._marks, 1)):
            for start, end in lines:
                _draw_line(draw, start, end, width)
        for center, radius, first, last in self._arcs:
            x = center.real
            y = center.imag
            draw.arc((x - radius, y - radius, x + radius, y + radius), first, last, fill=0)
        for center, box in self._labels:
            image.paste(box, (round(center.real - box.width / 2), round(center.imag - box.height / 2)))
        return image.convert("RGB")
