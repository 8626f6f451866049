"""Theorems about circles: angles and arcs, tangents, chords and secants, and the lengths of arcs."""

from __future__ import annotations

import cmath
import math
from random import Random

from envs.geo3k.families.arithmetic import divide, fraction, multiply, radical, rest
from envs.geo3k.families.family import Givens, require, require_angles
from envs.geo3k.textbook.figure import Figure, Part, angle, arc, length, meet, polar
from envs.geo3k.textbook.theorem import Theorem, pick_angle
from envs.geo3k.textbook.theorems.angles import spare

LOOKS_TANGENT = "Assume that segments that appear to be tangent are tangent."


def circle(**degrees: float) -> dict[str, complex]:
    """Return the center O and named points of the unit circle at these directions."""
    return {"O": 0j} | {name: polar(at) for name, at in degrees.items()}


class InscribedAngle(Theorem):
    """An inscribed angle is half its arc; unknown `arc` or `central` angle, or the angle `from_arc`, `from_central`."""

    name = "inscribed_angle"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("from_arc", "arc", "from_central", "central"))
        half = pick_angle(rng, level, 25, 70)
        if unknown in ("arc", "central"):
            return (half,), unknown
        return (2 * half - (level == 3 and rng.random() < 0.25),), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        (given,) = givens
        if unknown in ("arc", "central"):
            require(given < 90, "the arc is below 180 degrees")
            return f"2 * {given} = {2 * given}.", str(2 * given)
        return divide(given, 2)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        half = givens[0] if unknown in ("arc", "central") else givens[0] / 2
        figure = Figure(circle(A=-half, B=half, C=180 + rng.uniform(-0.5, 0.5) * (140 - half)))
        figure.circle("OA")
        figure.line("CA", "CB")
        center = arc("OAB") if "arc" in unknown else angle("AOB")
        if center.kind == "angle":
            figure.line("OA", "OB")
        if unknown in ("arc", "central"):
            figure.give(angle("ACB"), givens, 0)
            figure.ask(center)
        else:
            figure.give(center, givens, 0)
            figure.ask(angle("ACB"))
        return figure


class DiameterAngle(Theorem):
    """A triangle on a diameter has a right angle; unknown `angle` or `arc` from one of the other angles."""

    name = "diameter_angle"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("angle", "arc"))
        return (pick_angle(rng, level, 25, 65),), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        (given,) = givens
        require(given < 90, "the angle is below 90 degrees")
        if unknown == "angle":
            return rest(90, givens)
        return f"2 * {given} = {2 * given}. 180 - {2 * given} = {180 - 2 * given}.", str(180 - 2 * given)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        figure = Figure(circle(A=180, B=0, C=2 * givens[0]))
        figure.circle("OA")
        figure.line("AB", "BC", "CA")
        figure.give(angle("CAB"), givens, 0)
        figure.ask(angle("ABC") if unknown == "angle" else arc("OCA"))
        if unknown == "angle":
            figure.spare_length(rng.choice(("AC", "BC")), spare(rng))
        return figure


class CyclicQuadrilateral(Theorem):
    """Opposite angles of a quadrilateral in a circle make 180 degrees; unknown `both` gives a needless one too."""

    name = "cyclic_quadrilateral"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if rng.random() < 0.5:
            return (pick_angle(rng, level, 55, 125),), "opposite"
        return (pick_angle(rng, level, 60, 115), pick_angle(rng, level, 60, 115)), "both"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        return rest(180, givens[:1])

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        # The arc BCD is twice the angle at A. C cuts it, and A the rest, so that the second given is at B.
        wide = 2 * givens[0]
        second = givens[1] if unknown == "both" else rng.randint(75, 105)
        cut = wide * rng.uniform(0.4, 0.6)  # arc BC
        after = 2 * second - (wide - cut)  # arc DA, because the angle at B stands on the arc CDA
        figure = Figure(circle(A=0, B=360 - wide - after, C=360 - wide - after + cut, D=360 - after))
        require(40 < after < 360 - wide - 40, "the corners follow each other on the circle")
        del figure.points["O"]
        figure.points["o"] = 0j
        figure.circles.append("oA")
        figure.polygon("ABCD")
        figure.give(angle("DAB"), givens, 0)
        if unknown == "both":
            figure.give(angle("ABC"), givens, 1)
        figure.ask(angle("BCD"))
        figure.also(angle("CDA"))
        return figure


