"""The families of problems by name; `family.Family` describes their interface."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from envs.geo3k.families.areas import Parallelogram, Rectangle, TrapezoidArea, TriangleArea
from envs.geo3k.families.circles import CircleAngles
from envs.geo3k.families.family import Family, Givens
from envs.geo3k.families.lines import AnglesAtPoint, LinearPair, ParallelLines, VerticalAngles
from envs.geo3k.families.polygons import QuadrilateralAngles
from envs.geo3k.families.proportions import Midsegment, SimilarTriangles
from envs.geo3k.families.right_triangles import RightTriangle, SpecialRight
from envs.geo3k.families.triangles import ExteriorAngle, Isosceles, TriangleAngles

_ALL: tuple[Family, ...] = (
    TriangleAngles(),
    Isosceles(),
    ExteriorAngle(),
    LinearPair(),
    VerticalAngles(),
    AnglesAtPoint(),
    ParallelLines(),
    QuadrilateralAngles(),
    CircleAngles(),
    RightTriangle(),
    SpecialRight(),
    Rectangle(),
    Parallelogram(),
    TriangleArea(),
    TrapezoidArea(),
    Midsegment(),
    SimilarTriangles(),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})

__all__ = ["FAMILIES", "Family", "Givens"]
