"""The theorems by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from starter.textbook.theorem import Theorem
from starter.textbook.theorems import (
    algebra,
    angles,
    areas,
    circle_lengths,
    circles,
    lengths,
    polygons,
    similarity,
    trigonometry,
)

_ALL: tuple[Theorem, ...] = (
    angles.AngleSum(),
    angles.ExteriorAngleTheorem(),
    angles.IsoscelesTriangle(),
    angles.BisectedAngle(),
    angles.AltitudeAngle(),
    angles.CrossingLines(),
    angles.Transversal(),
    angles.ParallelInTriangle(),
    polygons.PolygonAngles(),
    polygons.ParallelogramAngles(),
    polygons.RhombusAngles(),
    polygons.KiteAngles(),
    circles.InscribedAngle(),
    circles.DiameterAngle(),
    circles.CyclicQuadrilateral(),
    circle_lengths.TangentRadius(),
    circles.TangentChord(),
    circle_lengths.TwoTangents(),
    circles.CrossingChords(),
    circles.SecantAngles(),
    circle_lengths.SecantLengths(),
    circle_lengths.ChordDistance(),
    circles.ArcsOfCircle(),
    circle_lengths.ArcLength(),
    circle_lengths.SectorArea(),
    lengths.Pythagoras(),
    lengths.SpecialTriangles(),
    lengths.GeometricMean(),
    similarity.TriangleMidsegment(),
    similarity.TrapezoidMidline(),
    similarity.SideSplitter(),
    similarity.BisectorRatio(),
    similarity.CrossedTriangles(),
    similarity.SimilarPair(),
    similarity.Centroid(),
    lengths.RectangleDiagonals(),
    lengths.RhombusDiagonals(),
    trigonometry.TrigonometricRatio(),
    trigonometry.LawOfSines(),
    trigonometry.LawOfCosines(),
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
