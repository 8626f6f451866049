"""Theorems about angles in circles: inscribed and central, tangents, chords and secants, arcs."""

from __future__ import annotations

from random import Random

from envs.geo3k.families.arithmetic import calculation, divide, mean, proportion, rest
from envs.geo3k.families.circles import CircleAngles
from envs.geo3k.families.family import Case, Givens, Solution, require, require_angles
from envs.geo3k.families.triangles import Isosceles
from starter.textbook.figure import Figure, meet, polar
from starter.textbook.theorem import Theorem, pick_angle

LOOKS_TANGENT = "Assume that segments that appear to be tangent are tangent."


def circle(center: str = "O", **degrees: float) -> dict[str, complex]:
    """Return the center and named points of the unit circle at these directions."""
    return {center: 0j} | {name: polar(at) for name, at in degrees.items()}


class InscribedAngle(Theorem):
    """An inscribed angle is half its arc; unknown `arc` or `central` angle, or the angle `from_arc`, `from_central`."""

    name = "inscribed_angle"

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("from_arc", "arc", "from_central", "central"))
        half = pick_angle(rng, level, 25, 70)
        if unknown in ("arc", "central"):
            return (half,), unknown
        return (2 * half - (level == 3 and rng.random() < 0.25),), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        return CircleAngles().solve(givens, "central" if unknown in ("arc", "central") else "inscribed")

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown in ("arc", "central"):
            half = givens[0]
        else:
            half = givens[0] / 2
        figure = Figure(circle(A=-half, B=half, C=180 + rng.uniform(-0.5, 0.5) * (140 - half)))
        figure.circle("OA")
        figure.line("CA", "CB")
        center = "arc OAB" if "arc" in unknown else "AOB"
        if center == "AOB":
            figure.line("OA", "OB")
        if unknown in ("arc", "central"):
            figure.label(givens, "ACB", center)
        else:
            figure.label(givens, center, "ACB")
        return figure


class DiameterAngle(Theorem):
    """A triangle on a diameter has a right angle; unknown `angle` or `arc` from one of the other angles."""

    name = "diameter_angle"

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("angle", "arc"))
        return (pick_angle(rng, level, 25, 65),), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        (given,) = givens
        require(given < 90, "the angle is below 90 degrees")
        if unknown == "angle":
            return rest(90, givens)
        return Isosceles().solve(givens, "apex")  # two radii and a side of the triangle

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        figure = Figure(circle(A=180, B=0, C=2 * givens[0]))
        figure.circle("OA")
        figure.line("AB", "BC", "CA")
        figure.label(givens, "CAB", "ABC" if unknown == "angle" else "arc OCA")
        if unknown == "angle":
            figure.spare_length(rng, "AC", "BC")
        return figure


class CyclicQuadrilateral(Theorem):
    """Opposite angles of a quadrilateral in a circle make 180 degrees; unknown `both` gives a needless one too."""

    name = "cyclic_quadrilateral"

    def numbers(self, rng: Random, level: int) -> Case:
        if rng.random() < 0.5:
            return (pick_angle(rng, level, 55, 125),), "opposite"
        return (pick_angle(rng, level, 60, 115), pick_angle(rng, level, 60, 115)), "both"

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        return rest(180, givens[:1])

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        # The arc BCD is twice the angle at A. C cuts it, and A the rest, so that the second given is at B.
        wide = 2 * givens[0]
        if unknown == "both":
            second = givens[1]
        else:
            second = rng.randint(75, 105)
        cut = wide * rng.uniform(0.4, 0.6)  # arc BC
        after = 2 * second - (wide - cut)  # arc DA, because the angle at B stands on the arc CDA
        figure = Figure(circle("o", A=0, B=360 - wide - after, C=360 - wide - after + cut, D=360 - after))
        require(40 < after < 360 - wide - 40, "the corners follow each other on the circle")
        figure.circles.append("oA")
        figure.polygon("ABCD")
        known = ("DAB", "ABC")[: len(givens)]
        figure.label(givens, *known, "BCD", also=("CDA",))
        return figure


class TangentChord(Theorem):
    """The angle between a tangent and a chord is half the arc between them; unknown `angle` or `arc`."""

    name = "tangent_chord"
    note = LOOKS_TANGENT

    def numbers(self, rng: Random, level: int) -> Case:
        half = pick_angle(rng, level, 30, 85)
        if rng.random() < 0.5:
            return ((half,), "arc")
        return ((2 * half,), "angle")

    def work(self, givens: Givens, unknown: str) -> Solution:
        return CircleAngles().solve(givens, "central" if unknown == "arc" else "inscribed")

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "arc":
            half = givens[0]
        else:
            half = givens[0] / 2
        figure = Figure(
            circle(T=-90, B=-90 + 2 * half) | {"A": -1j + rng.uniform(1.1, 1.4), "c": -1j - rng.uniform(0.8, 1.2)}
        )
        figure.circle("OT")
        figure.line("cA", ends="both")
        figure.line("TB")
        if unknown == "arc":
            parts = ("ATB", "arc OTB")
        else:
            parts = ("arc OTB", "ATB")
        figure.label(givens, *parts)
        return figure


