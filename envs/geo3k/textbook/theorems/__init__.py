"""The theorems by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from envs.geo3k.textbook.theorem import Theorem
from envs.geo3k.textbook.theorems import algebra, angles, areas, circles, lengths

_ALL: tuple[Theorem, ...] = (
    angles.AngleSum(),
    angles.ExteriorAngleTheorem(),
    angles.IsoscelesTriangle(),
    angles.BisectedAngle(),
    angles.AltitudeAngle(),
    angles.CrossingLines(),
    angles.Transversal(),
    angles.ParallelInTriangle(),
    angles.PolygonAngles(),
    angles.ParallelogramAngles(),
    angles.RhombusAngles(),
    angles.KiteAngles(),
    circles.InscribedAngle(),
    circles.DiameterAngle(),
    circles.CyclicQuadrilateral(),
    circles.TangentRadius(),
    circles.TangentChord(),
    circles.TwoTangents(),
    circles.CrossingChords(),
    circles.SecantAngles(),
    circles.SecantLengths(),
    circles.ChordDistance(),
    circles.ArcsOfCircle(),
    circles.ArcLength(),
    circles.SectorArea(),
    lengths.Pythagoras(),
    lengths.SpecialTriangles(),
    lengths.GeometricMean(),
    lengths.TriangleMidsegment(),
    lengths.TrapezoidMidline(),
    lengths.SideSplitter(),
    lengths.BisectorRatio(),
    lengths.CrossedTriangles(),
    lengths.SimilarPair(),
    lengths.Centroid(),
    lengths.RectangleDiagonals(),
    lengths.RhombusDiagonals(),
    lengths.TrigonometricRatio(),
    lengths.LawOfSines(),
    lengths.LawOfCosines(),
    lengths.SegmentAddition(),
    algebra.EqualExpressions(),
    algebra.SumOfExpressions(),
    areas.AreaOfTriangle(),
    areas.AreaOfParallelogram(),
    areas.AreaOfTrapezoid(),
    areas.AreaOfRhombus(),
    areas.CompositeArea(),
)

THEOREMS: Mapping[str, Theorem] = MappingProxyType({theorem.name: theorem for theorem in _ALL})