class TangentRadius(Theorem):
    """A tangent is perpendicular to the radius; unknown `angle`, or by Pythagoras `tangent`, `radius`, `distance`."""

    name = "tangent_radius"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("angle", "tangent", "radius", "distance"))
        if unknown == "angle":
            return (pick_angle(rng, level, 27, 60),), unknown
        if level < 3:
            k = rng.randint(1, 3 if level == 1 else 9)
            a, b, c = (k * side for side in rng.choice(((3, 4, 5), (4, 3, 5), (5, 12, 13), (8, 15, 17), (15, 8, 17))))
        else:
            a, b = rng.randint(3, 20), rng.randint(3, 25)
            c = a + b // 2 + 1
        return {"tangent": (c, a), "radius": (c, b), "distance": (a, b)}[unknown], unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        if unknown == "angle":
            require_angles(givens)
            return rest(90, givens)
        first, second = givens
        sign = "+" if unknown == "distance" else "-"
        square = first * first + second * second if sign == "+" else first * first - second * second
        require(square > 0, "the hypotenuse is the longest side")
        answer, root = radical(1, square), f"\\sqrt {{ {square} }}"
        squares = f"{first} * {first} = {first * first}. {second} * {second} = {second * second}."
        last = f"{root}." if answer == root else f"{root} = {answer}."
        return f"{squares} {first * first} {sign} {second * second} = {square}. {last}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "angle":
            radius, tangent = math.tan(math.radians(givens[0])), 1.0
        elif unknown == "distance":
            radius, tangent = float(givens[0]), float(givens[1])
        else:
            other = math.sqrt(givens[0] ** 2 - givens[1] ** 2)
            radius, tangent = (givens[1], other) if unknown == "tangent" else (other, givens[1])
        figure = Figure({"O": 0j, "T": complex(radius), "P": complex(radius, tangent)})
        figure.circle("OT")
        figure.line("OT", "TP", "PO")
        figure.right_angles.append("OTP")
        if unknown == "angle":
            figure.give(angle("TPO"), givens, 0)
            figure.ask(angle("POT"))
            figure.spare_length(rng.choice(("OT", "TP")), spare(rng))
            return figure
        parts = {"tangent": ("OP", "OT", "TP"), "radius": ("OP", "TP", "OT"), "distance": ("OT", "TP", "OP")}[unknown]
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        return figure


class TangentChord(Theorem):
    """The angle between a tangent and a chord is half the arc between them; unknown `angle` or `arc`."""

    name = "tangent_chord"
    note = LOOKS_TANGENT

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        half = pick_angle(rng, level, 30, 85)
        return ((half,), "arc") if rng.random() < 0.5 else ((2 * half,), "angle")

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        (given,) = givens
        if unknown == "angle":
            return divide(given, 2)
        require(given < 90, "the arc is below 180 degrees")
        return f"2 * {given} = {2 * given}.", str(2 * given)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        half = givens[0] if unknown == "arc" else givens[0] / 2
        figure = Figure(
            circle(T=-90, B=-90 + 2 * half) | {"A": -1j + rng.uniform(1.1, 1.4), "c": -1j - rng.uniform(0.8, 1.2)}
        )
        figure.circle("OT")
        figure.line("cA", ends="both")
        figure.line("TB")
        parts = arc("OTB"), angle("ATB")
        figure.give(parts[unknown == "arc"], givens, 0)
        figure.ask(parts[unknown == "angle"])
        return figure