class CrossingChords(Theorem):
    """Two chords cross; unknown `part`: the products of their parts are equal; `angle`: half the sum of two arcs."""

    name = "crossing_chords"

    def numbers(self, rng: Random, level: int) -> Case:
        if rng.random() < 0.4:
            first = pick_angle(rng, level, 40, 110)
            second = pick_angle(rng, level, 40, 110)
            return (first, second), "angle"
        if level == 3:
            return (rng.randint(3, 15), rng.randint(3, 15), rng.randint(3, 15)), "part"
        a, b, c, d = (rng.randint(1, 4 if level == 1 else 7) for _ in range(4))
        return (a * b, c * d, a * c), "part"  # the answer is b * d

    def work(self, givens: Givens, unknown: str) -> Solution:
        if unknown == "angle":
            require_angles(givens)
            return mean(*givens)
        return proportion(*givens)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "angle":
            first, second = givens
            left = 360 - first - second
            gap = left * rng.uniform(0.38, 0.62)
            figure = Figure(circle("o", A=0, B=first, C=first + gap, D=first + gap + second))
            figure.points["E"] = meet(*figure.ends("ACBD"))
            figure.label(givens, "arc oAB", "arc oCD", "AEB", also=("BEC",))
        else:
            a, b, c = givens
            turn = polar(rng.uniform(50, 130))
            points = {"E": 0j, "A": complex(a), "C": complex(-b), "B": turn * c, "D": -turn * a * b / c}
            middle = (points["A"] + points["C"]) / 2
            across = (points["B"] + points["D"]) / 2
            figure = Figure(points | {"o": meet(middle, middle + 1j, across, across + 1j * turn)})
            figure.label(givens, "EA", "EC", "EB", "ED")
        figure.circles.append("oA")
        figure.line("AC", "BD")
        return figure


class SecantAngles(Theorem):
    """Two secants meet outside at half the difference of their arcs; unknown `angle` or `near`, the smaller arc."""

    name = "secant_angles"

    def numbers(self, rng: Random, level: int) -> Case:
        near = pick_angle(rng, level, 25, 60)
        far = near + 2 * pick_angle(rng, level, 25, 45)
        if rng.random() < 0.6:
            return ((far, near), "angle")
        return ((far, (far - near) // 2), "near")

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        first, second = givens
        require(first > second, "the first arc is the larger one")
        if unknown == "angle":
            step, answer = divide(first - second, 2)
            return f"{calculation(first, '-', second)} {step}", answer
        near = first - 2 * second
        require(near > 0, "the smaller arc is above 0 degrees")
        return f"{calculation(2, '*', second)} {first} - {2 * second} = {near}.", str(near)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        far = givens[0]
        if unknown == "angle":
            near = givens[1]
        else:
            near = far - 2 * givens[1]
        lean = rng.uniform(-8, 8)
        figure = Figure(circle("o", A=-near / 2 + lean, C=near / 2 + lean, B=180 + far / 2, D=180 - far / 2))
        figure.points["P"] = meet(*figure.ends("ABCD"))
        figure.circles.append("oA")
        figure.line("PB", "PD")
        if unknown == "angle":
            parts = ("arc oAC", "BPD")
        else:
            parts = ("BPD", "arc oAC")
        figure.label(givens, "arc oDB", *parts)
        return figure


class ArcsOfCircle(Theorem):
    """Radii cut a circle into arcs; unknown `last` from the two others, `across` from its neighbour on a diameter."""

    name = "arcs_of_circle"

    def numbers(self, rng: Random, level: int) -> Case:
        if rng.random() < 0.5:
            return (pick_angle(rng, level, 40, 140),), "across"
        first = pick_angle(rng, level, 60, 150)
        second = pick_angle(rng, level, 60, 150)
        return (first, second), "last"

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        steps, answer = rest(180 if unknown == "across" else 360, givens)
        require(int(answer) < 180, "the last arc is below 180 degrees")
        return steps, answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        turn = rng.uniform(0, 360)
        if unknown == "across":
            figure = Figure(circle(A=turn, B=turn + givens[0], C=turn + 180))
            figure.line("AC", "OB")
            figure.label(givens, "AOB" if rng.random() < 0.5 else "arc OAB", "arc OBC")
        else:
            figure = Figure(circle(A=turn, B=turn + givens[0], C=turn + sum(givens)))
            figure.line("OA", "OB", "OC")
            figure.label(givens, "arc OAB", "BOC", "arc OCA")
        figure.circle("OA")
        return figure
