"""Theorems about lengths: right triangles, similar triangles, midsegments, medians and trigonometry."""

from __future__ import annotations

import math
from random import Random

from envs.geo3k.families.arithmetic import divide, multiply, radical
from envs.geo3k.families.family import Givens, require
from envs.geo3k.textbook.figure import Figure, angle, length, polar, triangle, triangle_of_sides
from envs.geo3k.textbook.theorem import Theorem, pick_angle

TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41))
TO_TENTH = "Round to the nearest tenth."


def root_of(square: int) -> tuple[str, str]:
    r"""Return the step of a square root and its value: 50 -> "\sqrt { 50 } = 5 \sqrt { 2 }.", "5 \sqrt { 2 }"."""
    answer, root = radical(1, square), f"\\sqrt {{ {square} }}"
    return (f"{root}." if answer == root else f"{root} = {answer}."), answer


def right(leg: float, other: float) -> dict[str, complex]:
    """Return the right triangle A, B, C with the right angle at C, CA = leg and CB = other."""
    return {"C": 0j, "A": complex(leg), "B": complex(0, other)}


class Pythagoras(Theorem):
    """Two sides of a right triangle are given; unknown `hypotenuse` or `leg`."""

    name = "pythagoras"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if level == 3:
            a, b = rng.randint(3, 20), rng.randint(3, 20)
            return ((a, b), "hypotenuse") if rng.random() < 0.5 else ((a + b // 2 + 1, a), "leg")
        k = rng.randint(1, 6 if level == 1 else 9)
        a, b, c = (k * side for side in rng.choice(TRIPLES[: 3 if level == 1 else 5]))
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        return ((a, b), "hypotenuse") if rng.random() < 0.5 else ((c, a), "leg")

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        first, second = givens
        sign = "+" if unknown == "hypotenuse" else "-"
        require(sign == "+" or first > second, "the hypotenuse is the longest side")
        square = first * first + (second * second if sign == "+" else -second * second)
        last, answer = root_of(square)
        squares = f"{first} * {first} = {first * first}. {second} * {second} = {second * second}."
        return f"{squares} {first * first} {sign} {second * second} = {square}. {last}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens
        legs = givens if unknown == "hypotenuse" else (second, math.sqrt(first * first - second * second))
        figure = Figure(right(*legs))
        figure.polygon("ABC")
        figure.right_angles.append("ACB")
        parts = ("CA", "CB", "AB") if unknown == "hypotenuse" else ("AB", "CA", "CB")
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        return figure


#: Unknown -> the printed angle at A, the given side, the asked side; C is the right angle.
_SPECIAL = {
    "45_hypotenuse": (45, "CA", "AB"),
    "45_leg": (45, "AB", "CB"),
    "30_hypotenuse": (30, "CB", "AB"),
    "30_short": (30, "AB", "CB"),
    "60_long": (60, "CA", "CB"),
    "60_hypotenuse": (60, "CA", "AB"),
    "30_long": (30, "AB", "CA"),
    "60_short": (60, "CB", "CA"),
}


class SpecialTriangles(Theorem):
    """One angle and one side of a 45-45-90 or 30-60-90 triangle are given, another side is asked."""

    name = "special_triangles"
    is_whole = False

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        names = list(_SPECIAL)
        unknown = rng.choice({1: [names[2], names[3], names[5]], 2: names[:1] + names[2:6], 3: names}[level])
        side = rng.randint(2, {1: 20, 2: 40, 3: 40}[level])
        return (_SPECIAL[unknown][0], 2 * side if level < 3 and _SPECIAL[unknown][1] == "AB" else side), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        opening, side = givens
        require(opening == _SPECIAL[unknown][0], "the angle belongs to the unknown")
        if unknown in ("30_hypotenuse", "60_hypotenuse"):
            return f"2 * {side} = {2 * side}.", str(2 * side)
        if unknown == "30_short":
            return divide(side, 2)
        if unknown in ("45_leg", "60_short"):
            root = 2 if unknown == "45_leg" else 3
            answer = radical(side, root, root)
            return f"{side} / \\sqrt {{ {root} }} = {answer}.", answer
        if unknown == "30_long":
            step, half = divide(side, 2)
            answer = radical(side, 3, 2)
            return f"{step} {half} * \\sqrt {{ 3 }} = {answer}.", answer
        root = 3 if unknown == "60_long" else 2
        return f"{side} * \\sqrt {{ {root} }} = {radical(side, root)}.", radical(side, root)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        opening, side = givens
        _, given, asked = _SPECIAL[unknown]
        unit = {"CA": math.cos, "CB": math.sin, "AB": lambda _: 1.0}[given](math.radians(opening))
        long = side / unit
        figure = Figure(right(long * math.cos(math.radians(opening)), long * math.sin(math.radians(opening))))
        figure.polygon("ABC")
        figure.right_angles.append("ACB")
        figure.give(angle("CAB"), givens, 0)
        figure.give(length(given), givens, 1)
        figure.ask(length(asked))
        figure.also(*(length(part) for part in ("CA", "CB", "AB") if part not in (given, asked)))
        return figure


class GeometricMean(Theorem):
    """The altitude to the hypotenuse; unknown `altitude` or `leg` from the two parts of the hypotenuse, or `part`."""

    name = "geometric_mean"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("altitude", "leg", "part"))
        if level == 3:
            first, second = rng.randint(2, 15), rng.randint(2, 15)
        else:
            k, a, b = rng.randint(1, 3 if level == 1 else 6), rng.randint(1, 4), rng.randint(1, 4)
            first, second = k * a * a, k * b * b
            if unknown == "leg":
                m, n = rng.choice(((1, 2), (2, 3), (3, 4), (3, 5), (2, 4), (4, 5)))
                first, second = k * m * m, k * (n * n - m * m)  # the leg is k * m * n
            elif unknown == "part":
                first, second = k * a * b, k * a * a
        return (first, second), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        first, second = givens
        if unknown == "part":
            steps, square = multiply(first, first)
            step, answer = divide(square, second)
            return f"{' '.join(steps)} {step}", answer
        start, factor = (
            ("", second) if unknown == "altitude" else (f"{first} + {second} = {first + second}. ", first + second)
        )
        steps, product = multiply(first, factor)
        last, answer = root_of(product)
        return f"{start}{' '.join(steps)} {last}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        near, far = givens if unknown != "part" else (givens[1], givens[0] ** 2 / givens[1])
        figure = Figure({"A": complex(-near), "B": complex(far), "C": 1j * math.sqrt(near * far), "D": 0j})
        figure.polygon("ABC")
        figure.line("CD")
        figure.right_angles += ["ACB", "CDB"]
        parts = {"altitude": ("AD", "DB", "CD"), "leg": ("AD", "DB", "AC"), "part": ("CD", "AD", "DB")}[unknown]
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        figure.also(length("BC"))
        return figure


class TriangleMidsegment(Theorem):
    """Ticks mark midpoints of two sides of a triangle; unknown `midsegment` or `base`."""

    name = "triangle_midsegment"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        half = rng.randint(2, {1: 30, 2: 60, 3: 90}[level])
        if rng.random() < 0.5:
            return (half,), "base"
        return (2 * half + (level == 3 and rng.random() < 0.4),), "midsegment"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        (given,) = givens
        return (f"2 * {given} = {2 * given}.", str(2 * given)) if unknown == "base" else divide(given, 2)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        base = 2 * givens[0] if unknown == "base" else givens[0]
        first, second = rng.randint(45, 75), rng.randint(45, 75)
        points = triangle(first, second, base)
        points |= {"D": (points["A"] + points["C"]) / 2, "E": (points["B"] + points["C"]) / 2}
        figure = Figure(points)
        figure.polygon("ABC")
        figure.line("DE")
        figure.equal("AD", "DC")
        figure.equal("BE", "EC", count=2)
        parts = length("DE"), length("AB")
        figure.give(parts[unknown == "midsegment"], givens, 0)
        figure.ask(parts[unknown == "base"])
        figure.spare_angle("CAB", first)
        return figure


class TrapezoidMidline(Theorem):
    """The midline of a trapezoid; unknown `midline` from both parallel sides, or `base` from it and one side."""

    name = "trapezoid_midline"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        high = {1: 12, 2: 25, 3: 45}[level]
        short = rng.randint(4, high)
        more = rng.randint(max(1, short // 4), short)
        if rng.random() < 0.5:
            return (short, short + (more if level == 3 else 2 * more)), "midline"
        return (short + more, short), "base"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        first, second = givens
        if unknown == "midline":
            require(first < second, "the second parallel side is the longer one")
            step, answer = divide(first + second, 2)
            return f"{first} + {second} = {first + second}. {step}", answer
        require(first > second, "the midline is longer than the shorter side")
        return f"2 * {first} = {2 * first}. {2 * first} - {second} = {2 * first - second}.", str(2 * first - second)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        short, long = givens if unknown == "midline" else (givens[1], 2 * givens[0] - givens[1])
        lean = (long - short) * rng.uniform(0.2, 0.8)
        high = 1j * (short + long) / 2 * rng.uniform(0.5, 0.75)
        points = {"A": 0j, "B": complex(long), "C": lean + short + high, "D": lean + high}
        points |= {"E": (points["A"] + points["D"]) / 2, "F": (points["B"] + points["C"]) / 2}
        figure = Figure(points)
        figure.polygon("ABCD")
        figure.line("EF")
        figure.parallel("AB", "DC")
        figure.equal("AE", "ED")
        figure.equal("BF", "FC", count=2)
        parts = ("DC", "AB", "EF") if unknown == "midline" else ("EF", "DC", "AB")
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        return figure


def _proportion(rng: Random, level: int) -> Givens:
    """Return three numbers whose first two, multiplied, are divided by the third; whole up to level 2."""
    if level == 3:
        return rng.randint(3, 18), rng.randint(3, 18), rng.randint(3, 18)
    low, high = {1: (1, 5), 2: (2, 8)}[level]
    a, b, c, d = (rng.randint(low, high) for _ in range(4))
    return b * d, a * c, b * c


class _Proportional(Theorem):
    """Three lengths are given; the asked one is first * second / third."""

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        return _proportion(rng, level), "part"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        steps, product = multiply(givens[0], givens[1])
        last, answer = divide(product, givens[2])
        return " ".join([*steps, last]), answer


class SideSplitter(_Proportional):
    """A segment parallel to the base cuts the other sides in the same ratio; one of the four parts is asked."""

    name = "side_splitter"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        same, across, diagonal = givens  # CD : DA = CE : EB
        asked = same * across / diagonal
        opening = rng.randint(40, 80)
        upper, lower = (asked, same) if rng.random() < 0.5 else (same, asked)
        other = (across, diagonal) if upper == asked else (diagonal, across)
        u, v = polar(-90 - opening / 2), polar(-90 + opening / 2)
        points = {"C": 0j, "D": u * upper, "A": u * (upper + lower), "E": v * other[0], "B": v * (other[0] + other[1])}
        figure = Figure(points)
        figure.polygon("ABC")
        figure.line("DE")
        figure.parallel("AB", "DE")
        first, second = ("DA", "CD") if upper == asked else ("CD", "DA")
        near, far = ("CE", "EB") if upper == asked else ("EB", "CE")
        for place, part in enumerate((first, near, far)):
            figure.give(length(part), givens, place)
        figure.ask(length(second))
        figure.spare_angle("ACB", opening)
        return figure


class BisectorRatio(_Proportional):
    """The bisector of an angle cuts the opposite side in the ratio of the other sides; a part of that side is asked."""

    name = "bisector_ratio"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        first, second, third = givens  # AD, BC and AC; DB = AD * BC / AC
        require(abs(second - third) * third < first * (second + third) < (second + third) * third, "a triangle exists")
        return super().work(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        near, other, side = givens
        far = near * other / side
        points = triangle_of_sides(other, side, near + far)
        figure = Figure(points | {"D": complex(near)})
        figure.polygon("ABC")
        figure.line("CD")
        figure.equal_angles += [("ACD", 1), ("DCB", 1)]
        for place, part in enumerate(("AD", "BC", "AC")):
            figure.give(length(part), givens, place)
        figure.ask(length("DB"))
        return figure


class CrossedTriangles(_Proportional):
    """Two parallel segments whose ends are joined crosswise make similar triangles."""

    name = "crossed_triangles"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second, third = givens  # AE : EB = CE : ED, so ED = CE * EB / AE
        opening = rng.randint(45, 85)
        u, v = polar(opening / 2), polar(180 - opening / 2)
        points = {"E": 0j, "A": u * third, "B": -u * first, "C": v * second, "D": -v * (first * second / third)}
        figure = Figure(points)
        figure.line("AB", "CD", "AC", "BD")
        figure.parallel("CA", "BD")
        for place, part in enumerate(("EB", "CE", "AE")):
            figure.give(length(part), givens, place)
        figure.ask(length("ED"))
        return figure


class SimilarPair(_Proportional):
    """Two similar triangles side by side with equal angles marked; a side of the second is asked."""

    name = "similar_pair"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second, third = givens  # AB = third, DE = first, AC = second, DF = first * second / third
        opening = rng.randint(45, 95)
        scale = first / third
        a, b, c = 0j, complex(third), polar(opening, second)
        shift = max(b.real, c.real) - min(0.0, c.real * scale) + 0.35 * max(first, third)
        points = {"A": a, "B": b, "C": c, "D": a + shift, "E": b * scale + shift, "F": c * scale + shift}
        figure = Figure(points, upright=True)
        figure.polygon("ABC")
        figure.polygon("DEF")
        figure.equal_angles += [("BAC", 1), ("EDF", 1), ("ABC", 2), ("DEF", 2)]
        for place, part in enumerate(("DE", "AC", "AB")):
            figure.give(length(part), givens, place)
        figure.ask(length("DF"))
        return figure


class Centroid(Theorem):
    """Medians meet at two thirds of their length; unknown `long` or `short` part of a median from the other one."""

    name = "centroid"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        part = rng.randint(2, {1: 30, 2: 60, 3: 90}[level])
        if rng.random() < 0.5:
            return (part,), "long"
        return (2 * part - (level == 3 and rng.random() < 0.3),), "short"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        (given,) = givens
        return (f"2 * {given} = {2 * given}.", str(2 * given)) if unknown == "long" else divide(given, 2)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        points = triangle(rng.uniform(48, 70), rng.uniform(48, 70))
        a, b, c = points["A"], points["B"], points["C"]
        points |= {"D": (b + c) / 2, "E": (c + a) / 2, "G": (a + b + c) / 3}
        known, asked = ("GD", "AG") if unknown == "long" else ("AG", "GD")
        scale = givens[0] / abs(complex.__sub__(*(points[name] for name in known)))
        figure = Figure({name: point * scale for name, point in points.items()}, upright=True)
        figure.polygon("ABC")
        figure.line("AD", "BE")
        figure.equal("BD", "DC")
        figure.equal("CE", "EA", count=2)
        figure.give(length(known), givens, 0)
        figure.ask(length(asked))
        return figure


class RectangleDiagonals(Theorem):
    """A diagonal cuts a rectangle into right triangles; unknown `diagonal` or `side`."""

    name = "rectangle_diagonals"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if level < 3:
            k = rng.randint(1, 6 if level == 1 else 12)
            a, b, c = (k * side for side in rng.choice(TRIPLES[:3]))
        else:
            a, b = rng.randint(4, 24), rng.randint(4, 24)
            c = a + b // 2 + 1
        return ((a, b), "diagonal") if rng.random() < 0.5 else ((c, a), "side")

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        return Pythagoras().work(givens, "hypotenuse" if unknown == "diagonal" else "leg")

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens
        other = math.sqrt(first * first - second * second) if unknown == "side" else second
        wide, high = (second, other) if unknown == "side" else (first, second)
        points = {"A": 0j, "B": complex(wide), "C": complex(wide, high), "D": complex(0, high)}
        figure = Figure(points)
        figure.polygon("ABCD")
        figure.line("AC")
        figure.right_angles += rng.choice((["ABC"], ["ABC", "CDA"], ["ABC", "BCD", "CDA", "DAB"]))
        parts = ("AB", "BC", "AC") if unknown == "diagonal" else ("AC", "AB", "BC")
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        return figure


class RhombusDiagonals(Theorem):
    """Halves of a rhombus's diagonals are the legs of a right triangle; unknown `side`, or `half` a diagonal."""

    name = "rhombus_diagonals"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if level < 3:
            k = rng.randint(1, 6 if level == 1 else 12)
            a, b, c = (k * side for side in rng.choice(((3, 4, 5), (4, 3, 5), (8, 15, 17), (20, 21, 29))))
        else:
            a, b = rng.randint(3, 20), rng.randint(3, 20)
            c = max(a, b) + rng.randint(1, 8)
        return ((a, b), "side") if rng.random() < 0.5 else ((c, a), "half")

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        return Pythagoras().work(givens, "hypotenuse" if unknown == "side" else "leg")

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens
        wide, high = (first, second) if unknown == "side" else (second, math.sqrt(first * first - second * second))
        figure = Figure(
            {"A": complex(-wide), "B": complex(0, -high), "C": complex(wide), "D": complex(0, high), "E": 0j}
        )
        figure.polygon("ABCD")
        figure.line("AC", "BD")
        figure.equal("AB", "BC", "CD", "DA")
        parts = ("EA", "ED", "AD") if unknown == "side" else ("AD", "EA", "ED")
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        return figure


def thousandths(value: float) -> int:
    """Return a sine, cosine or tangent in thousandths."""
    return round(1000 * value)


def to_tenth(value: float) -> str:
    """Return a number rounded to the nearest tenth, without a zero at its end: 7.04 is "7"."""
    return f"{value:.1f}".removesuffix(".0")


def decimal(thousandth: int) -> str:
    """Return thousandths as a decimal: 602 is "0.602"."""
    return f"{thousandth / 1000:.3f}".rstrip("0").rstrip(".")


def sure_tenth(value: float, exact: float) -> str:
    """Return a value, computed with three decimals, to the nearest tenth.

    Raises ValueError if the exact value rounds to another tenth, or is near the border between two.
    """
    answer = to_tenth(value)
    require(answer == to_tenth(exact) and abs(exact * 10 % 1 - 0.5) > 0.02, "three decimals suffice for the tenth")
    return answer


class TrigonometricRatio(Theorem):
    """An angle and a side of a right triangle are given; unknown `sin`, `cos` or `tan` of the angle times the side."""

    name = "trigonometric_ratio"
    note = TO_TENTH
    takes_algebra = is_whole = False

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        return (pick_angle(rng, level, 25, 65), rng.randint(4, {1: 12, 2: 25, 3: 60}[level])), rng.choice(
            ("sin", "cos", "tan")
        )

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        opening, side = givens
        require(opening < 90, "the angle of a right triangle is below 90 degrees")
        ratio = {"sin": math.sin, "cos": math.cos, "tan": math.tan}[unknown](math.radians(opening))
        short = decimal(thousandths(ratio))
        answer = sure_tenth(side * thousandths(ratio) / 1000, side * ratio)
        return f"\\{unknown} {opening} = {short}. {side} * {short} = {answer}.", answer

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        return givens

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        opening, side = math.radians(givens[0]), givens[1]
        long = side / math.cos(opening) if unknown == "tan" else float(side)
        figure = Figure(right(long * math.cos(opening), long * math.sin(opening)))
        figure.polygon("ABC")
        figure.right_angles.append("ACB")
        figure.give(angle("CAB"), givens, 0)
        figure.give(length("CA" if unknown == "tan" else "AB"), givens, 1)
        figure.ask(length("CA" if unknown == "cos" else "CB"))
        return figure


class LawOfSines(Theorem):
    """Two angles and the side across from the second are given; the side across from the first is asked."""

    name = "law_of_sines"
    note = TO_TENTH
    takes_algebra = is_whole = False

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        first = pick_angle(rng, level, 30, 100)
        return (first, pick_angle(rng, level, 30, 145 - first), rng.randint(4, {1: 12, 2: 25, 3: 50}[level])), "side"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        first, second, side = givens
        require(first + second < 180, "the angles of a triangle add up to 180 degrees")
        sines = [math.sin(math.radians(opening)) for opening in (first, second)]
        top, bottom = (thousandths(sine) for sine in sines)
        require(bottom > 0, "an angle is above 0 degrees")
        answer = sure_tenth(side * top / bottom, side * sines[0] / sines[1])
        middle = decimal(side * top)
        steps = (
            f"\\sin {first} = {decimal(top)}. \\sin {second} = {decimal(bottom)}. {side} * {decimal(top)} = {middle}."
        )
        return f"{steps} {middle} / {decimal(bottom)} = {answer}.", answer

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        return givens

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second, side = givens
        third = 180 - first - second
        base = side * math.sin(math.radians(third)) / math.sin(math.radians(second))
        figure = Figure(triangle(first, second, base))
        figure.polygon("ABC")
        figure.give(angle("CAB"), givens, 0)
        figure.give(angle("ABC"), givens, 1)
        figure.give(length("AC"), givens, 2)
        figure.ask(length("BC"))
        return figure


class LawOfCosines(Theorem):
    """Two sides and the angle between them are given; the third side is asked."""

    name = "law_of_cosines"
    note = TO_TENTH
    takes_algebra = is_whole = False

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        low, high = {1: (4, 12), 2: (5, 20), 3: (6, 40)}[level]
        return (rng.randint(low, high), rng.randint(low, high), pick_angle(rng, level, 35, 125)), "side"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        b, c, opening = givens
        require(opening < 180, "an angle is below 180 degrees")
        cosine = math.cos(math.radians(opening))
        size, squares, twice = thousandths(abs(cosine)), b * b + c * c, 2 * b * c
        sign = "-" if cosine >= 0 else "+"
        square = squares - math.copysign(twice * size / 1000, cosine)
        require(square > 0, "the third side is above 0")
        answer = sure_tenth(math.sqrt(square), math.sqrt(squares - twice * cosine))
        product, left = decimal(twice * size), decimal(round(1000 * square))
        steps = (
            f"{b} * {b} = {b * b}. {c} * {c} = {c * c}. {b * b} + {c * c} = {squares}.",
            f"2 * {b} = {2 * b}. {2 * b} * {c} = {twice}.",
            f"\\cos {opening} = {'-' if sign == '+' else ''}{decimal(size)}. {twice} * {decimal(size)} = {product}.",
            f"{squares} {sign} {product} = {left}. \\sqrt {{ {left} }} = {answer}.",
        )
        return " ".join(steps), answer

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        return (*sorted(givens[:2]), givens[2])

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        b, c, opening = givens
        figure = Figure({"A": 0j, "B": complex(c), "C": polar(opening, b)})
        figure.polygon("ABC")
        figure.give(length("AC"), givens, 0)
        figure.give(length("AB"), givens, 1)
        figure.give(angle("CAB"), givens, 2)
        figure.ask(length("BC"))
        return figure


class SegmentAddition(Theorem):
    """Points on a line; unknown `whole` from two parts or `part` from the whole and the other part."""

    name = "segment_addition"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        high = {1: 12, 2: 40, 3: 80}[level]
        a, b = rng.randint(high // 3, high), rng.randint(high // 3, high)
        return ((a + b, a), "part") if rng.random() < 0.5 else ((a, b), "whole")

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        whole, part = givens
        if unknown == "whole":
            return f"{whole} + {part} = {whole + part}.", str(whole + part)
        require(whole > part, "the whole is longer than a part")
        return f"{whole} - {part} = {whole - part}.", str(whole - part)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        whole, part = givens if unknown == "part" else (sum(givens), givens[0])
        figure = Figure({"A": 0j, "D": complex(part), "B": complex(whole)}, dots=list("ADB"), spans=["AB"])
        figure.line("AB")
        parts = ("AB", "AD", "DB") if unknown == "part" else ("AD", "DB", "AB")
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        return figure