class TwoTangents(Theorem):
    """Two tangents from a point; unknown `angle` from the arc, `arc` from the angle, or `perimeter`.

    The perimeter is that of a triangle around the circle, from a tangent at each corner.
    """

    name = "two_tangents"
    note = LOOKS_TANGENT

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("angle", "arc", "perimeter"))
        if unknown == "perimeter":
            high = {1: 9, 2: 20, 3: 40}[level]
            low = max(3, high // 3)
            return tuple(rng.randint(low, high) for _ in range(3)), unknown
        return (pick_angle(rng, level, 40, 80) if unknown == "arc" else pick_angle(rng, level, 100, 140),), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        if unknown != "perimeter":
            require_angles(givens)
            return rest(180, givens)
        a, b, c = givens
        total = a + b + c
        return f"{a} + {b} = {a + b}. {a + b} + {c} = {total}. 2 * {total} = {2 * total}.", str(2 * total)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown != "perimeter":
            half = givens[0] / 2 if unknown == "angle" else 90 - givens[0] / 2
            figure = Figure(circle(A=-half, B=half) | {"P": complex(1 / math.cos(math.radians(half)))})
            figure.circle("OA")
            figure.line("PA", "PB")
            parts = arc("OAB"), angle("APB")
            figure.give(parts[unknown == "arc"], givens, 0)
            figure.ask(parts[unknown == "angle"])
            return figure
        x, y, z = givens  # tangents from A, B and C
        radius = math.sqrt(x * y * z / (x + y + z))
        a, b = 0j, complex(x + y)
        center = complex(x, radius)
        c = a + (center / abs(center)) ** 2 * (x + z)
        figure = Figure({"A": a, "B": b, "C": c, "D": complex(x), "E": b + (c - b) / abs(c - b) * y})
        figure.points |= {"F": c / abs(c) * x, "o": center}
        figure.circles.append("oD")
        figure.dots += "DEF"
        figure.line("AB", "BC", "CA")
        for place, part in enumerate(("AD", "BE", "CF")):
            figure.give(length(part), givens, place)
        figure.ask(Part("perimeter", "ABC"))
        return figure


class CrossingChords(Theorem):
    """Two chords cross; unknown `part`: the products of their parts are equal; `angle`: half the sum of two arcs."""

    name = "crossing_chords"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if rng.random() < 0.4:
            first, second = pick_angle(rng, level, 40, 110), pick_angle(rng, level, 40, 110)
            return (first, second), "angle"
        if level == 3:
            return (rng.randint(3, 15), rng.randint(3, 15), rng.randint(3, 15)), "part"
        a, b, c, d = (rng.randint(1, 4 if level == 1 else 7) for _ in range(4))
        return (a * b, c * d, a * c), "part"  # the answer is b * d

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        if unknown == "angle":
            require_angles(givens)
            first, second = givens
            step, answer = divide(first + second, 2)
            return f"{first} + {second} = {first + second}. {step}", answer
        steps, product = multiply(givens[0], givens[1])
        last, answer = divide(product, givens[2])
        return " ".join([*steps, last]), answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "angle":
            first, second = givens
            left = 360 - first - second
            gap = left * rng.uniform(0.38, 0.62)
            points = circle(A=0, B=first, C=first + gap, D=first + gap + second)
            points["E"] = meet(points["A"], points["C"], points["B"], points["D"])
            center = points.pop("O")
            figure = Figure(points | {"o": center})
            figure.circles.append("oA")
            figure.give(arc("oAB"), givens, 0)
            figure.give(arc("oCD"), givens, 1)
            figure.ask(angle("AEB"))
            figure.also(angle("BEC"))
        else:
            a, b, c = givens
            turn = polar(rng.uniform(50, 130))
            points = {"E": 0j, "A": complex(a), "C": complex(-b), "B": turn * c, "D": -turn * a * b / c}
            middle, normal = (points["A"] + points["C"]) / 2, 1j
            across = (points["B"] + points["D"]) / 2
            center = meet(middle, middle + normal, across, across + 1j * turn)
            figure = Figure(points | {"o": center})
            figure.circles.append("oA")
            for place, part in enumerate(("EA", "EC", "EB")):
                figure.give(length(part), givens, place)
            figure.ask(length("ED"))
        figure.line("AC", "BD")
        return figure


class SecantAngles(Theorem):
    """Two secants meet outside at half the difference of their arcs; unknown `angle` or `near`, the smaller arc."""

    name = "secant_angles"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        near = pick_angle(rng, level, 25, 60)
        far = near + 2 * pick_angle(rng, level, 25, 45)
        return ((far, near), "angle") if rng.random() < 0.6 else ((far, (far - near) // 2), "near")

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        first, second = givens
        require(first > second, "the first arc is the larger one")
        if unknown == "angle":
            step, answer = divide(first - second, 2)
            return f"{first} - {second} = {first - second}. {step}", answer
        near = first - 2 * second
        require(near > 0, "the smaller arc is above 0 degrees")
        return f"2 * {second} = {2 * second}. {first} - {2 * second} = {near}.", str(near)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        far = givens[0]
        near = givens[1] if unknown == "angle" else far - 2 * givens[1]
        lean = rng.uniform(-8, 8)
        points = circle(A=-near / 2 + lean, C=near / 2 + lean, B=180 + far / 2, D=180 - far / 2)
        points["P"] = meet(points["A"], points["B"], points["C"], points["D"])
        center = points.pop("O")
        figure = Figure(points | {"o": center})
        figure.circles.append("oA")
        figure.line("PB", "PD")
        figure.give(arc("oDB"), givens, 0)
        figure.give(arc("oAC") if unknown == "angle" else angle("BPD"), givens, 1)
        figure.ask(angle("BPD") if unknown == "angle" else arc("oAC"))
        return figure


class SecantLengths(Theorem):
    """Secants or a tangent from a point: the products of the whole and the outer part are equal.

    Unknown `secant`: outer and inner part of one secant and the outer part of the other are given, its inner part is
    asked; `tangent`: outer and inner part are given, the tangent is asked.
    """

    name = "secant_lengths"
    note = LOOKS_TANGENT

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        high = {1: 8, 2: 14, 3: 20}[level]
        if rng.random() < 0.5:
            root = rng.randint(3, high)
            outer = rng.randint(2, high)
            inner = rng.randint(2, 2 * high) if level == 3 else root * root // outer - outer
            return (outer, inner), "tangent"
        return (rng.randint(3, high), rng.randint(3, high), rng.randint(3, high)), "secant"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        outer, inner = givens[:2]
        require(inner > 0, "a length is above 0")
        steps, product = multiply(outer + inner, outer)
        start = " ".join([f"{outer} + {inner} = {outer + inner}.", *steps])
        if unknown == "tangent":
            answer, root = radical(1, product), f"\\sqrt {{ {product} }}"
            return f"{start} {root}." if answer == root else f"{start} {root} = {answer}.", answer
        other = givens[2]
        require(product > other * other, "the whole secant is longer than its outer part")
        step, whole = divide(product, other)
        answer = fraction(product - other * other, other)
        return f"{start} {step} {whole} - {other} = {answer}.", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        outer, inner = givens[:2]
        power = float(outer * (outer + inner))
        middle = outer + inner / 2
        if unknown == "tangent":
            # The center is above the middle of the chord; the tangent has length sqrt(power) for any such center.
            height = inner * rng.uniform(0.1, 0.35)
            center = complex(middle, height)
            radius = abs(complex(inner / 2, height))
            reach = math.sqrt(power)
            lean = math.asin(radius / abs(center))
            touch = cmath.rect(reach, cmath.phase(center) + lean)
            figure = Figure({"P": 0j, "A": complex(outer), "B": complex(outer + inner), "T": touch, "o": center})
            figure.circles.append("oA")
            figure.line("PB")
            figure.line("PT")
            figure.give(length("PA"), givens, 0)
            figure.give(length("AB"), givens, 1)
            figure.ask(length("PT"))
            return figure
        other = givens[2]
        turn = polar(rng.uniform(28, 55))
        across = turn * (other + power / other) / 2
        center = meet(complex(middle), complex(middle, 1), across, across + 1j * turn)
        figure = Figure({"P": 0j, "A": complex(outer), "B": complex(outer + inner), "C": turn * other})
        figure.points |= {"D": turn * power / other, "o": center}
        figure.circles.append("oA")
        figure.line("PB", "PD")
        for place, part in enumerate(("PA", "AB", "PC")):
            figure.give(length(part), givens, place)
        figure.ask(length("CD"))
        return figure


class ChordDistance(Theorem):
    """A line from the center perpendicular to a chord halves it; unknown `chord`, `distance` or `radius`."""

    name = "chord_distance"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("chord", "distance", "radius"))
        if level < 3:
            k = rng.randint(1, 3 if level == 1 else 9)
            far, half, radius = (
                k * s for s in rng.choice(((3, 4, 5), (4, 3, 5), (5, 12, 13), (8, 15, 17), (20, 21, 29)))
            )
        else:
            far, half = rng.randint(3, 15), rng.randint(3, 15)
            radius = max(far, half) + rng.randint(1, 6)
        return {"chord": (radius, far), "distance": (radius, 2 * half), "radius": (far, 2 * half)}[unknown], unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        first, second = givens
        steps = []
        if unknown != "chord":
            require(second % 2 == 0, "the chord is even")
            steps, second = [f"{second} / 2 = {second // 2}."], second // 2
        sign = "+" if unknown == "radius" else "-"
        square = first * first + (second * second if sign == "+" else -second * second)
        require(square > 0, "the radius is the longest side")
        steps += [f"{first} * {first} = {first * first}.", f"{second} * {second} = {second * second}."]
        steps += [f"{first * first} {sign} {second * second} = {square}."]
        answer, root = radical(1, square), f"\\sqrt {{ {square} }}"
        if answer != root or unknown != "chord":
            steps += [f"{root}." if answer == root else f"{root} = {answer}."]
        if unknown == "chord":
            half, answer = answer, radical(2, square)
            steps += [f"2 * {half} = {answer}."]
        return " ".join(steps), answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "chord":
            radius, far = givens
            half = math.sqrt(radius**2 - far**2)
        else:
            half = givens[1] / 2
            far = givens[0] if unknown == "radius" else math.sqrt(givens[0] ** 2 - half**2)
            radius = math.hypot(far, half)
        figure = Figure(
            {"O": 0j, "A": complex(-half, -far), "B": complex(half, -far), "M": complex(0, -far)}, spans=["AB"]
        )
        figure.circle("OA")
        figure.line("AB", "OM", "OA")
        figure.right_angles.append("OMB")
        parts = {"chord": ("OA", "OM", "AB"), "distance": ("OA", "AB", "OM"), "radius": ("OM", "AB", "OA")}[unknown]
        figure.give(length(parts[0]), givens, 0)
        figure.give(length(parts[1]), givens, 1)
        figure.ask(length(parts[2]))
        return figure


class ArcsOfCircle(Theorem):
    """Radii cut a circle into arcs; unknown `last` from the two others, `across` from its neighbour on a diameter."""

    name = "arcs_of_circle"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if rng.random() < 0.5:
            return (pick_angle(rng, level, 40, 140),), "across"
        first, second = pick_angle(rng, level, 60, 150), pick_angle(rng, level, 60, 150)
        return (first, second), "last"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        steps, answer = rest(180 if unknown == "across" else 360, givens)
        require(int(answer) < 180, "the last arc is below 180 degrees")
        return steps, answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        turn = rng.uniform(0, 360)
        if unknown == "across":
            figure = Figure(circle(A=turn, B=turn + givens[0], C=turn + 180))
            figure.line("AC", "OB")
            figure.give(angle("AOB") if rng.random() < 0.5 else arc("OAB"), givens, 0)
            figure.ask(arc("OBC"))
        else:
            figure = Figure(circle(A=turn, B=turn + givens[0], C=turn + sum(givens)))
            figure.line("OA", "OB", "OC")
            figure.give(arc("OAB"), givens, 0)
            figure.give(angle("BOC"), givens, 1)
            figure.ask(arc("OCA"))
        figure.circle("OA")
        return figure


class _Round(Theorem):
    """A central angle and the radius of a circle are given."""

    takes_algebra = is_whole = False

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        opening = rng.choice(
            {1: (60, 90, 120), 2: (30, 45, 60, 90, 120, 135, 150), 3: tuple(range(30, 171, 10))}[level]
        )
        return (opening, rng.randint(2, {1: 12, 2: 24, 3: 40}[level])), "arc"

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        return givens

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        opening, radius = givens
        turn = rng.uniform(0, 360)
        figure = Figure({"O": 0j, "A": polar(turn, radius), "B": polar(turn + opening, radius)})
        figure.circle("OA")
        figure.line("OA", "OB")
        figure.give(angle("AOB"), givens, 0)
        figure.give(length("OA"), givens, 1)
        return figure


def pi_times(numerator: int, denominator: int) -> str:
    r"""Return a multiple of pi: pi_times(5, 3) is '\frac { 5 \pi } { 3 }'."""
    common = math.gcd(numerator, denominator)
    numerator, denominator = numerator // common, denominator // common
    times = "\\pi" if numerator == 1 else f"{numerator} \\pi"
    return times if denominator == 1 else f"\\frac {{ {times} }} {{ {denominator} }}"


class ArcLength(_Round):
    """A central angle and the radius are given; the length of the arc is asked in terms of pi."""

    name = "arc_length"
    note = "Write it in terms of \\pi."

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        opening, radius = givens
        require(opening < 180, "the arc is below 180 degrees")
        steps, product = multiply(opening, radius)
        step, value = divide(product, 180)
        return f"{' '.join(steps)} {step} {value} * \\pi = {pi_times(product, 180)}.", pi_times(product, 180)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        figure = super().build(givens, unknown, rng)
        figure.ask(Part("arc_length", "OAB"))
        return figure


class SectorArea(_Round):
    """A central angle and the radius are given; the area of the shaded sector is asked in terms of pi."""

    name = "sector_area"
    note = "Write it in terms of \\pi."

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        opening, radius = givens
        require(opening < 180, "the arc is below 180 degrees")
        steps, product = multiply(opening, radius * radius)
        step, value = divide(product, 360)
        square = f"{radius} * {radius} = {radius * radius}."
        answer = pi_times(product, 360)
        return f"{square} {' '.join(steps)} {step} {value} * \\pi = {answer}.", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        figure = super().build(givens, unknown, rng)
        figure.shaded.append("OAB arc")
        figure.ask(Part("sector", "OAB"))
        return figure
